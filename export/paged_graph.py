"""Decoder → ONNX for CUDA: one graph over packed tokens, whose keys and values are in blocks.

| input | type, shape | |
|---|---|---|
| input_ids, position_ids | int64 [tokens] | new tokens of all sequences, one after the other, and their positions |
| cumulative_sequence_length | int32 [batch + 1] | where each sequence's tokens begin, and the end |
| past_seqlens | int32 [batch] | tokens in each sequence's blocks before the run |
| block_table | int32 [batch, blocks] | which blocks are whose, in order |
| slot_mapping | int32 [tokens] | block · KV_BLOCK_SIZE + place, where each token's key and value go |
| attention_metadata | int32 [3], on the CPU | most new tokens of a sequence, and twice the most of one in all |
| logits_indices | int64 [rows] | which of the tokens want logits |
| past_key_values.{i}.key, .value | [num_blocks, KV_BLOCK_SIZE, n_kv_head, head_dim] | aliased with `present` |
| output logits | float [rows, vocab_size] | |
| output present.{i}.key, .value | as past | |
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.block_weights import quantize_weights
from export.graph import output_names, past_names
from export.kv_cache import measure_scales, scale_kv_channels
from export.trace import name_dimensions, name_weights, trace
from model.bundle import KV_BLOCK_SIZE, WEIGHTS_FILE
from model.config import ConfigError, DecoderConfig
from model.network.attention import Attention, LayerCache
from model.network.decoder import Decoder
from model.network.paged_attention import PagedInputs
from model.progress import Progress, unheard

# Of activations, keys and values; weights of int8 and int4 are rounded on top of that.
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
KV_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # half of the memory for keys and values, rounded
RUN_INPUTS = [
    "input_ids",
    "position_ids",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "slot_mapping",
    "attention_metadata",
    "logits_indices",
]


class PagedGraph(nn.Module):
    """`Decoder.step` over blocks with tensors for arguments; logits in float32."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cumulative_sequence_length: Tensor,
        past_seqlens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        attention_metadata: Tensor,
        logits_indices: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        caches = [LayerCache(key, value) for key, value in zip(past[::2], past[1::2], strict=True)]
        inputs = PagedInputs(
            position_ids,
            cumulative_sequence_length,
            past_seqlens,
            block_table,
            slot_mapping,
            attention_metadata,
        )
        logits, presents = self.decoder.step(input_ids, inputs, logits_indices, caches)
        return logits.float(), *(
            tensor for present in presents for tensor in (present.key, present.value)
        )


def check_pageable(config: DecoderConfig) -> None:
    """Raises ConfigError for a decoder that cannot be exported for CUDA."""
    if config.position in ("alibi", "relative"):
        raise ConfigError(
            f"{config.position} positions bias scores, which ONNX Runtime's PagedAttention cannot; export for the CPU"
        )


def export_paged_graph(
    decoder: Decoder,
    path: Path,
    precision: str = "bf16",
    kv_cache: str | None = None,
    sample: NDArray[np.int64] | None = None,
    progress: Progress = unheard,
) -> None:
    """Write the graph to `path` and its weights beside it, as external data.

    precision: one of DTYPES. kv_cache: one of KV_DTYPES; None is the activations' own type. sample: as of
    `export.graph.export_graph`. Raises ConfigError as `check_pageable`.
    """
    config, dtype = decoder.config, DTYPES[precision]
    check_pageable(config)
    rounded = copy.deepcopy(decoder).eval()
    if kv_cache is not None:
        progress("measuring keys and values", 0, 0)
        parameters = {
            name: parameter.detach().numpy() for name, parameter in rounded.named_parameters()
        }
        scale_kv_channels(parameters, config, measure_scales(decoder, sample))
    rounded = rounded.to(dtype)
    if config.qk_norm:
        _note_shared_norms(rounded)
    progress("tracing PyTorch", 0, 0)
    model = _trace(
        PagedGraph(rounded).eval(), config, dtype if kv_cache is None else KV_DTYPES[kv_cache]
    )
    name_weights(model.graph, rounded)
    if precision in ("int8", "int4"):
        progress(f"rounding weights to {precision}", 0, 0)
        quantize_weights(model, bits=8 if precision == "int8" else 4)
    progress("writing the graph", 0, 0)
    onnx_ir.save(model, path, external_data=WEIGHTS_FILE)


def _note_shared_norms(decoder: Decoder) -> None:
    for module in decoder.modules():
        if isinstance(module, Attention):
            weights = (module.query_norm.weight, module.key_norm.weight)
            module.norms_in_operator = all(bool((weight == weight[0]).all()) for weight in weights)


def _trace(graph: PagedGraph, config: DecoderConfig, kv_dtype: torch.dtype) -> onnx_ir.Model:
    tokens, batch, n_blocks = 5, 2, 3
    blocks = [
        torch.zeros(n_blocks, KV_BLOCK_SIZE, config.n_kv_head, config.head_dim, dtype=kv_dtype)
        for _ in past_names(config)
    ]
    arguments = (
        torch.zeros(tokens, dtype=torch.int64),
        torch.arange(tokens),
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, n_blocks, dtype=torch.int32),
        torch.arange(tokens, dtype=torch.int32),
        torch.tensor([3, 3, 3], dtype=torch.int32),
        torch.arange(batch),
        *blocks,
    )
    free = torch.export.Dim.DYNAMIC
    by_token = {0: free}
    dynamic = (
        by_token,
        by_token,
        {0: free},
        {0: free},
        {0: free, 1: free},
        by_token,
        None,
        {0: free},
    )
    model = trace(
        graph,
        arguments,
        (*dynamic, tuple({0: free} for _ in blocks)),
        [*RUN_INPUTS, *past_names(config)],
        output_names(config),
    )
    shapes: dict[str, list[int | str]] = {
        "input_ids": ["tokens"],
        "position_ids": ["tokens"],
        "cumulative_sequence_length": ["batch + 1"],
        "past_seqlens": ["batch"],
        "block_table": ["batch", "blocks"],
        "slot_mapping": ["tokens"],
        "attention_metadata": [3],
        "logits_indices": ["rows"],
        "logits": ["rows", config.vocab_size],
    }
    name_dimensions(
        model.graph, shapes, cache=["num_blocks", KV_BLOCK_SIZE, config.n_kv_head, config.head_dim]
    )
    return model

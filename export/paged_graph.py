"""Decoder → ONNX for CUDA: one graph over packed tokens, whose keys and values are in blocks.

Inputs are those of RUN_INPUTS, which `PagedInputs` describes, and blocks of keys and values,
past_key_values.{i}.key and .value: [num_blocks, KV_BLOCK_SIZE, n_kv_head, head_dim]. logits_indices
names the tokens that want logits. attention_metadata is the most new tokens of a sequence, and
twice the most in all. Outputs are logits, float [rows, vocab_size], and present.{i}.key and .value,
which are aliased with the past.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray

from export.kv_cache import measure_scales, scale_kv_channels
from export.quantize import quantize_in_blocks
from export.trace import TensorSpec, name_weights, trace
from model.bundle import KV_BLOCK_SIZE, WEIGHTS_FILE
from model.config import ConfigError, DecoderConfig
from model.network.attention import Attention, PagedInputs
from model.network.decoder import Decoder
from model.progress import Progress, unheard

# By precision: the type of activations, keys and values. int8 and int4 round weights as well.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= dict.fromkeys(("int8", "int4"), torch.bfloat16)
# Keys and values in half of the memory, rounded.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
RUN_INPUTS: dict[str, TensorSpec] = {
    "input_ids": (torch.int64, ["tokens"]),
    "position_ids": (torch.int64, ["tokens"]),
    "cumulative_sequence_length": (torch.int32, ["batch + 1"]),
    "past_seqlens": (torch.int32, ["batch"]),
    "block_table": (torch.int32, ["batch", "blocks"]),
    "slot_mapping": (torch.int32, ["tokens"]),
    "attention_metadata": (torch.int32, [3]),
    "logits_indices": (torch.int64, ["rows"]),
}


def check_pageable(config: DecoderConfig) -> None:
    """Raise ConfigError for a decoder that cannot be exported for CUDA."""
    if config.position in ("alibi", "relative"):
        raise ConfigError(
            f"{config.position} positions bias scores, which ONNX Runtime's PagedAttention cannot; "
            "export for the CPU"
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

    precision: one of DTYPES. kv_cache: one of KV_DTYPES; None is the activations' own type. sample:
    see `export.graph.export_graph`. Raises ConfigError as `check_pageable`.
    """
    config, dtype = decoder.config, DTYPES[precision]
    check_pageable(config)
    rounded = copy.deepcopy(decoder).eval()
    if kv_cache is not None:
        progress("measuring keys and values", 0, 0)
        arrays = {name: weight.detach().numpy() for name, weight in rounded.named_parameters()}
        scale_kv_channels(arrays, config, measure_scales(decoder, sample))
    rounded = rounded.to(dtype)
    for module in rounded.modules():
        if isinstance(module, Attention) and config.qk_norm and not config.qk_norm_across_heads:
            weights = (module.query_norm.weight, module.key_norm.weight)
            module.norms_in_operator = all(bool((of == of[0]).all()) for of in weights)
    progress("tracing PyTorch", 0, 0)
    kv_dtype = dtype if kv_cache is None else KV_DTYPES[kv_cache]
    blocks: list[int | str] = ["num_blocks", KV_BLOCK_SIZE, config.n_kv_head, config.head_dim]
    model = trace(rounded, PagedInputs, RUN_INPUTS, (kv_dtype, blocks))
    name_weights(model.graph, rounded)
    if precision in ("int8", "int4"):
        progress(f"rounding weights to {precision}", 0, 0)
        quantize_in_blocks(model, bits=8 if precision == "int8" else 4)
    progress("writing the graph", 0, 0)
    onnx_ir.save(model, path, external_data=WEIGHTS_FILE)

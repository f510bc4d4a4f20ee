"""Transformer → ONNX for a GPU: one graph over packed tokens, whose keys and values are in blocks.

Inputs are those of RUN_INPUTS, which `PagedInputs` describes, and blocks of keys and values,
past_key_values.{i}.key and .value: [num_blocks, KV_BLOCK_SIZE, n_kv_head, head_dim]. logits_indices
names the tokens that want logits. attention_metadata is the most new tokens of a sequence, and
twice the most in all. Outputs are logits, float [rows, vocab_size], present.{i}.key and .value,
which are aliased with the past, and for CUDA the likeliest tokens (`export.graphs.tail`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.export.graphs.tail import add_candidates
from kvasir.export.graphs.trace import TensorSpec, trace
from kvasir.export.rewrite import save
from kvasir.export.rounding.formulas import BITS
from kvasir.export.rounding.kv_cache import scale_kv_channels
from kvasir.export.rounding.quantize import quantize_in_blocks
from kvasir.export.rounding.weights import Inputs, Weights
from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.directory import KV_BLOCK_SIZE, Device
from kvasir.model.network.attention import Attention
from kvasir.model.network.run_inputs import PagedInputs
from kvasir.model.network.skeleton import make_skeleton
from kvasir.model.platform.progress import Progress, no_progress

# By precision: the type of activations, keys and values. int8 and int4 round weights as well.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= dict.fromkeys(("int8", "int4"), torch.bfloat16)
_NOT_IN_WEBGPU = "slot_mapping"  # an input of PagedAttention
# Keys and values in half of the memory, rounded.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FLASH_CHANNELS = 256  # the most of a head for which there are kernels
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


def check_pageable(config: TransformerConfig) -> None:
    """Raise ConfigError for a decoder that cannot be exported for a GPU."""
    if config.position == "alibi" or config.has_relative_bias:
        raise ConfigError(
            f"{config.position} positions bias scores, which ONNX Runtime's PagedAttention cannot; "
            "export for the CPU"
        )
    for name in ("n_experts", "attention_sinks", "latents", "recurrence"):
        if value := getattr(config, name):
            raise ConfigError(f"{name} {value} is exported for the CPU only")


def speed_notes(config: TransformerConfig) -> tuple[str, ...]:
    """Return a note if CUDA has no FlashAttention for the head size."""
    if config.head_dim <= _FLASH_CHANNELS:
        return ()
    return (
        f"head_dim {config.head_dim}: above {_FLASH_CHANNELS} channels CUDA has no FlashAttention, "
        "so long contexts are slow",
    )


def export_paged_graph(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    path: Path,
    precision: str = "bf16",
    kv_cache: str | None = None,
    kv_scales: NDArray[np.float32] | None = None,
    progress: Progress = no_progress,
    device: Device = "cuda",
    inputs: Inputs | None = None,
) -> None:
    """Write the graph to `path` and its weights beside it, as external data.

    precision: one of DTYPES; WebGPU has no bfloat16, so activations there are float16. kv_cache:
    one of KV_DTYPES; None is the activations' own type. weights, inputs and kv_scales, which a
    kv_cache needs: see `export.graphs.decoder.export_graph`. Raises ConfigError as
    `check_pageable`.
    """
    on_webgpu = device == "webgpu"
    dtype = torch.float16 if on_webgpu else DTYPES[precision]
    of_run = dict(RUN_INPUTS)
    if on_webgpu:
        del of_run[_NOT_IN_WEBGPU]
    check_pageable(config)
    converted = Weights(weights, dtype, inputs)
    if kv_cache is not None:
        assert kv_scales is not None, f"{kv_cache} keys and values need scales"
        scale_kv_channels(converted, config, kv_scales)
    progress("tracing PyTorch", 0, 0)
    decoder = make_skeleton(config, dtype)
    for name, module in decoder.named_modules():
        if isinstance(module, Attention) and module.norms_heads and config.has_plain_head_norms:
            norms = (converted.read(f"{name}.{kind}_norm.weight") for kind in ("query", "key"))
            module.norms_in_operator = all(bool((norm == norm[0]).all()) for norm in norms)
    kv_dtype = dtype if kv_cache is None else KV_DTYPES[kv_cache]
    blocks: list[int | str] = ["num_blocks", KV_BLOCK_SIZE, config.n_kv_head, config.head_dim]
    model = trace(decoder, converted, PagedInputs, of_run, (kv_dtype, blocks))
    if precision in BITS:
        quantize_in_blocks(model, converted, bits=BITS[precision])
    if not on_webgpu:
        add_candidates(model.graph, config.vocab_size)
    save(model, path, progress)

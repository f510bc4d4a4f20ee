"""Transformer → ONNX: one graph for prefill, chunks, decode and scoring, as the server binds it.

Inputs are those of STEP_INPUTS, which `StepInputs` describes, and rows of keys and values,
past_key_values.{i}.key and .value: float [batch, n_kv_head, n_positions, head_dim]. logits_indices
names those of the batch · sequence positions that want logits. Outputs are logits, float [rows,
vocab_size], and present.{i}.key and .value, which are aliased with the past.

int8 and int4 have rows of int8 under these names, which the input `decode` (a bool) chooses, and
rows of floats for prompts beside them: prompt_key_values.{i}.key, .value and
prompt_present.{i}.key, .value (export.rounding.kv_cache).

A recurrent layer has in their place past_states.{i}.{part}, of `TransformerConfig.states`, and
present_states.{i}.{part}, floats in every precision: what they are after the first n_new tokens
[batch] of each row.

A decoder with an encoder also reads SOURCE_INPUTS and keys and values of sources,
source_key_values.{i}.key and .value: float [batch, n_kv_head, n_source_positions, head_dim], which
`export.graphs.source` makes. It has rows of floats only, and no input `decode`. A run of several
tokens a row takes one row, whose source is no shorter.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.export.graphs.trace import SOURCE_INPUTS, TensorSpec, trace
from kvasir.export.rewrite import contents, save
from kvasir.export.rounding.experts import place_experts
from kvasir.export.rounding.kv_cache import quantize_kv_cache, scale_kv_channels
from kvasir.export.rounding.quantize import quantize
from kvasir.export.rounding.weights import TRANSPOSED, Inputs, Weights
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import NEW_TOKENS_INPUT
from kvasir.model.network.run_inputs import StepInputs
from kvasir.model.network.skeleton import make_target_skeleton
from kvasir.model.network.transformer import Transformer
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.tensor_files import LazyWeights

STEP_INPUTS: dict[str, TensorSpec] = {
    "input_ids": (torch.int64, ["batch", "sequence"]),
    "seqlens_k": (torch.int32, ["batch"]),
    "total_sequence_length": (torch.int32, []),
    "position_ids": (torch.int64, ["batch", "sequence"]),
    "logits_indices": (torch.int64, ["rows"]),
}
_PARAMETERS = "kvasir.parameters"  # metadata: {decoder's parameter: graph's initializer}


def export_graph(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    path: Path,
    precision: str = "fp32",
    kv_scales: NDArray[np.float32] | None = None,
    progress: Progress = no_progress,
    *,
    int8_prompts: bool = True,
    kept: Container[str] = (),
    inputs: Inputs | None = None,
) -> Weights:
    """Write the graph to `path` and its weights beside it, as external data; return these.

    weights: the decoder's parameters, each read when it is written. precision: one of PRECISIONS
    for the CPU. kv_scales: of `KVScales.steps`, for int8 and int4, which round keys and values.
    int8_prompts: prompts of int4 have int8 weights. kept: see `quantize`. inputs: of `Weights`, to
    round to int4 by.
    """
    scaled, decoder = Weights(weights, inputs=inputs), make_target_skeleton(config)
    # Put attention's scale into the weights that make queries; the operator's own is 1. ONNX
    # Runtime's product of one query and the cached keys reads the keys in place only where there is
    # no scale to apply; otherwise it copies them first.
    ranks = {name: parameter.dim() for name, parameter in decoder.state_dict().items()}
    for name, factors in _query_scales(config, ranks).items():
        scaled.scale(name, factors)
    rounds_cache = precision != "fp32" and config.encoder is None
    if rounds_cache:
        assert kv_scales is not None, f"{precision} needs scales of keys and values"
        scale_kv_channels(scaled, config, kv_scales)
    progress("tracing PyTorch", 0, 0)
    rows: list[int | str] = ["batch", config.n_kv_head, "n_positions", config.head_dim]
    of_step = STEP_INPUTS | SOURCE_INPUTS if config.n_source_layer else STEP_INPUTS
    if config.recurrence is not None:
        of_step = of_step | {NEW_TOKENS_INPUT: (torch.int64, ["batch"])}
    model = trace(decoder, scaled, StepInputs, of_step, (torch.float32, rows))
    place_experts(model, scaled, precision)
    if precision == "fp32":
        record_parameters(model, decoder)
    else:
        if rounds_cache:
            quantize_kv_cache(model, config, whole_layers=precision == "int4" and int8_prompts)
        quantize(model, scaled, precision, kept=kept)
    save(model, path, progress)
    return scaled


def record_parameters(model: onnx_ir.Model, network: Transformer) -> None:
    """Note in an fp32 graph which initializer each parameter is."""
    names = {name.removesuffix(TRANSPOSED): name for name in model.graph.initializers}
    of_parameters = {name: names[name] for name in network.state_dict()}
    model.metadata_props[_PARAMETERS] = json.dumps(of_parameters)


def load_weights(config: TransformerConfig, path: Path) -> Mapping[str, Tensor]:
    """Return the parameters that an fp32 graph was made from, each read when it is looked up.

    Raises ValueError for a quantised graph.
    """
    model = onnx_ir.load(path)
    if _PARAMETERS not in model.metadata_props:
        raise ValueError(
            f"{path} is quantised and no longer holds the decoder's weights; "
            "name its checkpoint: --against"
        )
    names, initializers = json.loads(model.metadata_props[_PARAMETERS]), model.graph.initializers
    attentions = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    is_scaled = any(node.attributes["scale"].as_float() == 1.0 for node in attentions)
    ranks = {name: len(initializers[stored].shape or ()) for name, stored in names.items()}
    scales = _query_scales(config, ranks) if is_scaled else {}

    def read(name: str, initializer: str) -> Tensor:
        values = torch.from_numpy(contents(initializers[initializer]).copy())
        values = values.t() if initializer.endswith(TRANSPOSED) else values
        return values / torch.from_numpy(scales[name]) if name in scales else values

    return LazyWeights(
        {name: partial(read, name, initializer) for name, initializer in names.items()}
    )


def _query_scales(
    config: TransformerConfig, ranks: Mapping[str, int]
) -> dict[str, NDArray[np.float32]]:
    """Return factors that give queries attention's scale, for the rows of parameters by name.

    ranks: the number of each parameter's dimensions.
    """
    rows = np.ones((config.n_head + 2 * config.n_kv_head) * config.head_dim, dtype=np.float32)
    rows[: config.n_head * config.head_dim] = config.query_scale
    alike = np.full(1, config.query_scale, dtype=np.float32)
    of_parts = {".attention.query.": alike, ".cross_attention.query.": alike}
    if config.qkv_clip is not None:
        of_parts[".attention.clip."] = rows
    else:
        of_parts |= {".attention.query_norm.": alike, ".attention.qkv.": rows}
    normed = (layer for layer in range(config.n_layer) if config.norms_heads(layer))
    before_norms = tuple(f"blocks.{layer}.attention.qkv." for layer in normed)
    # [rows, 1] for matrices
    return {
        name: scales[:, None] if rank > 1 else scales
        for name, rank in ranks.items()
        for part, scales in of_parts.items()
        if part in name and not name.startswith(before_norms)
    }

"""Decoder → ONNX: one graph for prefill, chunks, decode and scoring, as the server binds it.

Inputs are those of STEP_INPUTS, which `StepInputs` describes, and rows of keys and values,
past_key_values.{i}.key and .value: float [batch, n_kv_head, n_positions, head_dim]. logits_indices
names those of the batch · sequence positions that want logits. Outputs are logits, float [rows,
vocab_size], and present.{i}.key and .value, which are aliased with the past.

int8 and int4 have rows of int8 under these names, which the input `decode` (a bool) chooses, and
rows of floats for prompts beside them: prompt_key_values.{i}.key, .value and
prompt_present.{i}.key, .value (export.kv_cache).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray

from export.kv_cache import measure_scales, quantize_kv_cache, scale_kv_channels
from export.quantize import quantize
from export.rewrite import contents
from export.trace import TRANSPOSED, TensorSpec, name_weights, trace
from model.bundle import WEIGHTS_FILE
from model.config import DecoderConfig
from model.network.attention import StepInputs
from model.network.decoder import Decoder
from model.progress import Progress, unheard

STEP_INPUTS: dict[str, TensorSpec] = {
    "input_ids": (torch.int64, ["batch", "sequence"]),
    "seqlens_k": (torch.int32, ["batch"]),
    "total_sequence_length": (torch.int32, []),
    "position_ids": (torch.int64, ["batch", "sequence"]),
    "logits_indices": (torch.int64, ["rows"]),
}
_PARAMETERS = "kvasir.parameters"  # metadata: {decoder's parameter: graph's initializer}


def export_graph(
    decoder: Decoder,
    path: Path,
    precision: str = "fp32",
    sample: NDArray[np.int64] | None = None,
    progress: Progress = unheard,
) -> None:
    """Write the graph to `path` and its weights beside it, as external data.

    precision: one of PRECISIONS for the CPU. sample: [rows, tokens] of a text that shows how large
    keys and values get, where they are rounded; None is random tokens.
    """
    config = decoder.config
    # A copy, whose attention alone has weights of its own, because they are scaled.
    others: dict[int, Any] = {
        id(weight): weight
        for name, weight in decoder.named_parameters()
        if ".attention." not in name
    }
    scaled = copy.deepcopy(decoder, others)
    arrays = {name: weight.detach().numpy() for name, weight in scaled.named_parameters()}
    # Put attention's scale into the weights that make queries; the operator's own is 1. ONNX
    # Runtime's product of one query and the cached keys reads the keys in place only where there is
    # no scale to apply; otherwise it copies them first.
    for name in _query_makers(config, arrays):
        arrays[name][: config.n_head * config.head_dim] *= config.query_scale
    if precision != "fp32":
        scales = measure_scales(config, decoder.state_dict(), sample, progress)
        scale_kv_channels(arrays, config, scales)
    progress("tracing PyTorch", 0, 0)
    rows: list[int | str] = ["batch", config.n_kv_head, "n_positions", config.head_dim]
    model = trace(scaled, StepInputs, STEP_INPUTS, (torch.float32, rows))
    names = name_weights(model.graph, scaled)
    missing = arrays.keys() - names
    assert not missing, f"parameters {sorted(missing)} are not in the graph"
    if precision == "fp32":
        model.metadata_props[_PARAMETERS] = json.dumps(names)
    else:
        progress(f"rounding weights to {precision}", 0, 0)
        quantize(model, precision)
        quantize_kv_cache(model, config)
    progress("writing the graph", 0, 0)
    onnx_ir.save(model, path, external_data=WEIGHTS_FILE)


def load_decoder(config: DecoderConfig, path: Path) -> Decoder:
    """Rebuild the decoder of an fp32 graph; raise ValueError for a quantised one."""
    model = onnx_ir.load(path)
    if _PARAMETERS not in model.metadata_props:
        raise ValueError(
            f"{path} is quantised and no longer holds the decoder's weights; "
            "name its source: --checkpoint"
        )
    decoder = Decoder(config).eval()
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, initializer in json.loads(model.metadata_props[_PARAMETERS]).items():
            values = torch.from_numpy(contents(model.graph.initializers[initializer]).copy())
            parameters[name].copy_(values.T if initializer.endswith(TRANSPOSED) else values)
        attentions = (node for node in model.graph if node.op_type == "GroupQueryAttention")
        if any(node.attributes["scale"].as_float() == 1.0 for node in attentions):
            for name in _query_makers(config, parameters):
                parameters[name][: config.n_head * config.head_dim] /= config.query_scale
    return decoder


def _query_makers(config: DecoderConfig, names: Iterable[str]) -> list[str]:
    """Return the parameters whose first n_head · head_dim rows make queries of their input."""
    part = ".attention.query_norm." if config.qk_norm else ".attention.qkv."
    return [name for name in names if part in name]

"""Decoder → ONNX: one graph for prefill, chunks, decode and scoring, with the names and shapes that the server binds.

| input | type, shape | |
|---|---|---|
| input_ids, position_ids | int64 [batch, sequence] | new tokens and their absolute positions |
| seqlens_k | int32 [batch] | tokens in each row after the run, minus one |
| total_sequence_length | int32 scalar | tokens in the longest row after the run |
| logits_indices | int64 [rows] | which of the batch · sequence positions want logits |
| past_key_values.{i}.key, .value | float [batch, n_kv_head, n_positions, head_dim] | rows, aliased with `present` |
| output logits | float [rows, vocab_size] | |
| output present.{i}.key, .value | as past | |

int8 and int4 have rows of int8 under these names, which the input `decode` (a bool) chooses, and rows of floats for
prompts beside them: prompt_key_values.{i}.key, .value and prompt_present.{i}.key, .value (export.kv_cache).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.kv_cache import measure_scales, quantize_kv_cache, scale_kv_channels
from export.quantize import quantize
from export.trace import TRANSPOSED, name_dimensions, name_weights, trace
from model.bundle import WEIGHTS_FILE
from model.config import DecoderConfig
from model.network.attention import LayerCache, StepInputs
from model.network.decoder import Decoder
from model.progress import Progress, unheard

_PARAMETERS = "kvasir.parameters"  # metadata: {decoder's parameter: graph's initializer}
STEP_INPUTS = ["input_ids", "seqlens_k", "total_sequence_length", "position_ids", "logits_indices"]


def past_names(config: DecoderConfig) -> list[str]:
    return [
        f"past_key_values.{i}.{kind}" for i in range(config.n_layer) for kind in ("key", "value")
    ]


def prompt_names(config: DecoderConfig) -> list[str]:
    return [name.replace("past", "prompt") for name in past_names(config)]


def input_names(config: DecoderConfig) -> list[str]:
    return [*STEP_INPUTS, *past_names(config)]


def output_names(config: DecoderConfig) -> list[str]:
    return [
        "logits",
        *(f"present.{i}.{kind}" for i in range(config.n_layer) for kind in ("key", "value")),
    ]


class ServingGraph(nn.Module):
    """`Decoder.step` with tensors for arguments, as the graph's inputs and outputs need it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        input_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        position_ids: Tensor,
        logits_indices: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        caches = [LayerCache(key, value) for key, value in zip(past[::2], past[1::2], strict=True)]
        inputs = StepInputs(seqlens_k, total_sequence_length, position_ids)
        logits, presents = self.decoder.step(input_ids, inputs, logits_indices, caches)
        return logits, *(tensor for present in presents for tensor in (present.key, present.value))


def export_graph(
    decoder: Decoder,
    path: Path,
    precision: str = "fp32",
    sample: NDArray[np.int64] | None = None,
    progress: Progress = unheard,
) -> None:
    """Write the graph to `path` and its weights beside it, as external data.

    precision: one of PRECISIONS for the CPU. sample: [rows, tokens] of a text that shows how far keys and values reach,
    where they are rounded; None is random tokens.
    """
    config = decoder.config
    progress("tracing PyTorch", 0, 0)
    model = _trace(ServingGraph(decoder).eval(), config)
    names = name_weights(model.graph, decoder)
    missing = dict(decoder.named_parameters()).keys() - names
    assert not missing, f"parameters {sorted(missing)} are not in the graph"
    _separate_head_norms(model.graph, names)
    _scale_queries(model.graph, names, config)
    if precision == "fp32":
        model.metadata_props[_PARAMETERS] = json.dumps(names)
    else:
        progress("measuring keys and values", 0, 0)
        scale_kv_channels(_writable(model.graph, names), config, measure_scales(decoder, sample))
        progress(f"rounding weights to {precision}", 0, 0)
        quantize(model, precision)
        quantize_kv_cache(model, config)
    progress("writing the graph", 0, 0)
    onnx_ir.save(model, path, external_data=WEIGHTS_FILE)


def load_decoder(config: DecoderConfig, path: Path) -> Decoder:
    """The decoder that an fp32 graph was exported from, its parameters taken out of the graph.

    Raises ValueError for a quantised graph, which no longer holds them.
    """
    model = onnx_ir.load(path)
    if _PARAMETERS not in model.metadata_props:
        raise ValueError(
            f"{path} is quantised and no longer holds the decoder's weights; name its source: --checkpoint"
        )
    decoder = Decoder(config).eval()
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, initializer in json.loads(model.metadata_props[_PARAMETERS]).items():
            stored = model.graph.initializers[initializer].const_value
            assert stored is not None
            values = torch.from_numpy(stored.numpy().copy())
            parameters[name].copy_(values.T if initializer.endswith(TRANSPOSED) else values)
        if any(
            node.attributes.get_float("scale", 0.0) == 1.0
            for node in model.graph
            if _is_attention(node)
        ):
            for name, parameter in parameters.items():
                if makes_queries(name, config):
                    parameter[: config.n_head * config.head_dim] /= config.query_scale
    return decoder


def _scale_queries(graph: onnx_ir.Graph, names: dict[str, str], config: DecoderConfig) -> None:
    """Put attention's scale into the weights that make queries; the operator's own is 1.

    ONNX Runtime's product of one query and the cached keys reads the keys in place only where there is no scale to
    apply; otherwise it copies them first.
    """
    queries = _writable(
        graph, {name: held for name, held in names.items() if makes_queries(name, config)}
    )
    for array in {id(array): array for array in queries.values()}.values():
        array[: config.n_head * config.head_dim] *= config.query_scale


def _writable(graph: onnx_ir.Graph, names: dict[str, str]) -> dict[str, NDArray[np.float32]]:
    """The graph's weights by the decoder's names and in its layout; to write to them is to change the graph."""
    arrays: dict[str, NDArray[np.float32]] = {}
    for initializer in set(names.values()):
        value = graph.initializers[initializer]
        assert value.const_value is not None
        array = value.const_value.numpy().copy()
        value.const_value = onnx_ir.tensor(array, name=initializer)
        arrays[initializer] = array.T if initializer.endswith(TRANSPOSED) else array
    return {name: arrays[initializer] for name, initializer in names.items()}


def makes_queries(parameter: str, config: DecoderConfig) -> bool:
    """Whether a parameter's first n_head · head_dim rows are what multiplies its input to become queries."""
    return (".attention.query_norm." if config.qk_norm else ".attention.qkv.") in parameter


def _is_attention(node: onnx_ir.Node) -> bool:
    return node.op_type == "GroupQueryAttention"


def _separate_head_norms(graph: onnx_ir.Graph, names: dict[str, str]) -> None:
    """Give each layer's head norm a weight of its own, in place: the exporter keeps one copy of equal ones.

    Uses of one weight come in the order of the layers, as the names do.
    """
    shared: dict[str, list[str]] = {}
    for name, initializer in names.items():
        if name.endswith("_norm.weight") and ".attention." in name:
            shared.setdefault(initializer, []).append(name)
    places = {node: place for place, node in enumerate(graph)}
    for initializer, holders in shared.items():
        value = graph.initializers[initializer]
        assert value.const_value is not None
        uses = sorted(value.uses(), key=lambda use: places[use[0]])
        for name, (node, index) in zip(holders[1:], uses[1:], strict=True):
            tensor = onnx_ir.tensor(value.const_value.numpy().copy(), name=name)
            own = onnx_ir.Value(name=name, shape=value.shape, type=value.type, const_value=tensor)
            graph.register_initializer(own)
            node.replace_input_with(index, own)
            names[name] = name


def _trace(graph: ServingGraph, config: DecoderConfig) -> onnx_ir.Model:
    batch, sequence, n_positions = 2, 3, 4
    rows = [
        torch.zeros(batch, config.n_kv_head, n_positions, config.head_dim)
        for _ in past_names(config)
    ]
    arguments = (
        torch.zeros(batch, sequence, dtype=torch.int64),
        torch.full((batch,), sequence - 1, dtype=torch.int32),
        torch.tensor(sequence, dtype=torch.int32),
        torch.zeros(batch, sequence, dtype=torch.int64),
        torch.arange(2),
        *rows,
    )
    free = torch.export.Dim.DYNAMIC
    tokens = {0: free, 1: free}
    dynamic = (tokens, {0: free}, None, tokens, {0: free}, tuple({0: free, 2: free} for _ in rows))
    model = trace(graph, arguments, dynamic, input_names(config), output_names(config))
    shapes: dict[str, list[int | str]] = {
        "input_ids": ["batch", "sequence"],
        "position_ids": ["batch", "sequence"],
        "seqlens_k": ["batch"],
        "total_sequence_length": [],
        "logits_indices": ["rows"],
        "logits": ["rows", config.vocab_size],
    }
    name_dimensions(
        model.graph, shapes, cache=["batch", config.n_kv_head, "n_positions", config.head_dim]
    )
    return model

"""Transformer with a pooling → ONNX for the CPU: one graph over packed texts.

Inputs are input_ids, int64 [tokens], those of `PackedInputs` and, where the network has token
types, token_type_ids, int64 [tokens]. Outputs are the texts' vectors, float [texts, d_out], and
those of their tokens, float [tokens, d_model].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.tape import Tape
from torch import Tensor, nn
from torch.nn import functional

from kvasir.export.graphs.decoder import record_parameters
from kvasir.export.graphs.trace import TensorSpec, trace_module
from kvasir.export.rewrite import lazy_constant, remove_unused_constants, replace_node, save
from kvasir.export.rounding.formulas import quantize_pairs
from kvasir.export.rounding.quantize import products, quantize
from kvasir.export.rounding.weights import TRANSPOSED, Weights
from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import LayerCache
from kvasir.model.network.block import Block
from kvasir.model.network.run_inputs import PackedInputs
from kvasir.model.network.skeleton import make_skeleton
from kvasir.model.network.transformer import Transformer
from kvasir.model.packing import HIDDEN_OUTPUT, TYPES_INPUT, VECTORS_OUTPUT
from kvasir.model.platform.progress import Progress, no_progress

PACKED_INPUTS: dict[str, TensorSpec] = {
    "input_ids": (torch.int64, ["tokens"]),
    "position_ids": (torch.int64, ["tokens"]),
    "rows": (torch.int64, ["texts", "sequence"]),
    "lengths": (torch.int64, ["texts"]),
    "places": (torch.int64, ["tokens"]),
}


class PackedGraph(nn.Module):
    """A network over packed texts, with tensors as arguments."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.network = network

    def hidden(self, *tensors: Tensor) -> Tensor:
        """Return the vectors of tokens [tokens, d_model] after the last norm.

        tensors: those of PACKED_INPUTS and, where the network has token types, these.
        """
        network, (input_ids, position_ids, rows, lengths, places, *types) = self.network, tensors
        inputs = PackedInputs(position_ids, rows, lengths, places)
        place = torch.arange(rows.shape[1])
        x = network.embed(input_ids, position_ids, *types)
        is_rotary = network.config.position == "rotary"  # others are biases of rows
        positions = network.positions(position_ids if is_rotary else place[None], lambda: place)
        no_cache = LayerCache(x, x)
        for block in network.blocks:
            assert isinstance(block, Block)
            x, _ = block.step(x, positions, inputs, no_cache)
        normed: Tensor = network.norm(x)
        return normed


class EncoderGraph(PackedGraph):
    """A network that makes vectors."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors of texts and of tokens."""
        network, (_, _, rows, lengths, *_) = self.network, tensors
        hidden = self.hidden(*tensors)
        assert network.pooler is not None
        pooled = network.pooler.pool(functional.embedding(rows, hidden), lengths)
        # A product of one row rounds differently, so each text is projected twice.
        projected = network.pooler.project(torch.cat((pooled, pooled)))
        return projected[: rows.shape[0]], hidden


def export_encoder_graph(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    path: Path,
    precision: str = "fp32",
    progress: Progress = no_progress,
) -> None:
    """Write the graph to `path` and its weights beside it, as external data.

    weights: the network's parameters, each read when it is written. precision: fp32 or int8.
    """
    network = make_skeleton(config)
    assert config.pooling is not None
    d_out = config.pooling.projections[-1].d_out if config.pooling.projections else config.d_model
    outputs: dict[str, list[int | str]] = {
        VECTORS_OUTPUT: ["texts", d_out],
        HIDDEN_OUTPUT: ["tokens", config.d_model],
    }
    export_packed(EncoderGraph(network), Weights(weights), outputs, path, precision, progress)


def export_packed(
    graph: PackedGraph,
    weights: Weights,
    outputs: dict[str, list[int | str]],
    path: Path,
    precision: str,
    progress: Progress,
) -> None:
    """Trace a network over packed texts, round it, and write it; outputs: their shapes by name."""
    progress("tracing PyTorch", 0, 0)
    inputs = dict(PACKED_INPUTS)
    if graph.network.config.n_token_types is not None:
        inputs[TYPES_INPUT] = (torch.int64, ["tokens"])
    model = trace_module(graph, weights, inputs, outputs)
    if precision == "fp32":
        record_parameters(model, graph.network)
    else:
        _separate_biases(model.graph, weights)
        quantize(model, weights, precision, rank=2, rounder=quantize_pairs)
    save(model, path, progress)


def _separate_biases(graph: ir.Graph, weights: Weights) -> None:
    """Make x Wᵀ + b, which torch makes one node for packed tokens, a product and a sum."""
    for node in products(graph):
        x, weight, *bias = node.inputs
        assert weight is not None
        if node.op_type != "Gemm" or weight.shape is None:
            continue
        name = str(weight.name)
        read = partial(weights.read, name, transposed=True)
        shape = weight.shape.numpy()[::-1]
        matrix = lazy_constant(graph, name + TRANSPOSED, read, weights.dtype, shape)
        tape = Tape()
        product = tape.op("MatMul", [x, matrix])
        result = tape.op("Add", [product, *bias]) if bias else product
        replace_node(node, tape.nodes, result)
    remove_unused_constants(graph)

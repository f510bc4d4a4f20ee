"""The output `lens` of the second graph: what follows the last layer, over every layer's output."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from kvasir.export.rewrite import constant, copy_node
from kvasir.model.directory import LENS_OUTPUT

_LAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.")  # in the name of a parameter


def add_output(graph: ir.Graph, value: ir.Value, name: str, shape: list[int | str]) -> None:
    """Give the graph a float output: a value of this name and shape."""
    value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    graph.outputs.append(value)


def add_lens(graph: ir.Graph, indices: ir.Value) -> None:
    """Give the graph the output `lens`: what follows the last layer, over every layer's output.

    Logits become a part of it: on x86 without VNNI ONNX Runtime opens no graph with two products of
    one matrix.
    """
    select = next(node for node in graph if node.op_type == "Gather" and _reads(node, indices))
    flatten = select.inputs[0].producer() if select.inputs[0] else None
    assert flatten is not None
    last, reached = flatten.inputs[0], {select.outputs[0]}
    assert last is not None
    nodes: list[ir.Node] = []
    rows = [
        _repeat([flatten, select], flatten.inputs[0], residual, nodes)
        for residual in (*_between_layers(graph), last)
    ]
    nodes.append(ir.node("Concat", rows, {"axis": 0}))
    tail = []
    for node in graph:
        if reached.intersection(node.inputs):
            tail.append(node)
            reached.update(node.outputs)
    lens = _repeat(tail, select.outputs[0], nodes[-1].outputs[0], nodes)
    logits = graph.outputs.pop()
    assert logits.shape is not None
    (*_, n_vocab), tape = logits.shape.dims, Tape()
    assert isinstance(n_vocab, int)
    apart = constant(graph, "layers_apart", np.array([len(rows), -1, n_vocab]))
    last_layer = constant(graph, "last_layer", np.array(len(rows) - 1))
    own = tape.op("Gather", [tape.op("Reshape", [lens, apart]), last_layer], {"axis": 0})
    own = tape.op("Reshape", [own, constant(graph, "layers_joined", np.array([-1, n_vocab]))])
    graph.insert_after(tail[-1], [*nodes, *tape.nodes])
    logits.name = "logits.alone"
    add_output(graph, own, "logits", ["rows", n_vocab])
    add_output(graph, lens, LENS_OUTPUT, ["layers · rows", "vocab_size"])


def _reads(node: ir.Node, value: ir.Value) -> bool:
    """Return whether a node chooses rows by a value, or by its reshaped form."""
    index = node.inputs[1]
    producer = index.producer() if index is not None else None
    return index is value or (producer is not None and producer.inputs[0] is value)


def _between_layers(graph: ir.Graph) -> list[ir.Value]:
    """Return what each layer but the last hands to the next.

    If later layers read several values of a layer, take the first; the others are computed from it.
    A node's layer is the last whose parameters it depends on, shapes apart.
    """
    layers: dict[ir.Value | None, int] = {}
    outputs: dict[int, ir.Value] = {}
    positions: dict[ir.Value | None, int] = {}
    for position, node in enumerate(graph):
        names = (str(value.name) for value in node.inputs if value)
        own = [int(match[1]) for name in names if (match := _LAYER.search(name))]
        layer = max([-1, *own, *(layers.get(value, -1) for value in node.inputs)])
        for value in node.inputs:
            before = layers.get(value, -1)
            if value is None or not 0 <= before < layer:
                continue
            if before not in outputs or positions[value] < positions[outputs[before]]:
                outputs[before] = value
        if node.op_type != "Shape":
            layers |= dict.fromkeys(node.outputs, layer)
            positions |= dict.fromkeys(node.outputs, position)
    return [outputs[layer] for layer in sorted(outputs)]


def _repeat(
    nodes: Sequence[ir.Node], old: ir.Value | None, new: ir.Value, copies: list[ir.Node]
) -> ir.Value:
    """Append copies of nodes that read `new` in place of `old`; return the last one's output."""
    own: dict[ir.Value | None, ir.Value] = {old: new}
    for node in nodes:
        copies.append(copy_node(node, [own.get(value, value) for value in node.inputs]))
        own |= zip(node.outputs, copies[-1].outputs, strict=True)
    return copies[-1].outputs[0]

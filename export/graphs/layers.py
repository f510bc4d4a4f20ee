"""One traced layer repeated for all like it: `Block.step` marks where a layer begins and ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

import onnx_ir
from torch import nn

from kvasir.export.rewrite import copy_node
from kvasir.model.network.block import LAYER_MARK

# Of the name of a parameter, or of an input or output of the graph: its layer.
LAYER = re.compile(
    r"((?:^|\.)blocks\.|^(?:past|source)_key_values\.|^present\.|^(?:past|present)_states\.)"
    r"(\d+)(?=\.)"
)


def kind_of(block: nn.Module) -> str:
    """Return what the nodes of a block depend on: equal for blocks that become equal graphs."""
    modules = [
        (name, type(part), {key: value for key, value in vars(part).items() if key[0] != "_"})
        for name, part in block.named_modules()
    ]
    return repr(
        (modules, [(name, parameter.shape) for name, parameter in block.named_parameters()])
    )


def layer_of(name: str) -> int | None:
    """Return the layer that a parameter, or an input or output of the graph, belongs to."""
    match = LAYER.search(name)
    return int(match[2]) if match else None


def repeat_layers(
    model: onnx_ir.Model, parameters: Sequence[onnx_ir.Value], traced: Sequence[int]
) -> list[onnx_ir.Value]:
    """Make a graph of some layers one of all, in place, and return the parameters of all.

    traced: for each layer, the place of its like among those that the graph has.
    """
    graph, domain = model.graph, LAYER_MARK.partition("::")[0]
    marks = [node for node in graph if node.domain == domain]
    begins, ends = marks[::2], marks[1::2]
    given = [*parameters, *graph.inputs]
    owners = {value: layer for value in given if (layer := layer_of(str(value.name))) is not None}
    owners |= {node.outputs[0]: layer for layer, node in enumerate(begins)}
    nodes: list[list[onnx_ir.Node]] = [[] for _ in begins]
    for node in graph:  # those that read no layer's input, parameters or cache are shared
        layers = {owners[value] for value in node.inputs if value in owners}
        if layers and node not in marks:
            (layer,) = layers
            nodes[layer].append(node)
            owners |= dict.fromkeys(node.outputs, layer)
    x, copies = cast("onnx_ir.Value", begins[0].inputs[0]), list[onnx_ir.Node]()
    inputs, of_all, outputs = (
        [value for value in values if value not in owners]
        for values in (graph.inputs, parameters, graph.outputs)
    )
    for layer, like in enumerate(traced):
        own: dict[onnx_ir.Value | None, onnx_ir.Value]
        own = {value: _of(value, layer) for value in given if owners.get(value) == like}
        inputs += [own[value] for value in graph.inputs if value in own]
        of_all += [own[value] for value in parameters if value in own]
        own[begins[like].outputs[0]] = x
        for node in nodes[like]:
            copies.append(copy_node(node, [own.get(value, value) for value in node.inputs]))
            for old, new in zip(node.outputs, copies[-1].outputs, strict=True):
                new.name, new.type = f"{layer}.{old.name}", old.type
                own[old] = new
        for value in (value for value in graph.outputs if owners.get(value) == like):
            own[value].name = _of(value, layer).name
            outputs.append(own[value])
        x = own[ends[like].inputs[0]]
    graph.insert_before(ends[-1], copies)
    graph.inputs[:], graph.outputs[:] = inputs, outputs
    last = ends[-1].outputs[0]  # of a network without a last norm it is an output
    onnx_ir.convenience.replace_all_uses_with(last, x, replace_graph_outputs=True)
    x.name = last.name
    graph.remove([*marks, *(node for part in nodes for node in part)], safe=True)
    del model.opset_imports[domain]
    return of_all


def _of(value: onnx_ir.Value, layer: int) -> onnx_ir.Value:
    """Return a parameter, an input or an output as another layer has it."""
    name = LAYER.sub(rf"\g<1>{layer}", str(value.name))
    return onnx_ir.val(name, type=value.type, shape=value.shape)

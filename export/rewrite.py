"""Small edits of an exported graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype
from torch import Tensor

from kvasir.model.platform.progress import Progress

PROMPT = "prompt."  # begins the names of the branches that compute prompts
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators


def constant(graph: ir.Graph, name: str, array: NDArray[np.generic]) -> ir.Value:
    """Return the initializer of this name, made of `array` unless it is there already."""
    if name not in graph.initializers:
        tensor = ir.tensor(np.ascontiguousarray(array), name=name)
        graph.register_initializer(ir.val(name, const_value=tensor))
    return graph.initializers[name]


def lazy_constant(
    graph: ir.Graph, name: str, make: Callable[[], Tensor], dtype: torch.dtype, shape: Sequence[int]
) -> ir.Value:
    """Return the initializer of this name, made when the graph is saved unless it is there already.

    make: returns a contiguous tensor of this type and shape; nothing keeps it.
    """
    if name not in graph.initializers:
        kind, sizes = from_torch_dtype(dtype), ir.Shape(shape)
        tensor = ir.LazyTensor(lambda: TorchTensor(make()), kind, sizes, name=name)
        graph.register_initializer(ir.val(name, const_value=tensor))
    return graph.initializers[name]


def contents(value: ir.Value) -> NDArray[np.float32]:
    """Return an initializer's array."""
    assert value.const_value is not None
    return value.const_value.numpy()


def copy_node(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    """Return a node of the same kind, with other inputs and outputs of its own."""
    return ir.node(
        node.op_type,
        inputs,
        attributes={name: attribute.value for name, attribute in node.attributes.items()},
        domain=node.domain,
        num_outputs=len(node.outputs),
    )


def owner_of(node: ir.Node) -> ir.Graph:
    """Return the graph, or the branch, that a node is in."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def branches(graph: ir.Graph) -> list[ir.Graph]:
    """Return both branches of every `If`."""
    choices = (node for node in graph if node.op_type == "If")
    return [branch.as_graph() for node in choices for branch in node.attributes.values()]


def replace_node(node: ir.Node, new: Sequence[ir.Node], *outputs: ir.Value) -> None:
    """Put other nodes in a node's place; `outputs` take the place and names of its outputs."""
    graph = owner_of(node)
    graph.insert_before(node, new)
    for old, value in zip(node.outputs, outputs, strict=True):
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        value.name, value.shape, value.type = old.name, old.shape, old.type
    graph.remove(node, safe=True)


def take_branch(choice: ir.Node, name: str) -> None:
    """Put the nodes of one of an `If`'s branches in its place, but for unused ones."""
    branch, graph = choice.attributes[name].as_graph(), owner_of(choice)
    nodes, outputs = list(branch), list(branch.outputs)
    branch.outputs.clear()
    branch.remove(nodes)
    for node in nodes:
        node.name = f"{branch.name}.{node.name}"  # branches may use the same names
    graph.insert_before(choice, nodes)
    ir.convenience.replace_all_uses_with(choice.outputs, outputs)
    graph.remove(choice, safe=True)
    for attribute in choice.attributes.values():  # else what only branches used looks used
        for node in attribute.as_graph():
            node.resize_inputs(0)
    unused = [node for node in nodes if not any(value.uses() for value in node.outputs)]
    graph.remove(unused, safe=True)


def remove_unused_constants(graph: ir.Graph) -> None:
    """Remove initializers that nothing reads."""
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]


def save(model: ir.Model, path: Path, progress: Progress) -> None:
    """Write a graph and, beside it, its initializers, of which one at a time is in memory."""

    def report(_: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        progress("writing weights", info.index, info.total)

    ir.save(model, path, external_data=f"{path.name}.data", callback=report)

"""Small edits of an exported graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators


def constant(graph: ir.Graph, name: str, array: NDArray[np.generic]) -> ir.Value:
    """Return the initializer of this name, made of `array` unless it is there already."""
    if name not in graph.initializers:
        tensor = ir.tensor(np.ascontiguousarray(array), name=name)
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


def replace_node(
    graph: ir.Graph, node: ir.Node, new: Sequence[ir.Node], *outputs: ir.Value
) -> None:
    """Put other nodes in a node's place; `outputs` take the place and names of its outputs."""
    graph.insert_before(node, new)
    for old, value in zip(node.outputs, outputs, strict=True):
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        value.name, value.shape, value.type = old.name, old.shape, old.type
    graph.remove(node, safe=True)


def remove_unused_constants(graph: ir.Graph) -> None:
    """Remove initializers that nothing reads."""
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]

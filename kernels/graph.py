"""Values of a graph: who makes and reads them; and what rules that change nodes need.

Nodes of branches belong to their graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto
from onnx.helper import get_attribute_value, make_attribute
from onnx.numpy_helper import to_array

DOMAIN = "kvasir"  # of our operators
LINEARS = ("Linear", "Linear4", "Linear32")
NIBBLE_BLOCK = 32  # inputs for each scale of `Linear4`
N_INPUTS = 7  # of each
MOST_INPUTS = 131_072  # of a row
MOST_CHANNELS = 640  # of a head
DECODE = "decode"  # an input of graphs with rows of two types
_POSITIONS = 9  # an input of GroupQueryAttention


class Mismatch(Exception):  # noqa: N818  it is no error
    """The reason for which a rule leaves a node as it is."""


class Values:
    """Constants of a graph, and the nodes that make and read its values, in branches too."""

    def __init__(self, graph: GraphProto) -> None:
        self.inputs = {value.name: value for value in graph.input}
        self.constants: dict[str, TensorProto] = {
            tensor.name: tensor for tensor in graph.initializer if tensor.name not in self.inputs
        }
        self.nodes: list[NodeProto] = []
        self._makers: dict[str, NodeProto | None] = {}  # None: of a name that is not unique
        self._readers: dict[str, list[NodeProto]] = {}
        self._outputs: set[str] = set()
        for part in parts(graph):
            self._outputs.update(value.name for value in part.output)
            for node in part.node:
                self.nodes.append(node)
                for name in node.output:
                    self._makers[name] = None if name in self._makers else node
                for name in node.input:
                    self._readers.setdefault(name, []).append(node)

    @cached_property
    def has_linears(self) -> bool:
        """True if some product is one of ours already."""
        return any(node.op_type in LINEARS for node in self.nodes)

    def operator(self, name: str) -> str:
        """Return the operator that makes a value; empty for inputs and constants."""
        node = self._makers.get(name)
        return "" if node is None else node.op_type

    def maker(self, name: str, *operators: str) -> NodeProto:
        """Return the node that makes a value, which is one of these operators."""
        node = self._makers.get(name)
        if node is None or node.op_type not in operators:
            raise Mismatch(f"{name} is not made by {' or '.join(operators)}")
        return node

    def readers(self, name: str) -> list[NodeProto]:
        """Return the nodes that read a value, one for each time, if it is no output."""
        require(name not in self._outputs, f"{name} is an output")
        return self._readers.get(name, [])

    def reader(self, name: str, *operators: str) -> NodeProto:
        """Return the only node that reads a value, which is one of these operators."""
        found = self.readers(name)
        if len(found) != 1 or found[0].op_type not in operators:
            raise Mismatch(f"{name} is not read by one {' or '.join(operators)} alone")
        return found[0]

    def constant(self, name: str, *shape: int) -> TensorProto:
        """Return a constant of this shape."""
        found = self.constants.get(name)
        if found is None or tuple(found.dims) != shape:
            raise Mismatch(f"{name} is no constant of shape {list(shape)}")
        return found

    def number(self, name: str) -> float:
        """Return the only number of a constant that is in the graph's own file."""
        array = self.array(name)
        require(array.size == 1, f"{name} is no number")
        return float(array.item())

    def array(self, name: str) -> NDArray[Any]:
        """Return a constant that is in the graph's own file."""
        found = self.constants.get(name)
        if found is None or found.external_data:
            raise Mismatch(f"{name} is no constant in the graph's own file")
        return to_array(found)

    def sizes(self, linear: NodeProto) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a product."""
        dims = self.constants[linear.input[1]].dims
        if linear.op_type == "Linear4":
            return dims[1] * NIBBLE_BLOCK, dims[0]
        return (dims[1], dims[0]) if attribute(linear, "transposed") else (dims[0], dims[1])


def require(condition: object, reason: str) -> None:
    """Raise Mismatch with a reason unless a condition holds."""
    if not condition:
        raise Mismatch(reason)


def inputs_of(node: NodeProto, n: int) -> list[str]:
    """Return the inputs of a node that has n."""
    require(len(node.input) == n, f"{node.op_type} has {len(node.input)} inputs and not {n}")
    return list(node.input)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Return the value of an attribute, or the default."""
    found = (a for a in node.attribute if a.name == name)
    return next((get_attribute_value(attribute) for attribute in found), default)


def attention_options(node: NodeProto) -> dict[str, Any]:
    """Return what our attentions have of a GroupQueryAttention's attributes, by their names.

    Raises Mismatch for what none of them computes.
    """
    positions = node.input[_POSITIONS] if len(node.input) > _POSITIONS else ""
    turns = attribute(node, "do_rotary", 0)
    require(not turns or positions in ("", "position_ids"), "pairs turn by other positions")
    require(attribute(node, "smooth_softmax", 0) != 1, "a score of 0 is beside the others")
    require(not any(node.output[3:]), "scores are an output")
    require(attribute(node, "scale", 0.0) >= 0, "scores change their sign")
    return {
        "heads": attribute(node, "num_heads"),
        "kv_heads": attribute(node, "kv_num_heads"),
        "scale": attribute(node, "scale", 0.0),
        "softcap": attribute(node, "softcap", 0.0),
        "interleaved": attribute(node, "rotary_interleaved", 0),
    }


def set_attributes(node: NodeProto, **values: float | str) -> None:
    """Give a node attributes, in the place of those with these names."""
    kept = [attribute for attribute in node.attribute if attribute.name not in values]
    made = [make_attribute(name, value) for name, value in values.items()]
    node.attribute.clear()
    node.attribute.extend([*kept, *made])


def replace_input(node: NodeProto, old: str, new: str) -> None:
    """Let a node read another value wherever it reads one."""
    node.input[:] = [new if name == old else name for name in node.input]


def replace_all(held: Any, values: Iterable[Any]) -> None:
    """Give a repeated field other values, which may be made of those that it has."""
    replaced = list(values)
    del held[:]
    held.extend(replaced)


def _branches(node: NodeProto) -> list[GraphProto]:
    return [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]


def parts(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph, and every branch in it."""
    yield graph
    for node in graph.node:
        for branch in _branches(node):
            yield from parts(branch)


def drop_unread_nodes(graph: GraphProto, read: set[str]) -> None:
    """Drop nodes of a graph and its branches that nothing reads; add what is read to `read`."""
    read.update(value.name for value in graph.output)
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            read.update(node.input)
            for branch in _branches(node):
                drop_unread_nodes(branch, read)
    replace_all(graph.node, reversed(kept))

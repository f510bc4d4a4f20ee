"""A graph's rounded products, and what surrounds them, as operators of the domain `kvasir`.

A linear layer in int8 is some eight nodes of ONNX Runtime's: the scale of each token, rounding, the
product, and scales again. Around it are a norm or an activation, a bias and a residual. All of it
becomes one node, `Linear`; of blocks of 4 bits, `Linear4`. Inputs of both are x, the weight, its
scales and, where they are not empty, a bias, the weight and the bias of a norm before the product,
and a residual. An activation, with or without a gate, comes before the norm.

Each rule below looks at one node and what makes and reads its values, and changes it if a single
node of ours computes the same. It raises `Mismatch` and changes nothing if not. No rule removes a
node: nodes that nothing reads any more go after each round of rules.

A rule takes for granted that a graph is well-formed, and that a residual has the shape of what it
is added to, as the exporter's have; the operators refuse another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

DOMAIN = "kvasir"
_LINEARS = ("Linear", "Linear4")
_PRODUCTS = ("MatMulIntegerToFloat", "MatMulNBits")
_BIAS, _NORM, _NORM_BIAS, _RESIDUAL = 3, 4, 5, 6  # inputs of both operators
_BLOCK = 32  # inputs for each scale of `Linear4`
# Attributes of MatMulNBits whose kernel rounds activations as `Linear4` does.
_IN_BLOCKS = {"bits": 4, "block_size": _BLOCK, "accuracy_level": 4}


class Mismatch(Exception):  # noqa: N818  it is no error
    """The reason for which a rule leaves a node as it is."""


@dataclass(frozen=True, slots=True)
class Report:
    """The number of products that were fused and, by the name of their output, why others not."""

    fused: int
    left: dict[str, str]


def fuse(model: ModelProto) -> tuple[ModelProto, Report]:
    """Return a model that computes the same with operators of the domain `kvasir`.

    model: loaded without external data. It is not changed.
    """
    fused, reasons = ModelProto(), dict[str, str]()
    fused.CopyFrom(model)
    graph = fused.graph
    for operators, rule in _RULES:
        values = _Values(graph)
        for node in values.nodes:
            if node.op_type in operators:
                try:
                    rule(values, node)
                except Mismatch as mismatch:
                    reasons[node.output[0]] = str(mismatch)
        _drop_unread(graph, set())
    nodes = [node for part in _parts(graph) for node in part.node]
    _drop_constants(graph, {name for node in nodes for name in node.input})
    left = {n.output[0]: reasons[n.output[0]] for n in nodes if n.op_type in _PRODUCTS}
    report = Report(sum(node.domain == DOMAIN for node in nodes), left)
    if report.fused:
        fused.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return fused, report


@dataclass
class _Values:
    """Constants of a graph, and the nodes that make and read its values, in branches too."""

    graph: GraphProto
    constants: dict[str, TensorProto] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = {value.name for value in self.graph.input}
        self.constants = {t.name: t for t in self.graph.initializer if t.name not in given}
        self._makers: dict[str, NodeProto | None] = {}  # None: of a name with several
        self._readers: dict[str, list[NodeProto]] = {}
        self._outputs: set[str] = set()
        for part in _parts(self.graph):
            self._outputs.update(value.name for value in part.output)
            for node in part.node:
                self.nodes.append(node)
                for name in node.output:
                    self._makers[name] = None if name in self._makers else node
                for name in node.input:
                    self._readers.setdefault(name, []).append(node)

    def maker(self, name: str, *operators: str) -> NodeProto:
        """Return the node that makes a value, which is one of these operators."""
        node = self._makers.get(name)
        if node is None or node.op_type not in operators:
            raise Mismatch(f"{name} is not made by {' or '.join(operators)}")
        return node

    def readers(self, name: str) -> list[NodeProto]:
        """Return the nodes that read a value, which is no output; one that reads it twice twice."""
        _require(name not in self._outputs, f"{name} is an output")
        return self._readers.get(name, [])

    def reader(self, name: str, *operators: str) -> NodeProto:
        """Return the only node that reads a value, which is one of these operators."""
        found = self.readers(name)
        if len(found) != 1 or found[0].op_type not in operators:
            raise Mismatch(f"{name} is not read by one {' or '.join(operators)}")
        return found[0]

    def constant(self, name: str, *shape: int) -> TensorProto:
        """Return a constant, which has this shape."""
        found = self.constants.get(name)
        if found is None or tuple(found.dims) != shape:
            raise Mismatch(f"{name} is no constant of shape {list(shape)}")
        return found

    def number(self, name: str) -> float:
        """Return the only number of a constant, which the graph itself holds."""
        found = self.constant(name, 1)
        _require(not found.external_data, f"{name} is external")
        return float(numpy_helper.to_array(found).item())

    def sizes(self, linear: NodeProto) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a product."""
        dims = self.constants[linear.input[1]].dims
        if linear.op_type == "Linear4":
            return dims[1] * _BLOCK, dims[0]
        return (dims[1], dims[0]) if _attribute(linear, "transposed") else (dims[0], dims[1])


def _int8_product(values: _Values, product: NodeProto) -> None:
    """Make rounding, MatMulIntegerToFloat and the scale of each token a `Linear`."""
    _require(len(product.input) == 5, "the product has a zero point or a bias of its own")
    quantized, matrix, one, scales, _ = product.input
    x, scale, block = _rounded(values, quantized)
    transposed = matrix not in values.constants
    if transposed:
        transpose = values.maker(matrix, "Transpose")
        _require(_attribute(transpose, "perm") == [1, 0], f"{matrix} is not a matrix transposed")
        matrix = transpose.input[0]
    _require(matrix in values.constants, f"{matrix} is no constant")
    n_in, n_out = values.constants[matrix].dims[:: -1 if transposed else 1]
    values.constant(scales, n_out)
    _require(n_in == block, "the scale is not one of a whole token")
    _require(values.number(one) == 1.0, "the activations have a scale of their own")
    _require(values.number(product.input[4]) == 128.0, "the zero point is not 128")
    target = values.reader(product.output[0], "Mul", "Split")
    if target.op_type == "Split":
        _scale_whole_product(values, product, scale)
        target = product
    else:
        _require(scale in target.input, "the product has the scale of other activations")
    inputs = [x, matrix, scales]
    _become(target, "Linear", inputs, transposed=int(transposed), block=0)


def _rounded(values: _Values, quantized: str) -> tuple[str, str, int]:
    """Return the activations that were rounded to uint8, the scale, and inputs for each scale.

    x, s = max|x| / 127, round(x / s) + 128. Zero points are one for each token, and ONNX Runtime
    wants as many scales, so both reduce the last axis.
    """
    node = values.maker(quantized, "QuantizeLinear")
    x, scale, zero_points = node.input
    largest, step = values.maker(scale, "Mul").input
    reduction = values.maker(largest, "ReduceMax")
    magnitudes, axis = reduction.input
    zero_point = _attribute(values.maker(zero_points, "ConstantOfShape"), "value")
    _require(np.isclose(values.number(step), 1 / 127, rtol=1e-6, atol=0), "a step is not 1/127")
    _require(values.maker(magnitudes, "Abs").input[0] == x, "the scale is of other activations")
    _require(values.number(axis) == _attribute(node, "axis"), "the scale is along another axis")
    _require(_attribute(reduction, "keepdims", 1) == 1, "the scale lacks an axis")
    _require(numpy_helper.to_array(zero_point).tolist() == [128], "the zero point is not 128")
    return x, scale, _attribute(node, "block_size", 0)


def _scale_whole_product(values: _Values, product: NodeProto, scale: str) -> None:
    """Undo what the exporter does to products that make a gate and what it gates.

    It scales the gate alone. act(s · gate) · up then lacks a factor s, which is applied to the
    scale of the next product. Nothing else may read what changes by s.
    """
    split = values.reader(product.output[0], "Split")
    _require(len(split.output) == 2, "the product is split in more than two")
    gate, up = split.output
    scaled, gated = values.reader(gate, "Mul"), values.reader(up, "Mul")
    _require(scale in scaled.input, "the gate has the scale of other activations")
    (hidden,), n_known = gated.output, 0
    for node in values.readers(hidden):
        if node.op_type == "QuantizeLinear":
            quantized = node.output[0]
        n_known += node.op_type in ("Abs", "QuantizeLinear")
        _require(node.op_type in ("Abs", "QuantizeLinear", "Shape"), "the gated values are read")
    x, own_scale, _ = _rounded(values, quantized)
    largest = values.maker(own_scale, "Mul").input[0]
    magnitudes = values.reader(values.maker(largest, "ReduceMax").input[0], "ReduceMax")
    values.reader(magnitudes.output[0], "Mul")
    _require(x == hidden and n_known == 2, "the gated values are read elsewhere")
    lowered = values.reader(quantized, "MatMulIntegerToFloat").output[0]
    multiply = values.reader(lowered, "Mul")
    deferred = next(name for name in multiply.input if name != lowered)
    both = values.maker(deferred, "Mul")
    _require(sorted(both.input) == sorted([own_scale, scale]), "no scale is applied afterwards")
    _require(values.reader(deferred, "Mul") is multiply, "the two scales are read elsewhere")
    _require(
        sorted(node.op_type for node in values.readers(own_scale)) == ["Mul", "QuantizeLinear"],
        "the scale of gated values is read elsewhere",
    )
    for node in values.readers(scaled.output[0]):
        _replace_input(node, scaled.output[0], gate)
    _replace_input(multiply, deferred, own_scale)


def _int4_product(values: _Values, product: NodeProto) -> None:
    """Make MatMulNBits of 4 bits, which rounds activations itself, a `Linear4`."""
    given = {name: _attribute(product, name, 0) for name in _IN_BLOCKS}
    _require(given == _IN_BLOCKS, f"its kernel is another one: {given}")
    _require(not any(product.input[3:]), "the product has zero points or a bias of its own")
    n_in, n_out = _attribute(product, "K"), _attribute(product, "N")
    _require(n_in % _BLOCK == 0, f"{n_in} inputs are no blocks of {_BLOCK}")
    values.constant(product.input[1], n_out, n_in // _BLOCK, _BLOCK // 2)
    _require(product.input[2] in values.constants, "the scales are no constant")
    _become(product, "Linear4", product.input[:3])


def _addition(values: _Values, add: NodeProto) -> None:
    """Put the addition of a bias or a residual into the product before it."""
    for i in (1, 0):  # a block adds its output to its input, not the other way round
        linear, other = values._makers.get(add.input[i]), add.input[1 - i]
        if linear is None or linear.op_type not in _LINEARS or _input(linear, _RESIDUAL):
            continue
        values.reader(add.input[i], "Add")
        if other in values.constants:
            _require(not _input(linear, _BIAS), f"{linear.name} has a bias already")
            values.constant(other, values.sizes(linear)[1])
        output = add.output[0]
        add.CopyFrom(linear)
        add.output[:] = [output]
        _set_input(add, _BIAS if other in values.constants else _RESIDUAL, other)
        return
    raise Mismatch("no product is added to")


def _activation(values: _Values, linear: NodeProto) -> None:
    """Put an activation, and the gate that it is of, into the product after it."""
    made = linear.input[0]
    values.reader(made, *_LINEARS)
    try:
        activation, x = _gate(values, made)
    except Mismatch:
        activation, x = _activated(values, made)
    else:
        _require(
            values.sizes(values.maker(x, *_LINEARS))[1] == 2 * values.sizes(linear)[0],
            "the halves are not those of a product",
        )
        _set_attributes(linear, gated=1)
    _set_attributes(linear, activation=activation)
    linear.input[0] = x


def _gate(values: _Values, name: str) -> tuple[str, str]:
    """Return the activation of the first half of a value that its other half is multiplied by."""
    multiply = values.maker(name, "Mul")
    for activated, up in (multiply.input, multiply.input[::-1]):
        split = values._makers.get(up)
        if split is not None and split.op_type == "Split":
            activation, gate = _activated(values, activated)
            _require(list(split.output) == [gate, up], "it is not the first half that is a gate")
            _require(_attribute(split, "num_outputs", 0) == 2, "the halves may differ in size")
            return activation, split.input[0]
    raise Mismatch("there is no gate")


def _activated(values: _Values, name: str) -> tuple[str, str]:
    """Return an activation and the value that it is of."""
    node = values.maker(name, "Gelu", "Relu", "Mul")
    if node.op_type == "Gelu":
        is_tanh = _attribute(node, "approximate", b"none") == b"tanh"
        return "gelu_tanh" if is_tanh else "gelu", node.input[0]
    if node.op_type == "Relu":
        return "relu", node.input[0]
    x, share = node.input
    _require(values.maker(share, "Sigmoid").input[0] == x, "it is no activation")
    return "silu", x


def _norm(values: _Values, norm: NodeProto) -> None:
    """Put a norm into the products after it, if nothing else reads it."""
    (made, *more), (x, *weights) = norm.output, norm.input
    _require(_attribute(norm, "axis", -1) == -1, "the norm is over several axes")
    _require(not any(more), "the norm's statistics are read")
    linears = values.readers(made)
    for linear in linears:
        _require(linear.op_type in _LINEARS and linear.input[0] == made, "another node reads it")
        _require(list(linear.input).count(made) == 1, "it is a residual as well")
        _require(not _attribute(linear, "activation"), "an activation is between")
        for weight in weights:
            values.constant(weight, values.sizes(linear)[0])
    kind = "rms" if norm.op_type == "RMSNormalization" else "layer"
    for linear in linears:
        linear.input[0] = x
        for i, weight in zip((_NORM, _NORM_BIAS), weights, strict=False):
            _set_input(linear, i, weight)
        _set_attributes(linear, norm=kind, epsilon=float(_attribute(norm, "epsilon", 1e-5)))


_Rule = Callable[[_Values, NodeProto], None]
# In the order of the rounds: operators, and what is done to each of their nodes.
_RULES: tuple[tuple[tuple[str, ...], _Rule], ...] = (
    (("MatMulIntegerToFloat",), _int8_product),
    (("MatMulNBits",), _int4_product),
    (("Add",), _addition),
    (_LINEARS, _activation),
    (("RMSNormalization", "LayerNormalization"), _norm),
)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Mismatch(reason)


def _attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    found = (a for a in node.attribute if a.name == name)
    return next((helper.get_attribute_value(attribute) for attribute in found), default)


def _set_attributes(node: NodeProto, **values: float | str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name not in values]
    made = [helper.make_attribute(name, value) for name, value in values.items()]
    node.attribute.clear()
    node.attribute.extend([*kept, *made])


def _input(node: NodeProto, i: int) -> str:
    """Return the name of an input; empty for one that is absent."""
    return node.input[i] if i < len(node.input) else ""


def _set_input(node: NodeProto, i: int, name: str) -> None:
    node.input.extend([""] * (i + 1 - len(node.input)))
    node.input[i] = name


def _replace_input(node: NodeProto, old: str, new: str) -> None:
    node.input[:] = [new if name == old else name for name in node.input]


def _become(node: NodeProto, operator: str, inputs: Iterable[str], **attributes: int) -> None:
    """Make a node one of our operators, with every attribute, that makes the same value."""
    node.op_type, node.domain, node.input[:] = operator, DOMAIN, inputs
    node.attribute.clear()
    _set_attributes(node, activation="", gated=0, norm="", epsilon=0.0, **attributes)


def _branches(node: NodeProto) -> list[GraphProto]:
    return [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]


def _parts(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph, and every branch in it."""
    yield graph
    for node in graph.node:
        for branch in _branches(node):
            yield from _parts(branch)


def _drop_unread(graph: GraphProto, read: set[str]) -> None:
    """Drop nodes of a graph and its branches that nothing reads; read: names that others read."""
    read.update(value.name for value in graph.output)
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            read.update(node.input)
            for branch in _branches(node):
                _drop_unread(branch, read)
    del graph.node[:]
    graph.node.extend(reversed(kept))


def _drop_constants(graph: GraphProto, read: set[str]) -> None:
    """Drop initializers that nothing reads; those that are read stay where they are in files."""
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)

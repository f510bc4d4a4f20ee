"""A graph's products, and what surrounds them, as operators of the domain `kvasir`.

Around a product (`kernels.products`) are a norm or an activation, a bias and a residual. All of it
becomes one node: `Linear`, `Linear4` of weights in blocks of 4 bits, or `Linear32` of floats. Its
inputs are x, the weight and its scales and, where not empty, a bias, the weight and the bias of a
norm before the product, and a residual. An activation, which may be of a gate, comes before the
norm, and mixing after both.

Each rule looks at one node and at what makes and reads its values, and changes it if a node of ours
computes the same; else it raises `Mismatch` and changes nothing. No rule removes a node: what
nothing reads any more goes after each round. A rule takes for granted that ONNX Runtime would run
the graph, and that a residual has the shape of the product's output, as the exporter's have; the
operators refuse another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto
from onnx.helper import make_opsetid

from kvasir.kernels.attentions import (
    STARTS,
    add_starts,
    attend_over_rows,
    attend_over_texts,
)
from kvasir.kernels.experts import experts
from kvasir.kernels.functions import FUNCTIONS, function, minus_softplus, softmax, square
from kvasir.kernels.graph import (
    DOMAIN,
    LINEARS,
    Mismatch,
    Values,
    attribute,
    drop_unread_nodes,
    inputs_of,
    parts,
    replace_all,
    require,
    set_attributes,
)
from kvasir.kernels.products import (
    float_product,
    head_product,
    int4_product,
    int8_product,
    mixing,
)
from kvasir.kernels.recurrences import convolution, memory

_PRODUCTS = ("MatMulIntegerToFloat", "MatMulNBits", "Einsum", "MatMul", "Gemm", "MoE", "QMoE")
_BIAS, _NORM, _NORM_BIAS, _RESIDUAL = 3, 4, 5, 6  # inputs of each


@dataclass(frozen=True, slots=True)
class Report:
    """The number of products that were fused and, by their outputs, why others were not.

    Those with a matrix a head are among the latter, if they are left; those that multiply a
    constant, which is no matrix of weights, are not.
    """

    fused: int
    left: dict[str, str]


def fuse(model: ModelProto) -> tuple[ModelProto, Report]:
    """Return a model that computes the same with operators of ours, and a report.

    model: loaded without external data; it is not changed.
    """
    fused, reasons = ModelProto(), dict[str, str]()
    fused.CopyFrom(model)
    graph = fused.graph
    for operators, rule in _RULES:
        values = Values(graph)
        for node in values.nodes:
            if node.op_type in operators:
                try:
                    rule(values, node)
                except Mismatch as mismatch:
                    reasons[node.output[0]] = str(mismatch)
        read = set[str]()
        drop_unread_nodes(graph, read)
    replace_all(graph.initializer, [t for t in graph.initializer if t.name in read])
    if STARTS in read:
        add_starts(graph)
    nodes = [node for part in parts(graph) for node in part.node]
    constants = {tensor.name for tensor in graph.initializer}
    products = (n for n in nodes if n.op_type in _PRODUCTS and n.input[0] not in constants)
    left = {n.output[0]: reasons[n.output[0]] for n in products}
    report = Report(sum(node.op_type in LINEARS for node in nodes), left)
    if report.fused and all(opset.domain != DOMAIN for opset in fused.opset_import):
        fused.opset_import.append(make_opsetid(DOMAIN, 1))
    return fused, report


def _addition(values: Values, add: NodeProto) -> None:
    """Put the addition of a bias or a residual into the product before it."""
    for made, other in (tuple(add.input), tuple(add.input)[::-1]):
        if values.operator(made) not in LINEARS:
            continue
        linear, i = values.maker(made, *LINEARS), _RESIDUAL
        if other in values.constants:
            values.constant(other, values.sizes(linear)[1])
            i = _BIAS
        if linear.input[_RESIDUAL] or linear.input[i]:
            continue
        values.reader(made, "Add")
        output = add.output[0]
        add.CopyFrom(linear)
        add.output[0], add.input[i] = output, other
        return
    raise Mismatch("nothing is added to a product")


def _activation(values: Values, linear: NodeProto) -> None:
    """Put an activation, and the gate that it is of, into the product after it."""
    made = linear.input[0]
    values.reader(made, *LINEARS)
    require(not attribute(linear, "activation"), "it has an activation already")
    try:
        gated, (activation, x) = True, _gate(values, made)
    except Mismatch:
        gated, (activation, x) = False, _activated(values, made)
    if gated:
        n_out = values.sizes(values.maker(x, *LINEARS))[1]
        require(n_out == 2 * values.sizes(linear)[0], "the halves are not those of a product")
    linear.input[0] = x
    set_attributes(linear, activation=activation, gated=int(gated))


def _gate(values: Values, name: str) -> tuple[str, str]:
    """Return the activation of a value's first half, which multiplies the other, and the value."""
    activated, up = values.maker(name, "Mul").input
    split = values.maker(up, "Split")
    activation, gate = _activated(values, activated)
    require(list(split.output) == [gate, up], "it is not the first half that is a gate")
    require(attribute(split, "num_outputs", 0) == 2, "the halves may differ in size")
    return activation, split.input[0]


def _activated(values: Values, name: str) -> tuple[str, str]:
    """Return an activation and the value that it is of."""
    node = values.maker(name, "Gelu", "Relu", "Pow", "Mul")
    if node.op_type == "Gelu":
        is_tanh = attribute(node, "approximate", b"none") == b"tanh"
        return "gelu_tanh" if is_tanh else "gelu", node.input[0]
    if node.op_type == "Relu":
        return "relu", node.input[0]
    if node.op_type == "Pow":
        require(values.number(node.input[1]) == 2, "it is no square")
        return "relu2", values.maker(node.input[0], "Relu").input[0]
    x, share = node.input
    require(values.maker(share, "Sigmoid").input[0] == x, "it is no activation")
    return "silu", x


def _norm(values: Values, norm: NodeProto) -> None:
    """Put a norm into the products after it, if nothing else reads it."""
    made, (x, *weights) = norm.output[0], norm.input
    kind, epsilon = _kind(norm)
    linears = values.readers(made)
    for linear in linears:
        is_first = linear.op_type in LINEARS and linear.input[0] == made
        require(is_first, "not products alone read it")
        has_other = attribute(linear, "activation") or attribute(linear, "norm")
        require(not has_other, "an activation or another norm is between")
        for weight in weights:
            values.constant(weight, values.sizes(linear)[0])
    for linear in linears:
        linear.input[0] = x
        for i, weight in zip((_NORM, _NORM_BIAS), weights, strict=False):
            linear.input[i] = weight
        set_attributes(linear, norm=kind, epsilon=epsilon)


def _norm_alone(values: Values, norm: NodeProto) -> None:
    """Make a norm that is in no product, of a graph with some, a `Norm`."""
    require(values.has_linears, "no product is ours")
    kind, epsilon = _kind(norm)
    constants = [values.constants.get(name, TensorProto()) for name in norm.input[1:]]
    for constant in constants:
        require(list(constant.dims) == list(constants[0].dims), "weights differ in size")
        require(len(constant.dims) == 1, "weights are no constant vectors")
    norm.op_type, norm.domain = "Norm", DOMAIN
    norm.attribute.clear()
    set_attributes(norm, norm=kind, epsilon=epsilon)


def _kind(norm: NodeProto) -> tuple[str, float]:
    """Return the kind of a norm over the last axis that makes nothing else, and its epsilon."""
    require(attribute(norm, "axis", -1) == -1, "the norm is over several axes")
    require(not any(norm.output[1:]), "the norm has more outputs")
    kind = "rms" if norm.op_type == "RMSNormalization" else "layer"
    return kind, attribute(norm, "epsilon", 1e-5)


def _length_one(values: Values, quotient: NodeProto) -> None:
    """Make vectors of length 1 by `Norm`, in a graph with products of ours."""
    require(values.has_linears, "no product is ours")
    x, lengths = inputs_of(quotient, 2)
    least = values.maker(values.maker(lengths, "Expand").input[0], "Clip")
    length = values.maker(least.input[0], "ReduceL2")
    require(length.input[0] == x, "the length is of another value")
    require(values.number(length.input[1]) == -1, "the length is along another axis")
    require(attribute(length, "keepdims", 1) == 1, "the length lacks an axis")
    require(not any(least.input[2:]), "the length has an upper limit")
    epsilon = values.number(least.input[1])
    quotient.op_type, quotient.domain = "Norm", DOMAIN
    quotient.input[:] = [x]
    set_attributes(quotient, norm="l2", epsilon=epsilon)


_Rule = Callable[[Values, NodeProto], None]
# In the order of the rounds: operators, and what is done to each of their nodes.
_RULES: tuple[tuple[tuple[str, ...], _Rule], ...] = (
    (("MatMulIntegerToFloat",), int8_product),
    (("MatMulNBits",), int4_product),
    (("MatMul", "Gemm"), float_product),
    (("Add",), _addition),
    (LINEARS, mixing),
    (LINEARS, _activation),
    (("RMSNormalization", "LayerNormalization"), _norm),
    (("GroupQueryAttention",), attend_over_texts),
    (("GroupQueryAttention",), attend_over_rows),
    (("RMSNormalization", "LayerNormalization"), _norm_alone),
    (("Div",), _length_one),
    (("Einsum",), head_product),
    (("MoE", "QMoE"), experts),
    (("CausalConvWithState",), convolution),
    (("LinearAttention",), memory),
    (("Gather",), minus_softplus),
    (("Softmax",), softmax),
    (FUNCTIONS, function),
    (("Pow",), square),
)

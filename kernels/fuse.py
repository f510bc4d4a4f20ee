"""A graph's rounded products, and what surrounds them, as operators of the domain `kvasir`.

A linear layer in int8 is some eight nodes of ONNX Runtime's: the scale of each token, rounding, the
product, and scales again. Around it are a norm or an activation, a bias and a residual. All of it
becomes one node, `Linear`, or `Linear4` of weights in blocks of 4 bits. Inputs of both are x, the
weight and its scales and, where not empty, a bias, the weight and the bias of a norm before the
product, and a residual. An activation, which may be of a gate, comes before the norm, and mixing
(`export.rounding.mixing`) after both.

Each rule looks at one node and at what makes and reads its values, and changes it if a node of ours
computes the same; else it raises `Mismatch` and changes nothing. No rule removes a node: what
nothing reads any more goes after each round. A rule takes for granted that ONNX Runtime would run
the graph, and that a residual has the shape of the product's output, as the exporter's have; the
operators refuse another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto
from onnx.helper import make_opsetid
from onnx.numpy_helper import to_array

from kvasir.kernels.graph import (
    DOMAIN,
    LINEARS,
    NIBBLE_BLOCK,
    Mismatch,
    Values,
    attribute,
    drop_unread_nodes,
    inputs_of,
    parts,
    replace_all,
    replace_input,
    require,
    set_attributes,
)
from kvasir.kernels.texts import STARTS, add_starts, attend_over_texts

_PRODUCTS = ("MatMulIntegerToFloat", "MatMulNBits", "Einsum")
_TWO = np.array([[1, 1], [1, -1]])
_HADAMARD = np.kron(_TWO, np.kron(_TWO, _TWO))
_N_INPUTS, _BIAS, _NORM, _NORM_BIAS, _RESIDUAL = 7, 3, 4, 5, 6  # of both
# Attributes of MatMulNBits whose kernel rounds activations as `Linear4` does.
_IN_BLOCKS = {"bits": 4, "block_size": NIBBLE_BLOCK, "accuracy_level": 4}


@dataclass(frozen=True, slots=True)
class Report:
    """The number of products that were fused and, by the name of their output, why others not."""

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
    left = {n.output[0]: reasons[n.output[0]] for n in nodes if n.op_type in _PRODUCTS}
    report = Report(sum(node.op_type in LINEARS for node in nodes), left)
    if report.fused and all(opset.domain != DOMAIN for opset in fused.opset_import):
        fused.opset_import.append(make_opsetid(DOMAIN, 1))
    return fused, report


def _int8_product(values: Values, product: NodeProto) -> None:
    """Make rounding, MatMulIntegerToFloat and the scale of each token a `Linear`."""
    quantized, matrix, one, scales, zero_point = inputs_of(product, 5)  # no zero points, no bias
    x, scale, block = _rounded(values, quantized)
    transposed = values.operator(matrix) == "Transpose"
    if transposed:
        transpose = values.maker(matrix, "Transpose")
        require(attribute(transpose, "perm") == [1, 0], f"{matrix} is no matrix transposed")
        matrix = transpose.input[0]
    weight = values.constants.get(matrix)
    if weight is None or weight.data_type != TensorProto.INT8 or len(weight.dims) != 2:
        raise Mismatch(f"{matrix} is no constant matrix of int8")
    n_in, n_out = weight.dims[::-1] if transposed else weight.dims
    values.constant(scales, n_out)
    require(n_in == block, "activations have several scales a token")
    require(values.number(one) == 1.0, "activations have another scale")
    require(values.number(zero_point) == 128.0, "the zero point is not 128")
    target = values.reader(product.output[0], "Mul", "Split")
    if target.op_type == "Split":
        _scale_all_outputs(values, target, scale)
        target = product
    else:
        require(scale in target.input, "the product has the scale of other activations")
    _become(target, "Linear", (x, matrix, scales), transposed=int(transposed), block=0, mixed=0)


def _rounded(values: Values, quantized: str) -> tuple[str, str, int]:
    """Return x, the scale s = max|x| / 127, and inputs for each, of round(x / s) + 128 as uint8.

    Zero points are one for each token, and ONNX Runtime wants as many scales, so the axis of both
    is the last.
    """
    node = values.maker(quantized, "QuantizeLinear")
    x, scale, zero_points = inputs_of(node, 3)
    largest, step = values.maker(scale, "Mul").input
    reduction = values.maker(largest, "ReduceMax")
    magnitudes, axis = inputs_of(reduction, 2)
    zero_point = attribute(values.maker(zero_points, "ConstantOfShape"), "value", TensorProto())
    require(values.maker(magnitudes, "Abs").input[0] == x, "the scale is of other activations")
    require(values.number(axis) == attribute(node, "axis"), "the scale is along another axis")
    require(attribute(reduction, "keepdims", 1) == 1, "the scale lacks an axis")
    require(values.number(step) == np.float32(1 / 127), "a step is not 1/127")
    is_128 = zero_point.data_type and to_array(zero_point).tolist() == [128]
    require(is_128, "the zero points are not 128")
    return x, scale, attribute(node, "block_size", 0)


def _scale_all_outputs(values: Values, split: NodeProto, scale: str) -> None:
    """Let a product that makes a gate and what it gates have its scale before it is split.

    The exporter scales the gate alone: act(s · gate) · up then lacks a factor s, which the scale of
    the next product gets. Nothing else may read what changes by s.
    """
    require(len(split.output) == 2, "the product is split in more than two")
    gate, up = split.output
    scaled, gated = values.reader(gate, "Mul"), values.reader(up, "Mul").output[0]
    require(scale in scaled.input, "the gate has the scale of other activations")
    first, *others = [node for node in values.readers(gated) if node.op_type != "Shape"]
    if first.op_type == "Reshape" and not others:
        product = values.reader(first.output[0], "MatMul")
        gated = values.reader(product.output[0], "Reshape").output[0]
        _before_mixing(values, gated)
    readers = sorted((n.op_type, n.output[0]) for n in values.readers(gated))
    readers = [pair for pair in readers if pair[0] != "Shape"]
    operators = [operator for operator, _ in readers]
    require(operators == ["Abs", "QuantizeLinear"], "what is gated is not rounded alone")
    (_, magnitudes), (_, quantized) = readers
    own_scale = _rounded(values, quantized)[1]
    values.reader(values.reader(magnitudes, "ReduceMax").output[0], "Mul")
    lowered = values.reader(quantized, "MatMulIntegerToFloat").output[0]
    rescaling = values.reader(lowered, "Mul")
    (factor,) = (name for name in rescaling.input if name != lowered)
    require(
        sorted(values.maker(factor, "Mul").input) == sorted([own_scale, scale]),
        "the factor is not applied afterwards",
    )
    values.reader(factor, "Mul")
    operators = sorted(node.op_type for node in values.readers(own_scale))
    require(operators == ["Mul", "QuantizeLinear"], "the scale is read elsewhere")
    for node in values.readers(scaled.output[0]):
        replace_input(node, scaled.output[0], gate)
    replace_input(rescaling, factor, own_scale)


def _int4_product(values: Values, product: NodeProto) -> None:
    """Make MatMulNBits of 4 bits, which rounds activations itself, a `Linear4`."""
    given = {name: attribute(product, name, 0) for name in _IN_BLOCKS}
    require(given == _IN_BLOCKS, f"its kernel is another one: {given}")
    require(not any(product.input[3:]), "the product has zero points or a bias of its own")
    n_in, n_out = attribute(product, "K"), attribute(product, "N")
    require(n_in % NIBBLE_BLOCK == 0, f"{n_in} inputs are no blocks of {NIBBLE_BLOCK}")
    values.constant(product.input[1], n_out, n_in // NIBBLE_BLOCK, NIBBLE_BLOCK // 2)
    scales = values.constants.get(product.input[2], TensorProto())
    require(scales.data_type == TensorProto.FLOAT, "the scales are no constant of floats")
    _become(product, "Linear4", product.input[:3])


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


def _mixing(values: Values, linear: NodeProto) -> None:
    """Put the mixing of what a product reads into the product."""
    require(linear.op_type == "Linear", "inputs in blocks are not mixed")
    require(not attribute(linear, "mixed"), "its inputs are mixed already")
    linear.input[0] = _before_mixing(values, linear.input[0])
    set_attributes(linear, mixed=1)


def _before_mixing(values: Values, mixed: str) -> str:
    """Return x of H x, in which x has eight parts."""
    joined = values.maker(mixed, "Reshape")
    product = values.maker(joined.input[0], "MatMul")
    matrix, parts = inputs_of(product, 2)
    apart = values.maker(parts, "Reshape")
    require(values.array(matrix).tolist() == _HADAMARD.tolist(), "it is another mixture")
    shape, after = (values.array(node.input[1]).tolist() for node in (apart, joined))
    *tokens, n_parts, size = shape
    require(n_parts == len(_HADAMARD) and not any(tokens), "what is mixed has not eight parts")
    require(after == [*tokens, n_parts * size], "the parts are not joined")
    return apart.input[0]


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
    node = values.maker(name, "Gelu", "Relu", "Mul")
    if node.op_type == "Gelu":
        is_tanh = attribute(node, "approximate", b"none") == b"tanh"
        return "gelu_tanh" if is_tanh else "gelu", node.input[0]
    if node.op_type == "Relu":
        return "relu", node.input[0]
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
    require(values.has_linears, "nothing is rounded")
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
    require(values.has_linears, "nothing is rounded")
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


def _head_product(values: Values, product: NodeProto) -> None:
    """Make a product of floats with a matrix for each head `HeadLinear`, in a graph with ours."""
    require(values.has_linears, "nothing is rounded")
    weight = values.constants.get(product.input[1], TensorProto())
    is_of_heads = attribute(product, "equation") == b"...hi,hio->...ho"
    require(is_of_heads and len(weight.dims) == 3, "it is no product with a matrix for each head")
    product.op_type, product.domain = "HeadLinear", DOMAIN
    product.attribute.clear()


_Rule = Callable[[Values, NodeProto], None]
# In the order of the rounds: operators, and what is done to each of their nodes.
_RULES: tuple[tuple[tuple[str, ...], _Rule], ...] = (
    (("MatMulIntegerToFloat",), _int8_product),
    (("MatMulNBits",), _int4_product),
    (("Add",), _addition),
    (LINEARS, _mixing),
    (LINEARS, _activation),
    (("RMSNormalization", "LayerNormalization"), _norm),
    (("GroupQueryAttention",), attend_over_texts),
    (("RMSNormalization", "LayerNormalization"), _norm_alone),
    (("Div",), _length_one),
    (("Einsum",), _head_product),
)


def _become(node: NodeProto, operator: str, inputs: Iterable[str], **attributes: int) -> None:
    """Make a node one of our operators, with every attribute, that makes the same value."""
    names = list(inputs)
    node.op_type, node.domain = operator, DOMAIN
    node.input[:] = names + [""] * (_N_INPUTS - len(names))
    node.attribute.clear()
    set_attributes(node, activation="", gated=0, norm="", epsilon=0.0, **attributes)

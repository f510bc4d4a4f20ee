"""Products as `Linear`, `Linear4` and `Linear32`, and those of a matrix a head as `HeadLinear`.

A linear layer in int8 is some eight nodes of ONNX Runtime's: the scale of each token, rounding, the
product, and scales again; where what is rounded is mixed first (`export.rounding.mixing`), three
more. Each rule is one of `kernels.fuse`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from onnx import NodeProto, TensorProto
from onnx.numpy_helper import to_array

from kvasir.kernels.adapter_table import HADAMARD
from kvasir.kernels.graph import (
    DOMAIN,
    MOST_INPUTS,
    N_INPUTS,
    NIBBLE_BLOCK,
    Mismatch,
    Values,
    attribute,
    inputs_of,
    replace_input,
    require,
    set_attributes,
)

# Attributes of MatMulNBits whose kernel rounds activations as `Linear4` does.
_IN_BLOCKS = {"bits": 4, "block_size": NIBBLE_BLOCK, "accuracy_level": 4}


def int8_product(values: Values, product: NodeProto) -> None:
    """Make rounding, MatMulIntegerToFloat and the scale of each token a `Linear`."""
    quantized, matrix, one, scales, zero_point = inputs_of(product, 5)  # no zero points, no bias
    x, scale, block = rounded(values, quantized)
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


def rounded(values: Values, quantized: str) -> tuple[str, str, int]:
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
    computing = [node for node in values.readers(gated) if node.op_type != "Shape"]
    if [node.op_type for node in computing] == ["Reshape"]:
        product = values.reader(computing[0].output[0], "MatMul")
        gated = values.reader(product.output[0], "Reshape").output[0]
        before_mixing(values, gated)
    readers = sorted((n.op_type, n.output[0]) for n in values.readers(gated))
    readers = [pair for pair in readers if pair[0] != "Shape"]
    operators = [operator for operator, _ in readers]
    require(operators == ["Abs", "QuantizeLinear"], "what is gated is not rounded alone")
    (_, magnitudes), (_, quantized) = readers
    own_scale = rounded(values, quantized)[1]
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


def int4_product(values: Values, product: NodeProto) -> None:
    """Make MatMulNBits of 4 bits, which rounds activations itself, a `Linear4`."""
    given = {name: attribute(product, name, 0) for name in _IN_BLOCKS}
    require(given == _IN_BLOCKS, f"its kernel is another one: {given}")
    require(not any(product.input[3:]), "the product has zero points or a bias of its own")
    n_in, n_out = attribute(product, "K"), attribute(product, "N")
    require(n_in % NIBBLE_BLOCK == 0, f"{n_in} inputs are no blocks of {NIBBLE_BLOCK}")
    values.constant(product.input[1], n_out, n_in // NIBBLE_BLOCK, NIBBLE_BLOCK // 2)
    x, matrix, scales = product.input[:3]
    of_scales = TensorProto.FLOAT
    if values.operator(scales) == "Cast":  # `Linear4` takes both types
        cast, of_scales = values.maker(scales, "Cast"), TensorProto.FLOAT16
        require(attribute(cast, "to") == TensorProto.FLOAT, "the scales are cast to another type")
        (scales,) = cast.input
    found = values.constants.get(scales, TensorProto()).data_type
    require(found == of_scales, "the scales are no constant of floats")
    _become(product, "Linear4", (x, matrix, scales))


def mixing(values: Values, linear: NodeProto) -> None:
    """Put the mixing of what a product reads into the product."""
    require(linear.op_type == "Linear", "inputs in blocks are not mixed")
    require(not attribute(linear, "mixed"), "its inputs are mixed already")
    linear.input[0] = before_mixing(values, linear.input[0])
    set_attributes(linear, mixed=1)


def before_mixing(values: Values, mixed: str) -> str:
    """Return x of H x, in which x has eight parts."""
    product, joined = inputs_of(values.maker(mixed, "Reshape"), 2)
    matrix, parts = inputs_of(values.maker(product, "MatMul"), 2)
    x, apart = inputs_of(values.maker(parts, "Reshape"), 2)
    require(values.array(matrix).tolist() == HADAMARD.tolist(), "it is another mixture")
    shape, after = (values.array(name).ravel().tolist() for name in (apart, joined))
    require(len(shape) > 1, "what is mixed has no parts")
    *tokens, n_parts, size = shape
    require(n_parts == len(HADAMARD) and not any(tokens), "what is mixed has not eight parts")
    require(after == [*tokens, n_parts * size], "the parts are not joined")
    return x


def float_product(values: Values, product: NodeProto) -> None:
    """Make a product with a constant matrix of floats a `Linear32`."""
    x, name, *bias = product.input
    given = {option: attribute(product, option, 1.0) for option in ("alpha", "beta")}
    require(given == {"alpha": 1.0, "beta": 1.0}, f"the product has factors: {given}")
    require(not attribute(product, "transA", 0), "what is multiplied is transposed")
    require(x not in values.constants, "a constant is multiplied")
    weight = values.constants.get(name)
    if weight is None or weight.data_type != TensorProto.FLOAT or len(weight.dims) != 2:
        raise Mismatch(f"{name} is no constant matrix of floats")
    transposed = int(attribute(product, "transB", 0) != 0)
    n_in, n_out = weight.dims[::-1] if transposed else weight.dims
    require(1 <= n_in <= MOST_INPUTS and n_out, f"the matrix is {n_in} by {n_out}")
    if bias:
        values.constant(bias[0], n_out)
    _become(product, "Linear32", (x, name, "", *bias), transposed=transposed, mixed=0)


def head_product(values: Values, product: NodeProto) -> None:
    """Make a product of floats with a matrix for each head `HeadLinear`, in a graph with ours."""
    require(values.has_linears, "no product is ours")
    weight = values.constants.get(product.input[1], TensorProto())
    is_of_heads = attribute(product, "equation") == b"...hi,hio->...ho"
    require(is_of_heads and len(weight.dims) == 3, "it is no product with a matrix for each head")
    product.op_type, product.domain = "HeadLinear", DOMAIN
    product.attribute.clear()


def _become(node: NodeProto, operator: str, inputs: Iterable[str], **attributes: int) -> None:
    """Make a node one of our operators, with every attribute, that makes the same value."""
    names = list(inputs)
    node.op_type, node.domain = operator, DOMAIN
    node.input[:] = names + [""] * (N_INPUTS - len(names))
    node.attribute.clear()
    set_attributes(node, activation="", gated=0, norm="", epsilon=0.0, **attributes)

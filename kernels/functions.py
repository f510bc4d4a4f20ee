"""Rules of `kernels.fuse`: functions that each CPU computes in its own way, as `Activation`s.

ONNX Runtime has kernels for one instruction set and another, whose last bits differ.
"""

from __future__ import annotations

import math

from onnx import NodeProto, TensorProto

from kvasir.kernels.graph import DOMAIN, Values, attribute, require, set_attributes

_ACTIVATIONS = {"Sigmoid": "sigmoid", "Tanh": "tanh", "Exp": "exp", "Softplus": "softplus"}
FUNCTIONS = (*_ACTIVATIONS, "Gelu")
# Of a constant, which ONNX Runtime computes once, and we in every run.
_MOST_CONSTANTS = 8192


def function(values: Values, node: NodeProto) -> None:
    """Make a function of each number an `Activation`."""
    _require_floats(values, node.input[0])
    is_tanh = attribute(node, "approximate", b"none") == b"tanh"
    _activate(node, _ACTIVATIONS.get(node.op_type, "gelu_tanh" if is_tanh else "gelu"))


def softmax(values: Values, node: NodeProto) -> None:
    """Make a softmax over the last axis a `Norm`."""
    _require_floats(values, node.input[0])
    require(attribute(node, "axis", -1) == -1, "the softmax is over another axis")
    node.op_type, node.domain = "Norm", DOMAIN
    node.attribute.clear()
    set_attributes(node, norm="softmax")


def minus_softplus(values: Values, gather: NodeProto) -> None:
    """Make log_softmax([0, x])[0] the softplus of x, with its sign changed."""
    shares = values.maker(gather.input[0], "LogSoftmax")
    pad = values.maker(shares.input[0], "Pad")
    column = values.maker(pad.input[0], "Unsqueeze")
    pads = [*values.array(pad.input[1])]
    last = len(pads) // 2 - 1
    before = [int(i == last) for i in range(len(pads))]
    is_pair = attribute(pad, "mode", b"constant") == b"constant" and pads == before
    require(is_pair and not any(pad.input[2:]), "no zero is beside each number")
    axes = (values.number(column.input[1]), attribute(shares, "axis", -1))
    require({*axes, attribute(gather, "axis", 0)} <= {-1, last}, "pairs are along another axis")
    index = values.constants.get(gather.input[1])
    is_first = index is not None and not index.dims and values.number(gather.input[1]) == 0
    require(is_first, "the share is not that of the zero")
    values.reader(shares.output[0], "Gather")
    _require_floats(values, column.input[0])
    shares.input[0] = column.input[0]
    _activate(shares, "softplus")
    gather.op_type, gather.input[:] = "Neg", [shares.output[0]]
    gather.attribute.clear()


def square(values: Values, node: NodeProto) -> None:
    """Make a number to the power of two its product with itself."""
    require(values.number(node.input[1]) == 2.0, "the power is another one")
    node.op_type, node.input[1] = "Mul", node.input[0]


def _activate(node: NodeProto, activation: str) -> None:
    node.op_type, node.domain = "Activation", DOMAIN
    node.attribute.clear()
    set_attributes(node, activation=activation)


def _require_floats(values: Values, name: str) -> None:
    """Require a product of ours, beside which a value is of floats unless its maker says more."""
    require(values.has_linears, "no product is ours")
    floats, constant = TensorProto.FLOAT, values.constants.get(name)
    if constant is not None:
        fits = constant.data_type == floats and math.prod(constant.dims) <= _MOST_CONSTANTS
        require(fits, f"{name} is of another type, or large")
    elif name in values.inputs:
        of_floats = values.inputs[name].type.tensor_type.elem_type == floats
        require(of_floats, f"{name} is of another type")
    elif values.operator(name) == "Cast":
        of_floats = attribute(values.maker(name, "Cast"), "to") == floats
        require(of_floats, f"{name} is of another type")

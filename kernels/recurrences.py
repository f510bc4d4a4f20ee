"""Rules of `kernels.fuse`: recurrent layers as `Convolution` and `Memory`."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from kvasir.kernels.graph import (
    DOMAIN,
    Mismatch,
    Values,
    attribute,
    inputs_of,
    require,
    set_attributes,
)

MOST_KEYS = 512  # of a head
_NEW_TOKENS = "n_new"  # an input of the graph


def convolution(values: Values, node: NodeProto) -> None:
    """Make a convolution over a state and new tokens, and the state after these, one node."""
    require(values.has_linears, "no product is ours")
    x, weight, bias, before = inputs_of(node, 4)
    known = values.maker(before, "Slice").input[0]
    past, new = inputs_of(values.maker(known, "Concat"), 2)
    gather = next((n for n in values.readers(known) if n.op_type == "GatherElements"), node)
    require(new == x and attribute(gather, "axis") == 1, "the state is of other tokens")
    column = values.maker(values.maker(gather.input[1], "Expand").input[0], "Unsqueeze")
    first, places = values.maker(column.input[0], "Add").input
    from_end = values.maker(first, "Unsqueeze").input[0]
    last = np.arange(values.constants[weight].dims[2] - 1)
    is_last = from_end == _NEW_TOKENS and np.array_equal(values.array(places).flat, last)
    require(is_last, "the state is not of the last new tokens")
    silu = {b"silu": 1, b"none": 0}.get(attribute(node, "activation"), -1)
    require(attribute(node, "channels_last") and silu >= 0, "the convolution is another one")
    present, gather.output[0] = gather.output[0], f"{gather.output[0]}.stock"
    node.op_type, node.domain = "Convolution", DOMAIN
    node.input[:] = [x, weight, bias, past, _NEW_TOKENS]
    node.output[:] = [node.output[0], present]
    node.attribute.clear()
    set_attributes(node, silu=silu)


def memory(values: Values, node: NodeProto) -> None:
    """Make a recurrence over matrices a `Memory`."""
    require(values.has_linears and values.readers(_NEW_TOKENS), "it is no decoder's, rounded")
    require(attribute(node, "update_rule") in (b"gated", b"gated_delta"), "the rule is another one")
    require(attribute(node, "q_num_heads") == attribute(node, "kv_num_heads"), "heads are shared")
    past = values.inputs.get(node.input[3])  # [rows, heads, keys, values]
    if past is None or past.type.tensor_type.shape.dim[2].dim_value > MOST_KEYS:
        raise Mismatch(f"a head has more than {MOST_KEYS} keys")
    scale, (*inputs, rate) = attribute(node, "scale", 1.0), [*node.input, ""][:6]
    node.op_type, node.domain = "Memory", DOMAIN
    node.input[:] = [*inputs, rate, _NEW_TOKENS]
    node.attribute.clear()
    set_attributes(node, scale=scale)

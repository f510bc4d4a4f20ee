"""Attention over rows of floats as `RowAttention`: encoder-decoders, and scores with biases."""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from kvasir.kernels.graph import (
    DOMAIN,
    Values,
    attention_options,
    attribute,
    require,
    set_attributes,
)

MOST_CHANNELS = 640  # of a head
_DECODE = "decode"  # an input of graphs with rows of two types
# Inputs of GroupQueryAttention by their places.
_NEW_KEYS, _NEW_VALUES, _KEYS, _VALUES, _SEQLENS, _COSINES, _SINES = 1, 2, 3, 4, 5, 7, 8
_BIAS, _SINKS, _MORE = 10, 11, 12


def attend_over_rows(values: Values, node: NodeProto) -> None:
    """Make GroupQueryAttention over rows of floats, own ones or sources', a `RowAttention`."""
    require(values.has_linears, "no product is ours")
    require(_DECODE not in values.inputs, "rows have two types")
    inputs = [*node.input, *[""] * (_MORE - len(node.input))]
    require(not any(inputs[_MORE:]), "keys and values have scales")
    rows = [values.inputs.get(inputs[i]) for i in (_KEYS, _VALUES)]
    for row in rows:
        is_float = row is not None and row.type.tensor_type.elem_type == TensorProto.FLOAT
        require(is_float, "keys and values are no rows of floats")
    assert rows[0] is not None
    n_channels = rows[0].type.tensor_type.shape.dim[3].dim_value
    fits = n_channels and n_channels % 16 == 0 and n_channels <= MOST_CHANNELS
    require(fits, f"{n_channels} channels of a head")
    appends = not inputs[_NEW_KEYS]
    if not appends:  # keys and values of no tokens
        require(inputs[_NEW_KEYS] == inputs[_NEW_VALUES], "keys and values come beside queries")
        require(not attribute(node, "causal", 1), "a source is seen in part")
        require(not any(node.output[1:]), "a source changes")
    rotates = attribute(node, "do_rotary", 0)
    rotation = inputs[_COSINES : _SINES + 1] if rotates else ["", ""]
    options = attention_options(node)
    options["window"] = attribute(node, "local_window_size", -1)
    node.op_type, node.domain = "RowAttention", DOMAIN
    rows_and_ends = [inputs[i] for i in (0, _KEYS, _VALUES, _SEQLENS)]
    node.input[:] = [*rows_and_ends, *rotation, inputs[_BIAS], inputs[_SINKS]]
    node.attribute.clear()
    set_attributes(node, **options, appends=int(appends))

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
    dims = rows[0].type.tensor_type.shape.dim
    n_channels = dims[3].dim_value if len(dims) == 4 else 0
    fits = n_channels and n_channels % 16 == 0 and n_channels <= MOST_CHANNELS
    require(fits, f"{n_channels} channels of a head")
    options = attention_options(node)
    options["window"] = attribute(node, "local_window_size", -1)
    rotates = attribute(node, "do_rotary", 0)
    rotation = inputs[_COSINES : _SINES + 1] if rotates else ["", ""]
    appends = not inputs[_NEW_KEYS]
    if appends:
        require(attribute(node, "causal", 1), "tokens see later ones")
        require(len(node.output) == 3 and all(node.output), "rows are not kept")
    else:
        require(inputs[_NEW_KEYS] == inputs[_NEW_VALUES], "keys and values come beside queries")
        require(_is_empty(values, inputs[_NEW_KEYS]), "a source grows")
        require(not attribute(node, "causal", 1), "a source is seen in part")
        require(options["window"] == -1 and not rotates, "a source has windows or rotations")
        require(not any(node.output[1:]), "a source changes")
    node.op_type, node.domain = "RowAttention", DOMAIN
    rows_and_ends = [inputs[i] for i in (0, _KEYS, _VALUES, _SEQLENS)]
    node.input[:] = [*rows_and_ends, *rotation, inputs[_BIAS], inputs[_SINKS]]
    node.attribute.clear()
    set_attributes(node, **options, appends=int(appends))


def _is_empty(values: Values, name: str) -> bool:
    """Whether a value of three axes has no tokens, whatever the sizes of its other axes are."""
    shape = values.maker(values.maker(name, "Expand").input[1], "Concat").input
    return len(shape) == 3 and shape[1] in values.constants and values.number(shape[1]) == 0

"""Rules of `kernels.fuse`: attention of packed texts, and over rows of floats.

An encoder's graph puts tokens into a row for each text, padded on the right, and takes them out of
the rows that ONNX Runtime's operator makes. `TextAttention` and `TextAttention32` read packed
tokens, and where each text starts. `RowAttention` and `RowAttention8` are over the rows of
encoder-decoders, beside recurrent layers, and where scores have biases.
"""

from __future__ import annotations

from onnx import GraphProto, NodeProto, TensorProto
from onnx.helper import make_node, make_tensor

from kvasir.kernels.graph import (
    DOMAIN,
    LINEARS,
    MOST_CHANNELS,
    Values,
    attention_options,
    attribute,
    replace_all,
    require,
    set_attributes,
)

STARTS = "texts.cumulative_sequence_length"
# Inputs of the graph, as `PackedInputs` has them.
_ROWS, _PLACES, _LENGTHS, _TOKENS = "rows", "places", "lengths", "input_ids"
# Inputs of GroupQueryAttention by their places.
_NEW_KEYS, _NEW_VALUES, _KEYS, _VALUES, _SEQLENS, _COSINES, _SINES = 1, 2, 3, 4, 5, 7, 8
_BIAS, _SINKS, _STEPS, _MORE = 10, 11, 12, 14


def attend_over_texts(values: Values, node: NodeProto) -> None:
    """Make GroupQueryAttention over rows of texts, and what makes and reads rows, one node.

    What it attends to is rounded to 8 bits if the product that reads it rounds as well.
    """
    inputs = [*node.input, *[""] * (_SINKS + 1 - len(node.input))]
    qkv, rows = values.maker(inputs[0], "Gather").input
    require(rows == _ROWS, "attention is not over packed texts")
    lengths, _ = values.maker(values.maker(inputs[_SEQLENS], "Cast").input[0], "Sub").input
    require(lengths == _LENGTHS, "the rows have other lengths")
    flat = values.reader(node.output[0], "Reshape")
    packed = values.reader(flat.output[0], "Gather")
    require(packed.input[1] == _PLACES, "the tokens are not packed again")
    options = attention_options(node)
    product = values.reader(packed.output[0], *LINEARS)
    n_in, of_floats = values.sizes(product)[0], product.op_type == "Linear32"
    n_channels = n_in // options["heads"]
    require(
        n_channels % 16 == 0 and n_channels <= MOST_CHANNELS, f"{n_channels} channels of a head"
    )
    window, bias = _window(values, node, inputs[_BIAS])
    rotation = inputs[_COSINES : _SINES + 1] if attribute(node, "do_rotary", 0) else ["", ""]
    packed.op_type = "TextAttention32" if of_floats else "TextAttention"
    packed.domain = DOMAIN
    packed.input[:] = [qkv, STARTS, *rotation, bias, inputs[_SINKS]]
    packed.attribute.clear()
    looks_ahead = 1 - attribute(node, "causal", 1)
    set_attributes(packed, **options, window=window, looks_ahead=looks_ahead)


def _window(values: Values, node: NodeProto, bias: str) -> tuple[int, str]:
    """Return to how many positions on a side a token attends, -1 for all, and scores' biases.

    A window to both sides is a bias of -infinity beyond it.
    """
    window = attribute(node, "local_window_size", -1)
    if values.operator(bias) != "Where":
        require(values.operator(bias) in ("", "Transpose"), "scores have an unknown bias")
        return window, bias
    visible, seen, hidden = values.maker(bias, "Where").input
    everywhere, near = values.maker(values.maker(visible, "Unsqueeze").input[0], "And").input
    distance, size = values.maker(near, "Less").input
    values.maker(values.maker(distance, "Abs").input[0], "Sub")
    values.maker(everywhere, "Expand")
    require(values.number(seen) == 0.0, "what a token attends to has a bias")
    require(values.number(hidden) == float("-inf"), "what is beyond a window is attended to")
    return int(values.number(size)), ""


def attend_over_rows(values: Values, node: NodeProto) -> None:
    """Make GroupQueryAttention over rows, own ones or sources', one of ours.

    Rows are floats, or whole numbers of 8 bits, whose steps the exporter puts into the weights.
    """
    require(values.has_linears, "no product is ours")
    inputs = [*node.input, *[""] * (_MORE - len(node.input))]
    require(not any(inputs[_MORE:]), "the attention has further inputs")
    rows = [values.inputs.get(inputs[i]) for i in (_KEYS, _VALUES)]
    types = [row.type.tensor_type.elem_type for row in rows if row is not None]
    of_bytes = types == [TensorProto.INT8] * 2
    require(of_bytes or types == [TensorProto.FLOAT] * 2, "keys and values are no such rows")
    steps = inputs[_STEPS:_MORE]
    if of_bytes:
        kinds = [attribute(node, f"{name}_quant_type") for name in "kv"]
        is_whole = kinds == [b"PER_TENSOR"] * 2 and all(values.number(name) == 1 for name in steps)
        require(is_whole and attribute(node, "kv_cache_bit_width") == 8, "rows have scales")
    else:
        require(not any(steps), "keys and values have scales")
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
    node.op_type, node.domain = "RowAttention8" if of_bytes else "RowAttention", DOMAIN
    rows_and_ends = [inputs[i] for i in (0, _KEYS, _VALUES, _SEQLENS)]
    node.input[:] = [*rows_and_ends, *rotation, inputs[_BIAS], inputs[_SINKS]]
    node.attribute.clear()
    set_attributes(node, **options, appends=int(appends))


def _is_empty(values: Values, name: str) -> bool:
    """Whether a value of three axes has no tokens, whatever the sizes of its other axes are."""
    shape = values.maker(values.maker(name, "Expand").input[1], "Concat").input
    return len(shape) == 3 and shape[1] in values.constants and values.number(shape[1]) == 0


def add_starts(graph: GraphProto) -> None:
    """Let a graph make STARTS, int32 [texts + 2], of the texts' lengths.

    After the last text is the token beside which `pack` runs a lone one: a text of its own.
    """
    zero, axis = f"{STARTS}.zero", f"{STARTS}.axis"
    joined, ends, n_tokens, starts = (f"{STARTS}.{i}" for i in range(4))
    graph.initializer.append(make_tensor(zero, TensorProto.INT64, [1], [0]))
    graph.initializer.append(make_tensor(axis, TensorProto.INT64, [], [0]))
    made = [
        make_node("Concat", [zero, _LENGTHS], [joined], axis=0),
        make_node("CumSum", [joined, axis], [ends]),
        make_node("Shape", [_TOKENS], [n_tokens]),
        make_node("Concat", [ends, n_tokens], [starts], axis=0),
        make_node("Cast", [starts], [STARTS], to=TensorProto.INT32),
    ]
    replace_all(graph.node, [*made, *graph.node])

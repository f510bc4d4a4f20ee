"""Attention of packed texts in an encoder's graph, as `TextAttention` or `TextAttention32`.

The exported graph puts tokens into a row for each text, padded on the right, and takes them out of
the rows that ONNX Runtime's operator makes. Ours reads packed tokens, and where each text starts.
"""

from __future__ import annotations

from onnx import GraphProto, NodeProto, TensorProto
from onnx.helper import make_node, make_tensor

from kvasir.kernels.graph import (
    DOMAIN,
    LINEARS,
    Values,
    attention_options,
    attribute,
    replace_all,
    require,
    set_attributes,
)

MOST_CHANNELS = 512  # of a head
STARTS = "texts.cumulative_sequence_length"
# Inputs of the graph, as `PackedInputs` has them.
_ROWS, _PLACES, _LENGTHS, _TOKENS = "rows", "places", "lengths", "input_ids"
# Inputs of GroupQueryAttention by their places.
_SEQLENS, _COSINES, _SINES, _BIAS, _SINKS = 5, 7, 8, 10, 11


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

"""A decoder's graph over blocks of keys and values, by `Attention` or `Attention32`.

The exported graph runs over rows; in int8 and int4 it has branches for prompts and for decoding,
whose rows differ. The operator rounds keys and values itself, a token and head at a time, so one
kind of run computes packed tokens of any sequences, prompts' and new ones alike. Inputs are those
of `export.graphs.paged`; past_key_values.{i}.key and .value are int8 [blocks, n_kv_head,
BLOCK_SIZE, head_dim], and the scales of their tokens .key_scales and .value_scales, float [blocks,
n_kv_head, BLOCK_SIZE]. In fp32 they are floats without scales. Outputs are logits, and the same
blocks as present.{i}.…, to be aliased.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from onnx.helper import make_node, make_opsetid, make_tensor, make_tensor_value_info

from kvasir.kernels.graph import (
    DECODE,
    DOMAIN,
    MOST_CHANNELS,
    Mismatch,
    attention_options,
    attribute,
    replace_all,
    require,
    set_attributes,
)

BLOCK_SIZE = 64  # tokens
_TOKENS, _ROW, _AXIS = ("input_ids", "position_ids"), ".row", "row.axis"
_RUN = ("cumulative_sequence_length", "past_seqlens", "block_table")
_OF_ROWS = ("seqlens_k", "total_sequence_length", DECODE)
_FLOAT_ROWS = ("prompt_key_values.", "prompt_present.")
# Inputs of GroupQueryAttention by their places.
_QKV, _NEW_KEYS, _KEYS, _COSINES, _SINES, _BIAS, _SINKS, _STEP = 0, 1, 3, 7, 8, 10, 11, 12


def page(model: ModelProto) -> ModelProto:
    """Return a model of packed tokens; the one given is not changed.

    model: a decoder, loaded without external data. Raises Mismatch for what the operator does not
    compute: scores with a bias.
    """
    paged = ModelProto()
    paged.CopyFrom(model)
    graph = paged.graph
    nodes = list(_decoding(graph))
    attentions = [node for node in nodes if node.op_type == "GroupQueryAttention"]
    if not attentions:
        raise Mismatch("the graph has no attention over rows")
    given = {value.name: value for value in graph.input}
    makers = {name: node for node in nodes for name in node.output}
    unread = {name for node in attentions for name in _attend_over_blocks(node, given, makers)}
    in_one_row = [make_node("Unsqueeze", [name, _AXIS], [name + _ROW]) for name in _TOKENS]
    for node in nodes:
        node.input[:] = [name + _ROW if name in _TOKENS else name for name in node.input]
    replace_all(graph.node, [*in_one_row, *nodes])
    graph.initializer.append(make_tensor(_AXIS, TensorProto.INT64, [1], [0]))
    kept = [
        [value for value in values if value.name not in unread]
        for values in (graph.input, graph.output)
    ]
    replace_all(graph.input, _inputs(kept[0]))
    replace_all(graph.output, _outputs(kept[1]))
    paged.opset_import.append(make_opsetid(DOMAIN, 1))
    return paged


def _decoding(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield a graph's nodes as they decode, without branches."""
    for node in graph.node:
        if node.op_type != "If" or node.input[0] != DECODE:
            yield node
            continue
        branch: GraphProto = attribute(node, "then_branch")
        names = {
            made.name: name for made, name in zip(branch.output, node.output, strict=True) if name
        }
        for inner in branch.node:
            inner.input[:] = [names.get(name, name) for name in inner.input]
            inner.output[:] = [names.get(name, name) for name in inner.output]
            inner.ClearField("name")  # which another layer may have too
            yield inner


def _attend_over_blocks(
    node: NodeProto, given: dict[str, ValueInfoProto], makers: dict[str, NodeProto]
) -> list[str]:
    """Make GroupQueryAttention over rows an `Attention`, or `Attention32` if they are floats.

    Returns the names of its values before and after the run where these are its keys: they go.
    """
    inputs = [*node.input, *[""] * (_STEP + 2 - len(node.input))]
    keys, values = inputs[_KEYS : _KEYS + 2]
    options = attention_options(node) | {"window": attribute(node, "local_window_size", -1)}
    require(attribute(node, "causal", 1), "tokens see later ones")
    require(len(node.output) == 3 and all(node.output), "keys and values are not kept")
    require(keys in given and values in given, "keys and values are no inputs")
    rows = given[keys].type.tensor_type
    require(len(rows.shape.dim) == 4, f"{keys} has {len(rows.shape.dim)} axes and not 4")
    of_floats = rows.elem_type == TensorProto.FLOAT
    if inputs[_BIAS]:
        raise Mismatch("scores have a bias")
    if inputs[_NEW_KEYS]:
        raise Mismatch("keys and values are a source's")
    n_channels = rows.shape.dim[3].dim_value
    if n_channels % 16 or n_channels > MOST_CHANNELS:
        raise Mismatch(f"a head of {n_channels} channels")
    rotation = inputs[_COSINES : _SINES + 1] if attribute(node, "do_rotary") else ["", ""]
    cached = [keys, f"{keys}_scales", values, f"{values}_scales"]
    attended, *present = node.output
    unread: list[str] = []
    joined = makers.get(inputs[_QKV], node)
    is_twice = joined.op_type == "Concat" and len({*joined.input[-2:]}) == 1  # keys
    if is_twice and not of_floats:
        del joined.input[-1]
        unread, cached[2:] = [values, present.pop()], ["", ""]
    made = [name for output in present for name in (output, f"{output}_scales")]
    if of_floats:
        cached[1] = cached[3] = made[1] = made[3] = ""
    node.Clear()
    node.op_type, node.domain = "Attention32" if of_floats else "Attention", DOMAIN
    node.input.extend([inputs[_QKV], *cached, *_RUN, *rotation, "", inputs[_SINKS]])
    node.output.extend([attended, *made])
    set_attributes(node, **options)
    return unread


def _inputs(given: list[ValueInfoProto]) -> Iterator[ValueInfoProto]:
    for value in given:
        name = value.name
        if name in _TOKENS:
            yield make_tensor_value_info(name, TensorProto.INT64, ["tokens"])
        elif name.startswith("past_key_values."):
            yield from _blocks(value)
        elif name not in _OF_ROWS and not name.startswith(_FLOAT_ROWS):
            yield value
    yield make_tensor_value_info(_RUN[0], TensorProto.INT32, ["batch + 1"])
    yield make_tensor_value_info(_RUN[1], TensorProto.INT32, ["batch"])
    yield make_tensor_value_info(_RUN[2], TensorProto.INT32, ["batch", "blocks"])


def _outputs(given: list[ValueInfoProto]) -> Iterator[ValueInfoProto]:
    for value in given:
        if value.name.startswith("present."):
            yield from _blocks(value)
        elif not value.name.startswith(_FLOAT_ROWS):
            yield value


def _blocks(rows: ValueInfoProto) -> Iterator[ValueInfoProto]:
    """Yield blocks in the place of rows, and their scales."""
    given = rows.type.tensor_type
    _, heads, _, channels = (dim.dim_value for dim in given.shape.dim)
    shape: list[str | int] = ["num_blocks", heads, BLOCK_SIZE]
    yield make_tensor_value_info(rows.name, given.elem_type, [*shape, channels])
    if given.elem_type == TensorProto.INT8:
        yield make_tensor_value_info(f"{rows.name}_scales", TensorProto.FLOAT, shape)

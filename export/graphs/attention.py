"""A second graph over the model's own weights file, which shows what the served graph keeps inside.

GroupQueryAttention returns its softmax on request. That costs time, so the served graph does not.
Each run is a whole text at once, without rows of keys and values other than its source's, and from
states that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from kvasir.export.graphs.decoder import STEP_INPUTS
from kvasir.export.graphs.lens import add_lens, add_output
from kvasir.export.graphs.trace import SOURCE_INPUTS
from kvasir.export.rewrite import (
    MICROSOFT,
    constant,
    remove_unused_constants,
    replace_node,
    take_branch,
)
from kvasir.model.directory import (
    ATTENTION_GRAPH_FILE,
    GRAPH_FILE,
    HEAD_MASK_INPUT,
    NEW_TOKENS_INPUT,
    ROWS_OUTPUT,
    STATE_OUTPUTS,
)
from kvasir.model.packing import SOURCE_OUTPUT

_AFTER_SOFTMAX = 2  # of the operator's attribute qk_output
_PAST = (3, 4)  # the operator's inputs for keys and values; the first is LinearAttention's state
_ROTARY = (7, 8)  # cosines and sines
_BIAS = 10  # added to scores; the next one is the score of each head's sink
_OF_PAST = re.compile(r"\.(\d+)\.\w+$")  # in the name of a row or state
_SCORE = ".cross_attention.score"
_KEPT_INPUTS = (f"{SOURCE_OUTPUT}.", *STATE_OUTPUTS)
# Inputs of LinearAttention that decide what a token reads of another's value.
_MEMORY = {"queries": 0, "keys": 1, "decays": 4, "rates": 5}


def write_attention_graph(directory: Path) -> None:
    """Make attention.onnx from model.onnx; both read model.onnx.data.

    A further input is head_mask: float [n_layer, most heads of a layer, 1], by which each head's
    weighted values, or what it reads of its matrix, are multiplied.

    Outputs, of each layer i: attention.{i}: float [batch, n_head, sequence, sequence], the softmax;
    queries.{i} [batch, sequence, (n_head + 2 n_kv_head) · head_dim], keys.{i} and values.{i}
    [batch, n_kv_head, sequence, head_dim], as scores are made of them; where attention has them,
    bias.{i} [1 or batch, n_head, sequence, sequence] and sinks.{i} [n_head]. A decoder has lens:
    float [n_layer · rows, vocab_size], the last norm and the head over each layer's output; logits,
    the last layer's of them; and rows: float [layers of attention, n_head, rows, sequence], the
    softmax there. A recurrent layer with matrices, without attention, has instead queries.{i},
    keys.{i}, decays.{i} and perhaps rates.{i}, as LinearAttention gets them.
    One with an encoder has source_attention.{i}: [1, n_head, sequence, n_source_positions], over
    all keys that it is given of a source, which the encoder's graph makes; an LSTM decoder too, if
    it attends.
    """
    model = ir.load(directory / GRAPH_FILE)
    graph = model.graph
    is_decoder = any(value.name == "logits" for value in graph.outputs)
    if is_decoder:
        graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
        graph.inputs[:] = [
            value
            for value in graph.inputs
            if value.name in (*STEP_INPUTS, *SOURCE_INPUTS, NEW_TOKENS_INPUT)
            or str(value.name).startswith(_KEPT_INPUTS)
        ]
    for choice in [node for node in graph if node.op_type == "If"]:
        take_branch(choice, "else_branch")  # over rows of floats
    attentions = [node for node in graph if node.op_type == "GroupQueryAttention"]
    of_sources = [node for node in attentions if node.inputs[1] is not None]  # no joined product
    own = [node for node in attentions if node.inputs[1] is None]
    if is_decoder:
        indices = next(value for value in graph.inputs if value.name == "logits_indices")
        add_lens(graph, indices)
    attending = {_layer_of(past) for node in own if (past := node.inputs[_PAST[0]]) is not None}
    states = {node: node.inputs[_PAST[0]] for node in graph if node.op_type == "LinearAttention"}
    memories = [  # of heads, and not of channels
        node
        for node, past in states.items()
        if past and str(past.name).endswith(".values") and _layer_of(past) not in attending
    ]
    heads = [node.attributes["num_heads"].as_int() for node in own]
    heads += [node.attributes["q_num_heads"].as_int() for node in memories]
    additive = [node for node in graph if _is_additive(node)]
    scores = [value for name, value in graph.initializers.items() if name.endswith(_SCORE)]
    heads += [value.shape.numpy()[0] for value in scores if value.shape]
    of_heads = ir.Shape(["n_layer", max(heads, default=0), 1])
    mask = ir.val(HEAD_MASK_INPUT, ir.DataType.FLOAT, of_heads)
    graph.inputs.append(mask)
    for layer, node in enumerate(own):
        past = node.inputs[_PAST[0]]  # none of an encoder
        _show_attention(graph, node, _layer_of(past) if past else layer, mask)
    for node in memories:
        _show_memory(graph, node, mask)
    if is_decoder and own:
        _add_rows(graph, [node.outputs[3] for node in own], indices)
    for layer, node in enumerate(of_sources):
        weights, n_head = _spell_out(graph, node), node.attributes["num_heads"].as_int()
        sizes: list[int | str] = ["batch", n_head, "sequence", "n_source_positions"]
        add_output(graph, weights, f"source_attention.{layer}", sizes)
    for layer, node in enumerate(additive):
        sizes = ["batch", heads[0], "sequence", "n_source_positions"]
        add_output(graph, node.outputs[0], f"source_attention.{layer}", sizes)
    RemoveUnusedNodesPass()(model)
    graph.inputs[:] = [v for v in graph.inputs if v.uses() or v.name not in SOURCE_INPUTS]
    remove_unused_constants(graph)
    ir.save(model, directory / ATTENTION_GRAPH_FILE)


def _is_additive(node: ir.Node) -> bool:
    """Return whether a node makes weights of additive attention: shares by their sum in order."""
    last = node.inputs[1].producer() if node.op_type == "Div" and node.inputs[1] else None
    total = last.inputs[0].producer() if last is not None and last.inputs[0] else None
    return total is not None and total.op_type == "CumSum"


def _show_attention(graph: ir.Graph, node: ir.Node, layer: int, mask: ir.Value) -> None:
    """Make what attention computes outputs of the graph, and multiply its heads by their mask."""
    n_head, n_kv_head = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    qkv, *more = node.inputs[0], *node.inputs[_BIAS:][:2]
    for position in _PAST:
        node.replace_input_with(position, None)
    node.attributes["qk_output"] = ir.AttrInt64("qk_output", _AFTER_SOFTMAX)
    node.resize_outputs(4)
    _, *rows, weights = node.outputs
    add_output(graph, weights, f"attention.{layer}", ["batch", n_head, "sequence", "sequence"])
    for value, name in zip(rows, ("keys", "values"), strict=True):
        add_output(graph, value, f"{name}.{layer}", ["batch", n_kv_head, "sequence", "head_dim"])
    tape = Tape()
    if node.attributes["do_rotary"].as_int():  # the texts' positions begin at 0
        start = constant(graph, "first_position", np.array([0]))
        cosines, sines = (node.inputs[position] for position in _ROTARY)
        assert cosines is not None
        assert cosines.shape is not None
        attributes = {
            "num_heads": n_head + 2 * n_kv_head,
            "rotary_embedding_dim": 2 * cosines.shape.numpy()[1],
        }
        inputs = [qkv, start, cosines, sines]
        queries = tape.op("RotaryEmbedding", inputs, attributes, domain=MICROSOFT)
    else:
        queries = tape.op("Identity", [qkv])
    add_output(graph, queries, f"queries.{layer}", ["batch", "sequence", "width"])
    shapes: list[list[int | str]] = [["biases", n_head, "sequence", "sequence"], [n_head]]
    for extra, name, shape in zip(more, ("bias", "sinks"), shapes, strict=False):
        if extra is not None:
            add_output(graph, tape.op("Identity", [extra]), f"{name}.{layer}", shape)
    _mask_heads(graph, node, n_head, mask, layer, tape)


def _show_memory(graph: ir.Graph, node: ir.Node, mask: ir.Value) -> None:
    """Make outputs of what decides a matrix's reads, and multiply its heads by their mask."""
    tape, layer = Tape(), _layer_of(node.inputs[_PAST[0]])
    for name, position in _MEMORY.items():
        if position < len(node.inputs):
            shown = tape.op("Identity", [node.inputs[position]])
            add_output(graph, shown, f"{name}.{layer}", ["batch", "sequence", "width"])
    _mask_heads(graph, node, node.attributes["q_num_heads"].as_int(), mask, layer, tape)


def _layer_of(past: ir.Value | None) -> int:
    match = _OF_PAST.search(str(past and past.name))
    assert match is not None, "rows and states are inputs of the graph"
    return int(match[1])


def _mask_heads(
    graph: ir.Graph, node: ir.Node, n_head: int, mask: ir.Value, layer: int, tape: Tape
) -> None:
    """Multiply a node's first output by its heads' mask, and insert the tape's nodes after it."""
    heads_apart = constant(graph, f"heads_apart_{n_head}", np.array([0, 0, n_head, -1]))
    apart = ir.node("Reshape", [None, heads_apart])
    which = constant(graph, f"layer_{layer}", np.array([layer]))
    own = tape.op("Gather", [mask, which], {"axis": 0})  # [1, most heads of a layer, 1]
    if mask.shape is not None and mask.shape[1] != n_head:
        to_end = (constant(graph, f"slice_{n}", np.array([n])) for n in (0, n_head, 1))
        own = tape.op("Slice", [own, *to_end])
    masked = tape.op("Mul", [apart.outputs[0], own])
    joined = tape.op("Reshape", [masked, constant(graph, "heads_joined", np.array([0, 0, -1]))])
    ir.convenience.replace_all_uses_with(node.outputs[0], joined)
    apart.replace_input_with(0, node.outputs[0])
    graph.insert_after(node, [apart, *tape.nodes])


def _add_rows(graph: ir.Graph, attentions: Sequence[ir.Value], indices: ir.Value) -> None:
    """Give the graph the output `rows`: those of the asked positions, of every layer."""
    tape = Tape()
    rows = [tape.op("Gather", [weights, indices], {"axis": 2}) for weights in attentions]
    every = tape.op("Concat", rows, {"axis": 0})
    graph.extend(tape.nodes)
    add_output(graph, every, ROWS_OUTPUT, ["layers", "n_head", "rows", "sequence"])


def _spell_out(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Replace attention to a source by single operators; return its weights.

    The operator takes no target that is longer than its source. The weights that make queries hold
    attention's scale.
    """
    query, keys, values = node.inputs[0], *(node.inputs[position] for position in _PAST)
    n_head, n_kv_head = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    shared = constant(graph, "shared_heads", np.arange(n_head) // (n_head // n_kv_head))
    apart = constant(graph, "heads_apart", np.array([0, 0, n_head, -1]))
    joined = constant(graph, "heads_joined", np.array([0, 0, -1]))
    tape = Tape()
    op, axis = tape.op, {"axis": 1}
    keys, values = (op("Gather", [rows, shared], axis) for rows in (keys, values))
    query = op("Reshape", [query, apart])  # [batch, n, n_head, head_dim]
    scores = op("Einsum", [query, keys], {"equation": "bnhd,bhsd->bhns"})
    weights = op("Softmax", [scores], {"axis": -1})
    attended = op("Einsum", [weights, values], {"equation": "bhns,bhsd->bnhd"})
    result = op("Reshape", [attended, joined])
    replace_node(node, tape.nodes, result)
    return weights

"""A second, small graph over the model's own weights file, which also returns attention's weights.

GroupQueryAttention returns its softmax on request. That costs time, so the served graph does not.
Each run is a whole text at once, without rows of keys and values other than its source's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from export.graph import STEP_INPUTS
from export.rewrite import constant, remove_unused_constants, replace_node, take_branch
from model.bundle import ATTENTION_GRAPH_FILE, GRAPH_FILE
from model.packing import SOURCE_OUTPUT

_AFTER_SOFTMAX = 2  # of the operator's attribute qk_output
_PAST = (3, 4)  # the operator's inputs for keys and values


def write_attention_graph(directory: Path) -> None:
    """Make attention.onnx from model.onnx; both read model.onnx.data.

    Outputs: of a decoder logits, and attention.{i}: float [batch, n_head, sequence, sequence]. One
    with an encoder also has source_attention.{i}: [1, n_head, sequence, n_source_positions], over
    all keys that it is given of a source, which the encoder's graph makes.
    """
    model = ir.load(directory / GRAPH_FILE)
    graph = model.graph
    if any(value.name == "logits" for value in graph.outputs):
        graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
        graph.inputs[:] = [value for value in graph.inputs if _is_kept(str(value.name))]
    for choice in [node for node in graph if node.op_type == "If"]:
        take_branch(choice, "else_branch")  # over rows of floats
    attentions = [node for node in graph if node.op_type == "GroupQueryAttention"]
    of_sources = [node for node in attentions if node.inputs[1] is not None]  # no joined product
    own = [node for node in attentions if node.inputs[1] is None]
    for layer, node in enumerate(own):
        for position in _PAST:
            node.replace_input_with(position, None)
        node.attributes["qk_output"] = ir.AttrInt64("qk_output", _AFTER_SOFTMAX)
        node.resize_outputs(4)
        n_head = node.attributes["num_heads"].as_int()
        _add_output(graph, node.outputs[3], f"attention.{layer}", n_head, "sequence")
    for layer, node in enumerate(of_sources):
        weights, n_head = _spell_out(graph, node), node.attributes["num_heads"].as_int()
        _add_output(graph, weights, f"source_attention.{layer}", n_head, "n_source_positions")
    if of_sources:
        RemoveUnusedNodesPass()(model)  # what made their lengths and their lack of new keys
    remove_unused_constants(graph)
    ir.save(model, directory / ATTENTION_GRAPH_FILE)


def _is_kept(name: str) -> bool:
    return name in STEP_INPUTS or name.startswith(f"{SOURCE_OUTPUT}.")


def _add_output(graph: ir.Graph, weights: ir.Value, name: str, n_head: int, n_keys: str) -> None:
    weights.name, weights.type = name, ir.TensorType(ir.DataType.FLOAT)
    weights.shape = ir.Shape(["batch", n_head, "sequence", n_keys])
    graph.outputs.append(weights)


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
    keys, values = (op("Gather", [of, shared], axis) for of in (keys, values))
    query = op("Reshape", [query, apart])  # [batch, n, n_head, head_dim]
    scores = op("Einsum", [query, keys], {"equation": "bnhd,bhsd->bhns"})
    weights = op("Softmax", [scores], {"axis": -1})
    attended = op("Einsum", [weights, values], {"equation": "bhns,bhsd->bnhd"})
    result = op("Reshape", [attended, joined])
    replace_node(node, tape.nodes, result)
    return weights

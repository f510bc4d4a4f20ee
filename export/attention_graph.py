"""A second, small graph over the model's own weights file, which also returns attention's weights.

GroupQueryAttention returns its softmax on request. That costs time, so the served graph does not.
Each run is a whole text at once, without rows of keys and values.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from export.graph import STEP_INPUTS
from export.rewrite import remove_unused_constants, take_branch
from model.bundle import ATTENTION_GRAPH_FILE, GRAPH_FILE

_AFTER_SOFTMAX = 2  # of the operator's attribute qk_output
_PAST = (3, 4)  # the operator's inputs for keys and values


def write_attention_graph(directory: Path) -> None:
    """Make attention.onnx from model.onnx; both read model.onnx.data.

    Outputs: of a decoder logits, and attention.{i}: float [batch, n_head, sequence, sequence].
    """
    model = ir.load(directory / GRAPH_FILE)
    graph = model.graph
    if any(value.name == "logits" for value in graph.outputs):
        graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
        graph.inputs[:] = [value for value in graph.inputs if value.name in STEP_INPUTS]
    for choice in [node for node in graph if node.op_type == "If"]:
        take_branch(choice, "else_branch")  # over rows of floats
    attentions = [node for node in graph if node.op_type == "GroupQueryAttention"]
    for layer, node in enumerate(attentions):
        for position in _PAST:
            node.replace_input_with(position, None)
        node.attributes["qk_output"] = ir.AttrInt64("qk_output", _AFTER_SOFTMAX)
        node.resize_outputs(4)
        weights, n_head = node.outputs[3], node.attributes["num_heads"].as_int()
        weights.name, weights.type = f"attention.{layer}", ir.TensorType(ir.DataType.FLOAT)
        weights.shape = ir.Shape(["batch", n_head, "sequence", "sequence"])
        graph.outputs.append(weights)
    remove_unused_constants(graph)
    ir.save(model, directory / ATTENTION_GRAPH_FILE)

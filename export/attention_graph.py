"""A second, small graph over the model's own weights file, which also returns attention's weights.

GroupQueryAttention returns its softmax on request. That costs time, so the served graph does not.
Each run is a whole text at once, without rows of keys and values other than its source's.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from export.graph import STEP_INPUTS
from export.rewrite import remove_unused_constants, take_branch
from export.trace import SOURCE_INPUTS
from model.bundle import ATTENTION_GRAPH_FILE, GRAPH_FILE
from model.packing import SOURCE_OUTPUT

_AFTER_SOFTMAX = 2  # of the operator's attribute qk_output
_PAST = (3, 4)  # the operator's inputs for keys and values


def write_attention_graph(directory: Path) -> None:
    """Make attention.onnx from model.onnx; both read model.onnx.data.

    Outputs: of a decoder logits, and attention.{i}: float [batch, n_head, sequence, sequence]. One
    with an encoder also has source_attention.{i}: [batch, n_head, sequence, n_source], of the keys
    and values of a source, which the encoder's graph makes.
    """
    model = ir.load(directory / GRAPH_FILE)
    graph = model.graph
    if any(value.name == "logits" for value in graph.outputs):
        graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
        kept = {*STEP_INPUTS, *SOURCE_INPUTS}
        graph.inputs[:] = [
            value
            for value in graph.inputs
            if value.name in kept or str(value.name).startswith(f"{SOURCE_OUTPUT}.")
        ]
    for choice in [node for node in graph if node.op_type == "If"]:
        take_branch(choice, "else_branch")  # over rows of floats
    attentions = [node for node in graph if node.op_type == "GroupQueryAttention"]
    of_sources = [node for node in attentions if node.inputs[1] is not None]
    own = [node for node in attentions if node.inputs[1] is None]
    named = [("attention", *pair) for pair in enumerate(own)]
    named += [("source_attention", *pair) for pair in enumerate(of_sources)]
    for kind, layer, node in named:
        n_keys = "n_source" if node in of_sources else "sequence"
        for position in _PAST if node in own else ():
            node.replace_input_with(position, None)
        node.attributes["qk_output"] = ir.AttrInt64("qk_output", _AFTER_SOFTMAX)
        node.resize_outputs(4)
        for unused in node.outputs[1:3]:
            unused.name = unused.name or ""
        weights, n_head = node.outputs[3], node.attributes["num_heads"].as_int()
        weights.name, weights.type = f"{kind}.{layer}", ir.TensorType(ir.DataType.FLOAT)
        weights.shape = ir.Shape(["batch", n_head, "sequence", n_keys])
        graph.outputs.append(weights)
    remove_unused_constants(graph)
    ir.save(model, directory / ATTENTION_GRAPH_FILE)

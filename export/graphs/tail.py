"""The likeliest tokens of each row of logits, chosen by the graph, so that few numbers leave a GPU.

The input is inverse_temperatures, float [rows, 1]. The output is [rows, 3 k] floats: the log of the
sum of the exponentials of the row; that of the row minus its largest logit, times the inverse
temperature, k - 1 times; the k largest logits; and their ids, which float32 holds exactly.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvasir.export.rewrite import constant
from kvasir.model.directory import CANDIDATES_OUTPUT, INVERSE_TEMPERATURES_INPUT

MAX_CANDIDATES = 128
# One TopK takes a block of a GPU's threads for a row, so that of a large vocabulary has two stages.
_MOST_PARTS = 32
_LEAST_PART = 1024  # tokens
_MOST_IDS = 2**24  # that float32 counts


def add_candidates(graph: ir.Graph, vocab_size: int) -> None:
    """Add both to a graph with the output `logits`, float [rows, vocab_size]."""
    assert vocab_size <= _MOST_IDS
    (logits,) = (value for value in graph.outputs if value.name == "logits")
    k = min(MAX_CANDIDATES, vocab_size)

    def add(operator: str, *inputs: ir.Value, n_outputs: int = 1, **attributes: object) -> ir.Node:
        node = ir.node(operator, inputs, attributes, num_outputs=n_outputs)  # type: ignore[arg-type]
        for i, value in enumerate(node.outputs):
            value.name = f"{CANDIDATES_OUTPUT}.{len(graph)}.{i}"
        graph.append(node)
        return node

    def whole(name: str, *numbers: int) -> ir.Value:
        return constant(graph, f"{CANDIDATES_OUTPUT}.{name}", np.array(numbers, dtype=np.int64))

    def largest(values: ir.Value) -> tuple[ir.Value, ir.Value]:
        chosen, places = add("TopK", values, whole("k", k), n_outputs=2, axis=-1).outputs
        return chosen, places

    parts = n_parts(vocab_size)
    values, ids = largest(
        add("Reshape", logits, whole("parts", -1, vocab_size // parts)).outputs[0]
    )
    if parts > 1:
        of_row = whole("row", -1, parts * k)
        firsts = whole("firsts", *np.repeat(np.arange(parts) * (vocab_size // parts), k).tolist())
        values, ids = (add("Reshape", x, of_row).outputs[0] for x in (values, ids))
        values, places = largest(values)
        ids = add("GatherElements", add("Add", ids, firsts).outputs[0], places, axis=1).outputs[0]
    first, one = whole("first", 0), whole("one", 1)
    peak = add("Slice", values, first, one, one).outputs[0]
    inverse = ir.val(INVERSE_TEMPERATURES_INPUT, ir.DataType.FLOAT, ir.Shape(["rows", 1]))
    graph.inputs.append(inverse)

    def log_sum(values: ir.Value) -> ir.Value:
        total = add("ReduceSum", add("Exp", values).outputs[0], one, keepdims=1).outputs[0]
        return add("Log", total).outputs[0]

    below = add("Sub", logits, peak).outputs[0]
    log_total = add("Add", log_sum(below), peak).outputs[0]
    tempered = log_sum(add("Mul", below, inverse).outputs[0])
    ids = add("Cast", ids, to=ir.DataType.FLOAT).outputs[0]
    # CUDA's Concat gets sizes and addresses of equal parts by value. Those of unequal ones it may
    # copy from memory that ONNX Runtime frees after the run, and a CUDA graph would read it again.
    is_first = constant(graph, f"{CANDIDATES_OUTPUT}.is_first", np.arange(k)[None] == 0)
    log_totals = add("Where", is_first, log_total, tempered).outputs[0]
    packed = add("Concat", log_totals, values, ids, axis=1).outputs[0]
    packed.name = CANDIDATES_OUTPUT
    packed.type = ir.TensorType(ir.DataType.FLOAT)
    packed.shape = ir.Shape(["rows", 3 * k])
    graph.outputs.append(packed)


def n_parts(vocab_size: int) -> int:
    """Return the number of equal parts of a vocabulary; 1 where nothing divides it."""
    most = max(1, min(_MOST_PARTS, vocab_size // _LEAST_PART))
    return max(n for n in range(1, most + 1) if vocab_size % n == 0)

"""The likeliest tokens that a graph chooses, in ONNX Runtime on the CPU, against numpy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from kvasir.export.graphs.tail import MAX_CANDIDATES, add_candidates, n_parts
from kvasir.model.directory import CANDIDATES_OUTPUT, INVERSE_TEMPERATURES_INPUT
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.sampling.logits import Candidates
from kvasir.server.engine.sampling.params import Floats


def make_session(vocab_size: int) -> onnxruntime.InferenceSession:
    """Logits are the input plus nothing."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    shape = ir.Shape(["rows", vocab_size])
    given = ir.val("given", type=kind, shape=shape)
    node = ir.node("Identity", [given])
    node.outputs[0].name, node.outputs[0].type = "logits", kind
    node.outputs[0].shape = shape
    graph = ir.Graph([given], node.outputs, nodes=[node], opset_imports={"": 23}, name="tail")
    add_candidates(graph, vocab_size)
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def run(vocab_size: int, logits: Floats, inverse: Floats) -> Candidates:
    given = {"given": logits, INVERSE_TEMPERATURES_INPUT: inverse}
    (packed,) = make_session(vocab_size).run([CANDIDATES_OUTPUT], given)
    return Candidates.unpack(packed)


@pytest.mark.parametrize("vocab_size", [5, 128, 300, 2048, 50257, 49152, 10007])
@pytest.mark.parametrize("n_rows", [1, 7])
def test_the_likeliest_and_the_sum_are_numpys(vocab_size: int, n_rows: int) -> None:
    """In one stage and two; the second half of the rows is full of ties."""
    generator = np.random.default_rng(vocab_size)
    logits = (generator.standard_normal((n_rows, vocab_size)) * 4).astype(np.float32)
    logits[n_rows // 2 :] = np.round(logits[n_rows // 2 :])
    inverse = generator.choice([0.5, 1.0, 1 / 0.7, 50.0], size=(n_rows, 1)).astype(np.float32)
    found = run(vocab_size, logits, inverse)
    k = min(vocab_size, MAX_CANDIDATES)
    assert found.ids.shape == (n_rows, k)
    assert (found.logits == -np.sort(-logits, axis=1)[:, :k]).all()
    assert (np.take_along_axis(logits, found.ids, axis=1) == found.logits).all()
    assert all(len(set(ids.tolist())) == k for ids in found.ids)
    expected = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    assert found.log_totals == pytest.approx(expected, abs=4e-5)  # of _SUM_ROUNDING
    below = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    tempered = np.log(np.exp(below * inverse).sum(axis=1))
    assert found.tempered_totals == pytest.approx(tempered, abs=4e-5)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_finite_sum(broken: float) -> None:
    logits = np.zeros((3, 4096), dtype=np.float32)
    logits[1, 77 if broken > 0 or np.isnan(broken) else slice(None)] = broken
    found = run(4096, logits, np.ones((3, 1), dtype=np.float32))
    assert np.isfinite(found.log_totals).tolist() == [True, False, True]


def test_large_vocabularies_are_cut_into_equal_parts() -> None:
    sizes = {300: 1, 32000: 25, 49152: 32, 50257: 29, 128256: 32, 151936: 32, 10007: 1}
    assert {size: n_parts(size) for size in sizes} == sizes

"""`Norm` on every path of this machine: against NumPy, and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.graphs import needs_library, norm_graph, session, usable_paths
from tests.kernels.oracle import prologue
from tests.kernels.test_linear import floats, same_bits

pytestmark = needs_library


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 200),
    rows=st.integers(0, 300),
    norm=st.sampled_from(["layer", "rms", "l2", "softmax"]),
    present=st.sets(st.sampled_from(["weight", "bias"])),
)
@settings(max_examples=40, deadline=None)
def test_every_path_computes_what_numpy_does(
    seed: int, width: int, rows: int, norm: str, present: set[str]
) -> None:
    random = np.random.default_rng(seed)
    x, attributes = floats(random, rows, width), {"norm": norm, "epsilon": 1e-5}
    present = set() if norm == "softmax" else present
    constants = {name: floats(random, width) for name in sorted(present)}
    weight, bias = constants.get("weight", np.ones(1)), constants.get("bias", np.zeros(1))
    exact = x.astype(np.float64)
    if norm == "l2":
        lengths = np.linalg.norm(exact, axis=1, keepdims=True)
        expected = exact / np.maximum(lengths, 1e-5) * weight + bias
        tolerance: Any = np.abs(weight).max() + np.abs(bias).max()
    elif norm == "softmax":
        shares = np.exp(exact - exact.max(axis=1, keepdims=True, initial=-np.inf))
        expected = shares / shares.sum(axis=1, keepdims=True)
        tolerance = 1.0
    else:
        plain = attributes | {"activation": "", "gated": 0}
        expected, tolerance = prologue(exact, plain, {"norm": weight, "norm_bias": bias})
    model = norm_graph(attributes, constants)
    scalar = session(model, "scalar").run(None, {"x": x})[0]
    assert (np.abs(scalar - expected) <= 2e-6 * tolerance).all()
    for path in usable_paths():
        assert same_bits(session(model, path, 2).run(None, {"x": x})[0], scalar), path


ONES = np.ones(4, dtype=np.float32)
RMS = {"norm": "rms", "epsilon": 0.0}


@pytest.mark.parametrize(
    ("attributes", "constants", "message"),
    [
        (RMS | {"norm": "max"}, {}, 'norm is "max"'),
        ({"epsilon": 0.0}, {}, "norm has to be there"),
        ({"norm": "softmax"}, {"weight": ONES}, "no weight"),
        ({"norm": "softmax"}, {"bias": ONES}, "no bias"),
        ({"norm": "rms"}, {}, "epsilon has to be there"),
        (RMS | {"epsilon": -1.0}, {}, "at least 0"),
        (RMS, {"weight": ONES, "bias": ONES[:3]}, r"bias is float\[3\]"),
        (RMS, {"weight": ONES[None]}, "of one dimension"),
        (RMS, {"weight": ONES[:0]}, "of one dimension"),
        (RMS, {"weight": ONES}, "its last dimension has to be 4"),
    ],
)
def test_an_unfit_node_or_run(
    attributes: dict[str, Any], constants: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        session(norm_graph(attributes, constants)).run(None, {"x": np.ones((2, 5), np.float32)})

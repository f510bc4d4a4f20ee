"""`HeadLinear` on every path of this machine: against NumPy, and against each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.graphs import head_linear_graph, needs_library, session, usable_paths
from tests.kernels.test_linear import floats, same_bits

pytestmark = needs_library


@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.integers(1, 5),
    n_in=st.integers(1, 70),
    n_out=st.integers(1, 100),
    rows=st.integers(0, 80),
)
@settings(max_examples=30, deadline=None)
def test_every_path_computes_what_numpy_does(
    seed: int, heads: int, n_in: int, n_out: int, rows: int
) -> None:
    """And a row has the same bits alone."""
    random = np.random.default_rng(seed)
    x, weight = floats(random, rows, heads, n_in), floats(random, heads, n_in, n_out)
    exact = np.einsum("thi,hio->tho", x.astype(np.float64), weight.astype(np.float64))
    bound = np.einsum("thi,hio->tho", np.abs(x), np.abs(weight))
    model = head_linear_graph(weight)
    scalar = session(model, "scalar").run(None, {"x": x})[0]
    assert (np.abs(scalar - exact) <= 1e-5 * bound).all()
    for path in usable_paths():
        opened = session(model, path, 2)
        assert same_bits(opened.run(None, {"x": x})[0], scalar), path
        for row in range(0, rows, 17):
            assert same_bits(opened.run(None, {"x": x[None, row]})[0][0], scalar[row]), path


@pytest.mark.parametrize("shape", [(3, 2, 5), (3, 4, 4), (4,)])
def test_an_unfit_run(shape: tuple[int, ...]) -> None:
    opened = session(head_linear_graph(np.ones((2, 4, 3), np.float32)))
    with pytest.raises(Exception, match=r"float\[2, 4, 3\] and x float"):
        opened.run(None, {"x": np.ones(shape, np.float32)})


def test_no_inputs() -> None:
    """Nothing would be written to the output."""
    opened = session(head_linear_graph(np.ones((2, 0, 3), np.float32)))
    with pytest.raises(Exception, match="inputs at least 1"):
        opened.run(None, {"x": np.ones((5, 2, 0), np.float32)})

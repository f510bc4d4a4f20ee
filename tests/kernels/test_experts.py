"""`Experts`, `Experts4` and `Experts32` on every path here: against NumPy, and each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.graphs import experts_graph, needs_library, session, usable_paths
from tests.kernels.test_linear import floats, run, same_bits
from tests.kit import linear_reference

pytestmark = needs_library
PATHS = usable_paths()
OPERATORS = ["Experts", "Experts4", "Experts32"]


def matrices(
    random: np.random.Generator, operator: str, name: str, shape: tuple[int, int, int]
) -> dict[str, NDArray[Any]]:
    """Return the constants of a layer [experts, n_out, n_in]."""
    n_experts, n_out, n_in = shape
    bias = {f"{name}_bias": floats(random, n_experts, n_out)}
    if operator == "Experts32":
        return bias | {name: floats(random, *shape)}
    scales = floats(random, n_experts, n_out, n_in // 32) / 8
    if operator == "Experts4":
        scales = scales.astype(np.float16)
    n_bytes = n_in // 2 if operator == "Experts4" else n_in
    weight = random.integers(0, 256, (n_experts, n_out, n_bytes), dtype=np.uint8)
    return bias | {name: weight, f"{name}_scales": scales}


def mixture(
    random: np.random.Generator, operator: str, sizes: tuple[int, int, int, int]
) -> dict[str, NDArray[Any]]:
    """Return the constants of experts, which read n_in channels and make n_out of n_hidden."""
    n_experts, n_in, n_hidden, n_out = sizes
    up = matrices(random, operator, "up", (n_experts, 2 * n_hidden, n_in))
    return up | matrices(random, operator, "down", (n_experts, n_out, n_hidden))


def rows_of(random: np.random.Generator, rows: int, n_experts: int, n_in: int) -> dict[str, Any]:
    """Return rows, and the expert of each."""
    routes = np.eye(n_experts, dtype=np.float32)[random.integers(n_experts, size=rows)]
    return {"x": floats(random, rows, n_in), "routes": routes}


@pytest.mark.parametrize("operator", OPERATORS)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 60),
    sizes=st.tuples(st.integers(1, 5), *[st.integers(1, 4)] * 3),
    biased=st.booleans(),
    limit=st.sampled_from([0.0, 0.5]),
    threads=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_every_path_computes_what_numpy_does(
    operator: str,
    seed: int,
    rows: int,
    sizes: tuple[int, int, int, int],
    biased: bool,
    limit: float,
    threads: int,
) -> None:
    """And all of them the same bits."""
    random = np.random.default_rng(seed)
    n_experts, *blocks = sizes
    n_in, n_hidden, n_out = (32 * n for n in blocks)
    constants = mixture(random, operator, (n_experts, n_in, n_hidden, n_out))
    if not biased:
        constants = {name: of for name, of in constants.items() if not name.endswith("bias")}
    given = rows_of(random, rows, n_experts, n_in)
    model = experts_graph(operator, constants, limit)
    scalar = run(model, given, "scalar")
    for path in PATHS:
        assert same_bits(run(model, given, path, threads), scalar), path

    reference = getattr(linear_reference, operator)._run
    names = ("up", "up_scales", "up_bias", "down", "down_scales", "down_bias")
    given |= {name: constants.get(name) for name in names}
    evaluator = object.__new__(getattr(linear_reference, operator))
    (expected,) = reference(evaluator, **given, limit=limit)
    errors = np.abs(scalar - expected).max(axis=1, initial=0)
    size = np.abs(expected).max(initial=1e-30)
    if operator == "Experts32":
        assert errors.max(initial=0) <= 1e-3 * size  # sums of large numbers may be small
    else:  # a number in the middle of two steps of 8 bits may be rounded to either
        assert np.sort(errors)[: rows // 2].max(initial=0) <= 1e-5 * size
        assert errors.max(initial=0) <= 0.05 * size


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_row_has_its_own_bits(operator: str, path: str) -> None:
    """Alone, among others of its expert and of others, for any number of threads."""
    random = np.random.default_rng(1)
    model = experts_graph(operator, mixture(random, operator, (4, 96, 160, 96)))
    given = rows_of(random, 120, 4, 96)
    given["x"][77, 5] = np.nan
    one, two = session(model, path), session(model, path, 2)
    (together,) = one.run(None, given)
    assert np.isnan(together[77]).all()
    assert np.isfinite(np.delete(together, 77, 0)).all()
    assert same_bits(two.run(None, given)[0], together)
    for rows in (slice(0, 1), slice(3, 9), slice(40, 120), slice(119, 120)):
        part = {name: of[rows] for name, of in given.items()}
        assert same_bits(two.run(None, part)[0], together[rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"down": (3, 64, 32), "down_scales": (3, 64, 1), "down_bias": (3, 64)},
            "up is of 2 experts",
        ),
        ({"down": (2, 64, 64), "down_scales": (2, 64, 2)}, "which have to be half as many"),
        ({"up": (2, 63, 32)}, "of even outputs"),
        ({"up": (2, 64)}, "has to be uint8"),
        ({"up": (2, 64, 33)}, "whole blocks of 32"),
        ({"up": (0, 64, 32)}, "none of them 0"),
        ({"up_scales": (2, 64, 2)}, "scales of up"),
        ({"down_bias": (2, 63)}, "bias of down"),
    ],
)
def test_an_unfit_mixture(change: dict[str, tuple[int, ...]], message: str) -> None:
    constants = mixture(np.random.default_rng(2), "Experts", (2, 32, 32, 64))
    for name, shape in change.items():
        constants[name] = np.ones(shape, dtype=constants[name].dtype)
    with pytest.raises(Exception, match=message):
        session(experts_graph("Experts", constants))


@pytest.mark.parametrize(("x", "routes"), [((3, 31), (3, 2)), ((3, 32), (2, 2)), ((3, 32), (3, 3))])
def test_an_unfit_run(x: tuple[int, int], routes: tuple[int, int]) -> None:
    opened = session(
        experts_graph("Experts", mixture(np.random.default_rng(2), "Experts", (2, 32, 32, 64)))
    )
    given = {"x": np.ones(x, dtype=np.float32), "routes": np.ones(routes, dtype=np.float32)}
    with pytest.raises(Exception, match=r"have to be float \[rows, 32\] and \[rows, 2\]"):
        opened.run(None, given)

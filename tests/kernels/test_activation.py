"""`Activation` on every path of this machine: against NumPy, and against each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels.graphs import activation_graph, needs_library, session, usable_paths
from tests.kernels.oracle import ACTIVATIONS, DOUBLES
from tests.kernels.test_linear import same_bits

pytestmark = needs_library

# Functions, beside those that products have.
FUNCTIONS: dict[str, Callable[[DOUBLES], DOUBLES]] = {
    **{name: function for name, function in ACTIVATIONS.items() if name},
    "tanh": np.tanh,
    "exp": np.exp,
    "softplus": lambda x: np.logaddexp(0, x),
}
# What goes into exp is rounded, and may be 88; those beside x are off by a part of it, and tanh,
# which is 2 sigmoid(2 x) - 1, by a part of 1.
RELATIVE = {"gelu_tanh": 2e-5, "quick_gelu": 2e-5}
OF_X, ABSOLUTE = {"gelu": 1e-7, "gelu_tanh": 1e-15}, {"tanh": 2e-7}


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_every_path_computes_what_numpy_does(activation: str) -> None:
    """In several tasks, and in rows that no vector of numbers fits."""
    x = np.linspace(-88, 88, 2353 * 17, dtype=np.float32).reshape(1, 2353, 17)
    with np.errstate(over="ignore"):
        expected = FUNCTIONS[activation](x.astype(float))
    scalar = session(activation_graph(activation), "scalar").run(None, {"x": x})[0]
    allowed = RELATIVE.get(activation, 1e-6) * np.abs(expected) + 2e-36
    allowed += OF_X.get(activation, 0) * np.abs(x) + ABSOLUTE.get(activation, 0)
    assert (np.abs(scalar - expected) <= allowed).all()
    for path in usable_paths():
        opened = session(activation_graph(activation), path, 2)
        assert same_bits(opened.run(None, {"x": x})[0], scalar), path
        assert same_bits(opened.run(None, {"x": x[0, 7]})[0], scalar[0, 7]), path


@pytest.mark.parametrize("path", usable_paths())
@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("exp", [0, np.inf, np.nan, 0]),
        ("softplus", [0, np.inf, np.nan, 0]),
        ("sigmoid", [0, 1, np.nan, 0]),
        ("tanh", [-1, 1, np.nan, -1]),
    ],
)
def test_what_is_not_finite(path: str, activation: str, expected: list[float]) -> None:
    x = np.array([-np.inf, np.inf, np.nan, -1000], dtype=np.float32)
    found = session(activation_graph(activation), path).run(None, {"x": x})[0]
    np.testing.assert_array_equal(found, np.array(expected, dtype=np.float32))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5)])
def test_one_number_and_none(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, dtype=np.float32)
    assert same_bits(session(activation_graph("exp")).run(None, {"x": x})[0], np.ones_like(x))


@pytest.mark.parametrize(
    ("activation", "message"), [("", "has to be there"), ("sine", 'activation is "sine"')]
)
def test_an_unfit_node(activation: str, message: str) -> None:
    with pytest.raises(Exception, match=f"Activation.*{message}"):
        session(activation_graph(activation))

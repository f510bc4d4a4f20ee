"""A graph that the operators do not take is refused with a sentence, and crashes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.graphs import graph, needs_library, session

pytestmark = needs_library

WEIGHT = np.zeros((6, 5), dtype=np.int8)
ONES = np.ones(5, dtype=np.float32)
FITTING: dict[str, Any] = {"weight": WEIGHT, "scales": ONES}
NIBBLES: dict[str, Any] = {
    "weight": np.zeros((5, 2, 16), dtype=np.uint8),
    "scales": np.ones((5, 2), dtype=np.float32),
}
UNFIT: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Linear", {"weight": WEIGHT[0]}, {}, r"weight is int8\[5\]"),
    ("Linear", {"weight": WEIGHT[:0]}, {}, "weight has 0 inputs"),
    ("Linear", {"weight": np.zeros((131_073, 5), np.int8)}, {}, "at most 131072"),
    ("Linear", {"weight": WEIGHT.astype(np.uint8)}, {}, "(?i)type"),
    ("Linear", {"scales": ONES[:4]}, {}, r"scales is float\[4\].* 5 elements"),
    ("Linear", {"bias": ONES[:4]}, {}, r"bias is float\[4\]"),
    ("Linear", {"norm": ONES}, {"norm": "rms", "epsilon": 0.1}, r"norm is float\[5\].* 6 elements"),
    ("Linear", {"norm": np.ones(6, np.float32)}, {}, "need the attribute norm"),
    ("Linear", {}, {"norm": "rms"}, "epsilon"),
    ("Linear", {}, {"norm": "rms", "epsilon": -1.0}, "epsilon"),
    ("Linear", {}, {"norm": "batch", "epsilon": 0.1}, 'norm is "batch".*"rms"'),
    ("Linear", {}, {"activation": "swish"}, 'activation is "swish".*"silu"'),
    ("Linear", {}, {"activation": 3}, "activation has to be a string"),
    ("Linear", {}, {"gated": 2}, "gated is 2"),
    ("Linear", {}, {"mixed": 1}, "mixed is for inputs in eight parts, and there are 6"),
    ("Linear", {}, {"gated": 1.0}, "gated has to be an int"),
    ("Linear", {}, {"transposed": -1}, "transposed is -1"),
    ("Linear", {}, {"block": 32}, "block is 32"),
    ("Linear", {}, {"block": -64}, "block is -64"),
    ("Linear4", {"weight": np.zeros((5, 2, 8), np.uint8)}, {}, r"uint8\[5, 2, 8\]"),
    ("Linear4", {"scales": np.ones((5, 3), np.float32)}, {}, r"scales is float\[5, 3\]"),
    ("Linear4", {"scales": np.ones((5, 3), np.float16)}, {}, r"scales is float16\[5, 3\]"),
    ("Linear4", {"scales": np.ones((5, 2), np.int32)}, {}, r"scales is int32\[5, 2\]"),
]


@pytest.mark.parametrize(("operator", "constants", "attributes", "message"), UNFIT)
def test_an_unfit_graph_does_not_open(
    operator: str, constants: dict[str, Any], attributes: dict[str, Any], message: str
) -> None:
    fitting = FITTING if operator == "Linear" else NIBBLES
    with pytest.raises(Exception, match=message):
        session(graph(operator, fitting | constants, attributes))


@pytest.mark.parametrize("variable", ["weight", "scales", "bias"])
def test_what_is_packed_has_to_be_constant(variable: str) -> None:
    constants = {name: of for name, of in (FITTING | {"bias": ONES}).items() if name != variable}
    with pytest.raises(Exception, match=f"{variable} has to be an initializer"):
        session(graph("Linear", constants, None, ("x", variable)))


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 12)])
def test_a_wrong_input_fails_its_run_alone(shape: tuple[int, ...]) -> None:
    opened = session(graph("Linear", FITTING))
    with pytest.raises(Exception, match="its last dimension has to be 6"):
        opened.run(None, {"x": np.zeros(shape, dtype=np.float32)})
    assert opened.run(None, {"x": np.zeros((3, 6), dtype=np.float32)})[0].shape == (3, 5)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 6), (1, 3, 5)])
def test_a_wrong_residual_is_refused(shape: tuple[int, ...]) -> None:
    opened = session(graph("Linear", FITTING, None, ("x", "residual")))
    given = {"x": np.zeros((3, 6), dtype=np.float32), "residual": np.zeros(shape, dtype=np.float32)}
    with pytest.raises(Exception, match=r"residual is float.*it has to be \[3, 5\]"):
        opened.run(None, given)


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(Exception, match=r"kvasir\.path is avx3; it has to be one of auto"):
        session(graph("Linear", FITTING), "avx3")

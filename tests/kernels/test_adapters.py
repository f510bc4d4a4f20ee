"""Adapters of rows in `Linear` and `Linear4`: against NumPy, on every path, alone and not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.graphs import ADAPTER_INPUTS, FLOATS, graph, needs_library, session, usable_paths
from tests.kernels.oracle import prologue
from tests.kernels.test_linear import PLAIN, floats, run, same_bits
from tests.kit.linear_reference import mix

pytestmark = needs_library
PATHS = usable_paths()
ABSENT = [0] * 6


class Part(NamedTuple):
    """A part of an adapter as operators read it: A [inputs, padded rank], B in panels of 16."""

    a: NDArray[Any]
    b: NDArray[Any]  # [width / 16, rank, 16]
    first: int
    width: int

    @property
    def row(self) -> list[int]:
        """Its row of the table."""
        addresses = self.a.ctypes.data, self.b.ctypes.data
        return [*addresses, self.rank, self.first, self.width, int(self.a.itemsize == 2)]

    @property
    def rank(self) -> int:
        return int(self.b.shape[1])

    def product(self, y: NDArray[np.float64], n_out: int) -> NDArray[np.float64]:
        """Return what it adds to outputs [rows, n_out] of y [rows, inputs]."""
        added = np.zeros((len(y), n_out))
        a, panels = (_wide(matrix).astype(float) for matrix in (self.a, self.b))
        b = panels.transpose(1, 0, 2).reshape(self.rank, -1)[:, : self.width]
        added[:, self.first : self.first + self.width] = y @ a[:, : self.rank] @ b
        return added


def _wide(matrix: NDArray[Any]) -> FLOATS:
    if matrix.itemsize == 4:
        return matrix
    return (matrix.astype(np.uint32) << 16).view(np.float32)


def part(
    random: np.random.Generator, n_in: int, rank: int, first: int, width: int, *, in_16: bool
) -> Part:
    a = np.zeros((n_in, -(-rank // 16) * 16), dtype=np.float32)
    a[:, :rank] = floats(random, n_in, rank)
    b = floats(random, -(-width // 16), rank, 16)
    return Part(_upper(a), _upper(b), first, width) if in_16 else Part(a, b, first, width)


def _upper(matrix: FLOATS) -> NDArray[np.uint16]:
    return (matrix.view(np.uint32) >> 16).astype(np.uint16)


def layer(
    random: np.random.Generator, operator: str, n_in: int, n_out: int
) -> dict[str, NDArray[Any]]:
    if operator == "Linear":
        weight: NDArray[Any] = random.integers(-127, 128, (n_in, n_out), dtype=np.int8)
        return {"weight": weight, "scales": random.random(n_out, dtype=np.float32)}
    weight = random.integers(0, 256, (n_out, n_in // 32, 16), dtype=np.uint8)
    return {"weight": weight, "scales": random.random((n_out, n_in // 32), dtype=np.float32)}


def table(*adapters: Sequence[Part | None]) -> NDArray[np.int64]:
    rows = [[ABSENT if one is None else one.row for one in parts] for parts in adapters]
    return np.array(rows, dtype=np.int64)


@pytest.mark.parametrize("in_16", [False, True])
@pytest.mark.parametrize("operator", ["Linear", "Linear4"])
@pytest.mark.parametrize("seed", range(6))
def test_every_path_adds_what_numpy_does(operator: str, seed: int, *, in_16: bool) -> None:
    """With the same bits: of any ranks, and parts that adapters may lack."""
    random = np.random.default_rng(seed)
    n_in = 32 * int(random.integers(1, 7))
    widths = random.integers(1, 90, 3)
    widths[:2] = widths[:2] // 16 * 16 + 16
    n_out, rows = int(widths.sum()), int(random.integers(1, 40))
    attributes = PLAIN | {"activation": "silu", "gated": seed % 2, "norm": ["", "rms"][seed // 3]}
    attributes |= {"mixed": int(seed % 3 == 1)}
    constants = layer(random, operator, n_in, n_out)
    adapters = []
    for _ in range(3):
        places = zip(np.cumsum([0, *widths[:2]]), widths, strict=True)
        parts = [
            part(random, n_in, int(random.integers(1, 40)), int(at), int(n), in_16=in_16)
            for at, n in places
        ]
        adapters.append([one if random.random() < 0.8 else None for one in parts])
    x = floats(random, rows, n_in * (1 + attributes["gated"]))
    inputs: dict[str, NDArray[Any]] = {"x": x}
    plain = run(graph(operator, constants, attributes), inputs, "scalar")
    # The node's parts are the table's from the second on.
    model = graph(operator, constants, attributes | {"part": 1, "parts": 3}, ("x", *ADAPTER_INPUTS))
    inputs["adapters"] = random.integers(-1, 3, rows)
    inputs["adapter_table"] = table(*([None, *parts] for parts in adapters))
    scalar = run(model, inputs, "scalar")

    y, _ = prologue(inputs["x"].astype(float), attributes, constants)
    y = mix(y) if attributes["mixed"] else y
    expected = plain.astype(float)
    sizes = np.abs(expected)
    for row, adapter in enumerate(inputs["adapters"]):
        for one in adapters[adapter] if adapter >= 0 else ():
            if one is not None:
                expected[row] += one.product(y[row : row + 1], n_out)[0]
                positive = one._replace(a=np.abs(_wide(one.a)), b=np.abs(_wide(one.b)))
                sizes[row] += positive.product(np.abs(y[row : row + 1]), n_out)[0]
    assert (np.abs(scalar - expected) <= 1e-5 * sizes + 1e-30).all()
    without = inputs["adapters"] < 0
    assert same_bits(scalar[without], plain[without])
    for path in PATHS:
        for threads in (1, 2):
            assert same_bits(run(model, inputs, path, threads), scalar), path


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("operator", ["Linear", "Linear4"])
def test_a_row_has_its_own_bits_beside_other_adapters(operator: str, path: str) -> None:
    """Alone, among rows with others and none, and wherever its adapter is in the table."""
    random = np.random.default_rng(1)
    constants = layer(random, operator, 576, 960)
    attributes = PLAIN | {"norm": "rms", "parts": 1}
    model = graph(operator, constants, attributes, ("x", *ADAPTER_INPUTS))
    adapters = [part(random, 576, rank, 0, 960, in_16=True) for rank in (8, 16, 48)]
    one, two = session(model, path), session(model, path, 2)
    x, of_rows = floats(random, 100, 576), random.integers(-1, 3, 100)
    whole = {"x": x, "adapters": of_rows, "adapter_table": table(*([a] for a in adapters))}
    together = one.run(None, whole)[0]
    assert same_bits(two.run(None, whole)[0], together)
    for row in range(0, 100, 7):
        own = adapters[of_rows[row]]
        inputs = {"x": x[row : row + 1], "adapters": np.array([min(of_rows[row], 0)])}
        alone = two.run(None, inputs | {"adapter_table": table([own])})[0]
        assert same_bits(alone, together[row : row + 1])
    # Rows of one sequence share an entry.
    order = np.repeat(np.arange(-1, 3), 25)
    cut = one.run(None, whole | {"adapters": np.arange(-1, 3)})[0]
    assert same_bits(cut, one.run(None, whole | {"adapters": order})[0])


def test_a_row_that_is_not_finite_spoils_no_other_with_its_adapter() -> None:
    random = np.random.default_rng(2)
    constants = layer(random, "Linear", 64, 32)
    model = graph("Linear", constants, PLAIN | {"parts": 1}, ("x", *ADAPTER_INPUTS))
    own = part(random, 64, 4, 0, 32, in_16=False)
    inputs: dict[str, NDArray[Any]] = {"x": floats(random, 6, 64), "adapter_table": table([own])}
    inputs["adapters"] = np.zeros(6, dtype=np.int64)
    clean = run(model, inputs, "auto")
    inputs["x"][3, 5] = np.nan
    found = run(model, inputs, "auto")
    assert np.isnan(found[3]).all()
    assert same_bits(np.delete(found, 3, 0), np.delete(clean, 3, 0))


OWN = part(np.random.default_rng(3), 64, 4, 0, 32, in_16=False)


@pytest.mark.parametrize(
    ("change", "adapters", "n_parts"),
    [
        ({}, [0, 1, 0], 1),  # there is no adapter 1
        ({}, [0, -2, 0], 1),
        ({}, [0, 0], 1),  # three rows
        ({}, [0, 0, 0], 0),  # no such part in the table
        ({2: 0}, [0, 0, 0], 1),
        ({2: 10_000}, [0, 0, 0], 1),
        ({3: 16}, [0, 0, 0], 1),  # ends beyond the outputs
        ({3: -16}, [0, 0, 0], 1),
        ({3: 8, 4: 16}, [0, 0, 0], 1),  # no multiple of 16
        ({4: 0}, [0, 0, 0], 1),
        ({1: 0}, [0, 0, 0], 1),  # A without B
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    change: dict[int, int], adapters: list[int], n_parts: int
) -> None:
    constants = layer(np.random.default_rng(3), "Linear", 64, 32)
    model = graph("Linear", constants, PLAIN | {"parts": 1}, ("x", *ADAPTER_INPUTS))
    row = OWN.row
    for place, value in change.items():
        row[place] = value
    inputs = {
        "x": np.ones((3, 64), dtype=np.float32),
        "adapters": np.array(adapters),
        "adapter_table": np.array([[row]])[:, :n_parts],
    }
    with pytest.raises(Exception, match="adapter"):
        session(model).run(None, inputs)


def test_inputs_and_parts_need_each_other() -> None:
    constants = layer(np.random.default_rng(3), "Linear", 64, 32)
    given: list[tuple[dict[str, int], tuple[str, ...]]]
    given = [({"parts": 1}, ()), ({}, ADAPTER_INPUTS), ({"parts": 1}, ADAPTER_INPUTS[:1])]
    for attributes, names in given:
        with pytest.raises(Exception, match="need each other"):
            session(graph("Linear", constants, PLAIN | attributes, ("x", *names)))

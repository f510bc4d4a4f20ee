"""`RowAttention` on every path here: against NumPy, and each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.attention_oracle import Caches, Places, attention
from tests.kernels.graphs import FLOATS, needs_library, row_graph, session, usable_paths
from tests.kernels.test_attention import floats, ints, rotation
from tests.kernels.test_linear import same_bits

pytestmark = needs_library
PATHS = usable_paths()


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw heads, what changes their scores, and the tokens of each row after the run."""
    kv_heads, size = draw(st.integers(1, 3)), draw(st.sampled_from([16, 32, 48, 80]))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3])),
        "kv_heads": kv_heads,
        "size": size,
        "window": draw(st.sampled_from([-1, -1, 1, 7])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 4.0])),
        "rotated": 2 * draw(st.integers(1, size // 2)),
        "present": draw(st.sets(st.sampled_from(["rotation", "biases", "sinks"]))),
        "new": draw(st.integers(1, 9)),
        "ends": draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        "room": draw(st.sampled_from([40, 41, 300])),
        "biases_differ": draw(st.booleans()),
        "threads": draw(st.integers(1, 3)),
    }


def rows_of(random: np.random.Generator, run: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return keys and values, of which none beyond a row's tokens may be used."""
    shape = (len(run["ends"]), run["kv_heads"], run["room"], run["size"])
    keys, values = floats(random, 2, *shape)
    for row, end in enumerate(run["ends"]):
        keys[row, :, end:] = values[row, :, end:] = np.nan
    return {"keys": keys, "values": values}


@given(run=runs())
@settings(max_examples=40, deadline=None)
def test_new_tokens_are_appended_and_attended_to(run: dict[str, Any]) -> None:
    """By every path with the same bits. A row with fewer tokens than are new has padding."""
    random = np.random.default_rng(run["seed"])
    heads, kv_heads, size, n_new = run["heads"], run["kv_heads"], run["size"], run["new"]
    attributes = {name: run[name] for name in ("heads", "kv_heads", "window", "softcap")}
    constants: dict[str, FLOATS] = {}
    if "rotation" in run["present"]:
        constants |= rotation(40, run["rotated"])
    if "sinks" in run["present"]:
        constants["sinks"] = 2 * floats(random, heads)
    given: dict[str, NDArray[Any]] = rows_of(random, run)
    ends, n_rows = run["ends"], len(run["ends"])
    given["qkv"] = floats(random, n_rows, n_new, (heads + 2 * kv_heads) * size)
    given["seqlens_k"] = ints(*ends) - np.int32(1)
    if "biases" in run["present"]:
        shape = (n_rows if run["biases_differ"] else 1, heads, n_new, max(ends))
        given["biases"] = floats(random, *shape)
    model = row_graph(attributes | {"appends": 1}, constants, given)
    scalar = session(model, "scalar").run(None, given)
    for path in PATHS:
        outputs = session(model, path, run["threads"]).run(None, given)
        assert all(map(same_bits, outputs, scalar)), path

    for row, end in enumerate(ends):
        own, known = min(n_new, end), dict(constants)
        ones = np.ones((1, kv_heads, run["room"]), dtype=np.float32)
        caches = Caches(given["keys"][row : row + 1], ones, given["values"][row : row + 1], ones)
        if "biases" in given:
            of_row = given["biases"][row % len(given["biases"])]
            known["biases"] = np.zeros((1, heads, run["room"], run["room"]), dtype=np.float32)
            known["biases"][0, :, end - own : end, : max(ends)] = of_row[:, :own]
        places = Places(ints(0, own), ints(end - own), ints(0)[None])
        qkv = given["qkv"][row, :own]
        expected, after = attention(qkv, caches, places, known, attributes)
        assert np.abs(scalar[0][row, :own] - expected).max() <= 2e-4
        assert not scalar[0][row, own:].any()
        for found, wanted in zip(scalar[1:], (after.keys, after.values), strict=True):
            np.testing.assert_allclose(found[row], wanted[0], atol=1e-5)


@given(run=runs())
@settings(max_examples=20, deadline=None)
def test_a_source_is_only_read(run: dict[str, Any]) -> None:
    random = np.random.default_rng(run["seed"])
    heads, kv_heads, size, n_new = run["heads"], run["kv_heads"], run["size"], run["new"]
    given: dict[str, NDArray[Any]] = rows_of(random, run)
    before = {name: array.copy() for name, array in given.items()}
    given["qkv"] = floats(random, len(run["ends"]), n_new, heads * size)
    given["seqlens_k"] = ints(*run["ends"]) - np.int32(1)
    attributes = {"heads": heads, "kv_heads": kv_heads, "scale": 0.5, "appends": 0}
    model = row_graph(attributes, {}, given)
    (scalar,) = session(model, "scalar").run(None, given)
    for path in PATHS:
        assert same_bits(session(model, path, run["threads"]).run(None, given)[0], scalar), path
    assert all(same_bits(given[name], array) for name, array in before.items())
    for row, end in enumerate(run["ends"]):
        keys, values = (
            given[name][row, :, :end].astype(float).repeat(heads // kv_heads, axis=0)
            for name in ("keys", "values")
        )
        queries = given["qkv"][row].reshape(n_new, heads, size).swapaxes(0, 1)
        scores = queries @ keys.swapaxes(1, 2) * 0.5
        e = np.exp(scores - scores.max(axis=2, keepdims=True))
        expected = (e / e.sum(axis=2, keepdims=True)) @ values
        found = scalar[row].reshape(n_new, heads, size).swapaxes(0, 1)
        assert np.abs(found - expected).max() <= 2e-4


@given(run=runs())
@settings(max_examples=30, deadline=None)
def test_rows_of_8_bits_are_those_numbers(run: dict[str, Any]) -> None:
    """As rows of floats to the bit, and new tokens are rounded."""
    random = np.random.default_rng(run["seed"])
    heads, kv_heads, size, n_new = run["heads"], run["kv_heads"], run["size"], run["new"]
    attributes = {name: run[name] for name in ("heads", "kv_heads", "window", "softcap")}
    attributes |= {"appends": 1, "scale": 0.01}
    shape = (len(run["ends"]), kv_heads, run["room"], size)
    given: dict[str, NDArray[Any]] = {"seqlens_k": ints(*run["ends"]) - np.int32(1)}
    given |= dict(zip(("keys", "values"), random.integers(-128, 128, (2, *shape)), strict=True))
    qkv = 60 * floats(random, len(run["ends"]), n_new, (heads + 2 * kv_heads) * size)
    rounded = qkv.copy()
    rounded[..., heads * size :] = np.clip(np.rint(qkv[..., heads * size :]), -127, 127)
    of_floats = {name: of.astype(np.float32) for name, of in given.items() if name != "seqlens_k"}
    wanted = session(row_graph(attributes, {}, [*given, "qkv"]), "scalar").run(
        None, given | of_floats | {"qkv": rounded}
    )
    of_bytes = {name: of.astype(np.int8) for name, of in of_floats.items()}
    model = row_graph(attributes, {}, [*given, "qkv"], "RowAttention8")
    for path in PATHS:
        opened = session(model, path, run["threads"])
        y, *rows = opened.run(None, given | of_bytes | {"qkv": qkv})
        assert same_bits(y, wanted[0]), path
        assert all(map(np.array_equal, rows, wanted[1:])), path


@pytest.mark.parametrize("path", PATHS)
def test_what_8_bits_do_not_hold(path: str) -> None:
    shape = (1, 1, 1, 16)
    numbers = np.array([np.inf, -np.inf, np.nan, 1e30, -127.4, 0.5, 1.5, -0.5], dtype=np.float32)
    rows = np.zeros(shape, dtype=np.int8)
    given: dict[str, NDArray[Any]] = {"keys": rows, "values": rows}
    qkv = np.zeros((1, 1, 48), dtype=np.float32)
    qkv[..., 32:40] = numbers
    given |= {"qkv": qkv, "seqlens_k": ints(0)}
    model = row_graph({"heads": 1, "kv_heads": 1, "appends": 1}, {}, given, "RowAttention8")
    _, _, values = session(model, path).run(None, given)
    assert values.ravel()[:8].tolist() == [127, -127, -127, 127, -127, 0, 2, 0]


def fitting() -> dict[str, NDArray[Any]]:
    """Return a run of two tokens in each of three rows."""
    rows = {name: np.zeros((3, 2, 20, 32), dtype=np.float32) for name in ("keys", "values")}
    qkv = np.ones((3, 2, 8 * 32), dtype=np.float32)
    return rows | {"qkv": qkv, "seqlens_k": ints(1, 5, 19)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlens_k": ints(1, 5, 20)}, "row 2 has 21 tokens; there have to be 1 to 20"),
        ({"seqlens_k": ints(1, -1, 3)}, "row 1 has 0 tokens"),
        ({"seqlens_k": ints(1, 5)}, r"int32\[2\]; its shape has to be \[3\]"),
        ({"qkv": np.ones((2, 3, 256), dtype=np.float32)}, "qkv"),
        ({"qkv": np.ones((3, 2, 255), dtype=np.float32)}, "last dimension has to be 256"),
        ({"values": np.zeros((3, 2, 19, 32), dtype=np.float32)}, "values"),
        ({"keys": np.zeros((3, 2, 0, 32), dtype=np.float32)}, "keys"),
        ({"biases": np.zeros((2, 4, 2, 20), dtype=np.float32)}, "biases"),
        ({"biases": np.zeros((1, 4, 2, 19), dtype=np.float32)}, "there have to be 1 to 19"),
    ],
)
def test_an_unfit_run(change: dict[str, Any], message: str) -> None:
    given = fitting() | change
    opened = session(row_graph({"heads": 4, "kv_heads": 2, "appends": 1}, {}, given))
    with pytest.raises(Exception, match=message):
        opened.run(None, given)


def test_a_source_in_windows_is_refused() -> None:
    attributes = {"heads": 4, "kv_heads": 2, "window": 3}
    with pytest.raises(Exception, match="neither windows nor rotations"):
        session(row_graph(attributes, {}, fitting()))

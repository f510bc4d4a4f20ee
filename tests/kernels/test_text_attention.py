"""`TextAttention` on every path of this machine: against NumPy, and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_oracle import INTS, text_attention
from tests.kernels.graphs import FLOATS, needs_library, session, text_graph, usable_paths
from tests.kernels.test_attention import floats, ints, rotation
from tests.kernels.test_linear import same_bits

pytestmark = needs_library
PATHS = usable_paths()


def run(opened: Any, qkv: FLOATS, starts: INTS) -> FLOATS:
    inputs = {"qkv": qkv, "cumulative_sequence_length": starts}
    return opened.run(None, inputs)[0]  # type: ignore[no-any-return]


@st.composite
def encoders(draw: st.DrawFn) -> dict[str, Any]:
    """Draw heads, what changes their scores, and the lengths of texts."""
    kv_heads, size = draw(st.integers(1, 2)), draw(st.sampled_from([16, 32, 48, 64]))
    sections = draw(st.sampled_from([[], [], [], [262]]))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3])),
        "kv_heads": kv_heads,
        "size": size,
        "window": draw(st.sampled_from([-1, -1, 1, 5, 130, 280])),
        "looks_ahead": draw(st.integers(0, 1)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 4.0])),
        "scale": draw(st.sampled_from([0.0, 0.7])),
        "interleaved": draw(st.integers(0, 1)),
        "rotated": 2 * draw(st.integers(1, size // 2)),
        "present": draw(st.sets(st.sampled_from(["rotation", "biases", "sinks"]))),
        "lengths": [*draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)), *sections],
        "threads": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from([np.int8, np.float32])),
    }


@given(encoder=encoders())
@settings(max_examples=20, deadline=None)
def test_every_path_computes_what_numpy_does(encoder: dict[str, Any]) -> None:
    """And all of them the same bits."""
    random = np.random.default_rng(encoder["seed"])
    heads, kv_heads, lengths = encoder["heads"], encoder["kv_heads"], encoder["lengths"]
    names = ("heads", "kv_heads", "window", "looks_ahead", "softcap", "scale", "interleaved")
    attributes = {name: encoder[name] for name in names}
    constants: dict[str, FLOATS] = {}
    if "rotation" in encoder["present"]:
        constants |= rotation(300, encoder["rotated"])
    if "biases" in encoder["present"]:
        constants["biases"] = floats(random, 1, heads, max(lengths), max(lengths))
    if "sinks" in encoder["present"]:
        constants["sinks"] = 2 * floats(random, heads)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    qkv = floats(random, starts[-1], (heads + 2 * kv_heads) * encoder["size"])

    expected = text_attention(qkv, starts, constants, attributes, encoder["dtype"])
    operator = "TextAttention32" if encoder["dtype"] == np.float32 else "TextAttention"
    model = text_graph(attributes, constants, operator)
    scalar = run(session(model, "scalar"), qkv, starts)
    assert np.abs(scalar - expected).max(initial=0) <= 2e-4
    for path in PATHS:
        assert same_bits(run(session(model, path, encoder["threads"]), qkv, starts), scalar), path


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [0.0, np.nan])
@pytest.mark.parametrize("operator", ["TextAttention", "TextAttention32"])
def test_neighbours_change_no_bits(operator: str, path: str, bad: float) -> None:
    """Nor does one that is not finite."""
    random = np.random.default_rng(1)
    lengths = [1, 17, 16, 70, 2, 300, 5]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    qkv = floats(random, starts[-1], 8 * 32)
    qkv[starts[3] : starts[4], 130] += bad
    attributes = {"heads": 4, "kv_heads": 2, "looks_ahead": 1}
    opened = session(text_graph(attributes, {}, operator), path, 2)
    together = run(opened, qkv, starts)
    for i, length in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        alone = run(opened, qkv[part], ints(0, length))
        assert np.isnan(alone).any() == (np.isnan(bad) and i == 3)
        if not np.isnan(alone).any():
            assert same_bits(alone, together[part])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_biases_may_hide_a_section_of_positions(path: str, dtype: Any) -> None:
    """The first, the last, or one of each kind in the same tile."""
    random = np.random.default_rng(2)
    heads = {"heads": 2, "kv_heads": 1, "looks_ahead": 1}
    biases = floats(random, 1, 2, 300, 300)
    biases[0, 0, ::2, :256] = biases[0, 1, :, 256:] = -np.inf
    starts, qkv = ints(0, 300), floats(random, 300, 4 * 16)
    attributes = heads | {"window": -1, "softcap": 0.0, "scale": 0.0, "interleaved": 0}
    expected = text_attention(qkv, starts, {"biases": biases}, attributes, dtype)
    operator = "TextAttention32" if dtype == np.float32 else "TextAttention"
    found = run(session(text_graph(attributes, {"biases": biases}, operator), path), qkv, starts)
    assert np.abs(found - expected).max() <= 2e-4


ONES = np.ones((1, 4, 9, 9), dtype=np.float32)


@pytest.mark.parametrize(
    ("constants", "starts", "width", "message"),
    [
        (
            {"biases": ONES[:, :3]},
            [0, 3],
            256,
            r"float\[1, 3, 9, 9\]; its shape has to be \[1, 4",
        ),
        ({"biases": ONES[..., :8]}, [0, 3], 256, r"has to be \[1, 4, 8, 8\]"),
        ({"biases": ONES[..., :2, :2]}, [0, 3], 256, "3 tokens after 0; .* room for 2"),
        ({}, [0, 2], 256, "is from 0 to 2; it has to be from 0 to 3"),
        ({}, [0, 4, 3], 256, "sequence 1 has -1 tokens"),
        ({}, [], 256, r"int32\[0\]; its shape has to be \[1\]"),
        ({}, [0, 3], 250, "its last dimension has to be 8 times a multiple of 16, at most 640"),
        ({}, [0, 3], 8 * 24, "a multiple of 16"),
        ({}, [0, 3], 8 * 656, "at most 640"),
        ({}, [0, 3], 0, "a multiple of 16"),
    ],
)
def test_an_unfit_run(
    constants: dict[str, FLOATS], starts: list[int], width: int, message: str
) -> None:
    opened = session(text_graph({"heads": 4, "kv_heads": 2}, constants))
    with pytest.raises(Exception, match=message):
        run(opened, np.ones((3, width), dtype=np.float32), ints(*starts))

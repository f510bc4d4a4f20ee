"""`Attention` and `Attention32` on every path here: against NumPy, and each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvasir.model.onnx.runtime import onnxruntime
from tests.kernels.attention_oracle import INTS, Caches, Places, attention, exact_attention
from tests.kernels.graphs import (
    CACHES,
    FLOAT_CACHES,
    FLOATS,
    attention_graph,
    needs_library,
    session,
)
from tests.kernels.graphs import usable_paths as find_paths
from tests.kernels.test_linear import same_bits

pytestmark = needs_library
PATHS = find_paths()


def ints(*of: int) -> INTS:
    return np.array(of, dtype=np.int32)


def floats(random: np.random.Generator, *shape: int) -> FLOATS:
    return random.standard_normal(shape, dtype=np.float32)


def unwritten(
    random: np.random.Generator,
    blocks: int,
    kv_heads: int,
    block: int,
    size: int,
    names: Sequence[str] = CACHES,
) -> Caches:
    """Return caches of anything, which nobody may use."""
    shape = (blocks, kv_heads, block, size)
    if names == FLOAT_CACHES:
        scales = np.ones(shape[:3], dtype=np.float32)
        keys, values = np.full((2, *shape), np.nan, dtype=np.float32)
        return Caches(keys, scales, values, scales)
    keys, values = (random.integers(-128, 128, shape, np.int8) for _ in "kv")
    key_scales, value_scales = np.full((2, *shape[:3]), np.nan, dtype=np.float32)
    return Caches(keys, key_scales, values, value_scales)


def places_of(random: np.random.Generator, tokens: list[tuple[int, int]], block: int) -> Places:
    """Give sequences of tokens (before, in the run) blocks in any order."""
    width = max(-(-sum(both) // block) for both in tokens) + 1
    table = random.permutation(len(tokens) * width).astype(np.int32).reshape(-1, width)
    for row, both in zip(table, tokens, strict=True):
        row[-(-sum(both) // block) :] = -1  # what lies beyond a sequence's tokens is not read
    starts = np.cumsum([0, *(count for _, count in tokens)])
    pasts = np.array([before for before, _ in tokens])
    return Places(starts.astype(np.int32), pasts.astype(np.int32), table)


def rotation(positions: int, rotated: int) -> dict[str, FLOATS]:
    rates = 100.0 ** -(np.arange(rotated // 2) / max(rotated // 2, 1))
    angles = np.arange(positions)[:, None] * rates
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def run(opened: Any, qkv: FLOATS, packed: dict[str, Any], places: Places) -> list[NDArray[Any]]:
    """Return what is attended and the caches after the run."""
    return opened.run(None, {"qkv": qkv} | packed | places.inputs())  # type: ignore[no-any-return]


@st.composite
def decoders(draw: st.DrawFn) -> dict[str, Any]:
    """Draw heads, what changes their scores, and the tokens of a run."""
    kv_heads, size = draw(st.integers(1, 3)), draw(st.sampled_from([16, 32, 48, 64, 80, 128]))
    parts = {"rotation", "slopes", "sinks"}
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3, 5, 9])),
        "kv_heads": kv_heads,
        "size": size,
        "block": draw(st.sampled_from([16, 32, 64])),
        "window": draw(st.sampled_from([-1, -1, 1, 5, 200, 300])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 4.0])),
        "scale": draw(st.sampled_from([0.0, 0.7])),
        "interleaved": draw(st.integers(0, 1)),
        "rotated": 2 * draw(st.integers(1, size // 2)),
        "present": draw(st.sets(st.sampled_from(sorted(parts)))),
        "tokens": draw(
            st.lists(st.tuples(st.integers(0, 600), st.integers(0, 20)), min_size=1, max_size=4)
        ),
        "threads": draw(st.integers(1, 3)),
        "caches": draw(st.sampled_from([CACHES, CACHES, FLOAT_CACHES])),
    }


@given(decoder=decoders())
@settings(max_examples=60, deadline=None)
def test_every_path_computes_what_numpy_does(decoder: dict[str, Any]) -> None:
    """And all of them the same bits, in caches too."""
    random = np.random.default_rng(decoder["seed"])
    heads, kv_heads, size = decoder["heads"], decoder["kv_heads"], decoder["size"]
    names = ("heads", "kv_heads", "window", "softcap", "scale", "interleaved")
    attributes = {name: decoder[name] for name in names}
    constants: dict[str, FLOATS] = {}
    if "rotation" in decoder["present"]:
        constants |= rotation(640, decoder["rotated"])
    if "slopes" in decoder["present"]:
        constants["slopes"] = random.random(heads, dtype=np.float32) / 8
    if "sinks" in decoder["present"]:
        constants["sinks"] = 2 * floats(random, heads)
    places = places_of(random, decoder["tokens"], decoder["block"])
    names = decoder["caches"]
    caches = unwritten(random, places.table.size, kv_heads, decoder["block"], size, names)
    for past, row in zip(places.pasts, places.table, strict=True):
        seen = np.arange(past)
        at = row[seen // decoder["block"]], slice(None), seen % decoder["block"]
        if caches.are_floats:
            caches.keys[at] = floats(random, past, kv_heads, size)
            caches.values[at] = floats(random, past, kv_heads, size)
            continue
        caches.key_scales[at] = random.random((past, kv_heads), dtype=np.float32) / 64
        caches.value_scales[at] = random.random((past, kv_heads), dtype=np.float32) / 64
    qkv = floats(random, int(places.starts[-1]), (heads + 2 * kv_heads) * size)

    expected, after = attention(qkv, caches, places, constants, attributes)
    model = attention_graph(attributes, constants, names)
    packed = caches.packed()
    scalar = run(session(model, "scalar"), qkv, packed, places)
    assert np.abs(scalar[0] - expected).max(initial=0) <= 2e-4
    for name, found in zip(names, scalar[1:], strict=True):
        assert same_bits(found, after.packed()[name]), name
    for path in PATHS:
        outputs = run(session(model, path, decoder["threads"]), qkv, packed, places)
        assert all(map(same_bits, outputs, scalar)), path


HEADS = {"heads": 6, "kv_heads": 2}
WIDTH, SIZE = (6 + 2 * 2) * 32, 32


def in_pieces(
    opened: Any,
    qkv: FLOATS,
    pieces: list[int],
    block: int,
    seed: int,
    names: Sequence[str] = CACHES,
) -> FLOATS:
    """Return what a sequence attends to that comes in pieces of some numbers of tokens."""
    random = np.random.default_rng(seed)
    blocks = places_of(random, [(0, len(qkv))], block)
    packed = unwritten(random, blocks.table.size, 2, block, SIZE, names).packed()
    found, past = [], 0
    for count in pieces:
        places = Places(ints(0, count), ints(past), blocks.table)
        part, *new = run(opened, qkv[past : past + count], packed, places)
        packed = dict(zip(names, new, strict=True))
        found.append(part)
        past += count
    assert past == len(qkv)
    return np.concatenate(found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("names", [CACHES, FLOAT_CACHES])
@pytest.mark.parametrize("window", [-1, 100])
def test_a_token_has_its_own_bits(path: str, window: int, names: Sequence[str]) -> None:
    """In one piece, in chunks, one at a time; in any blocks, by any number of threads."""
    random = np.random.default_rng(1)
    count = 530 if path != "scalar" else 270
    qkv = floats(random, count, WIDTH)
    constants = rotation(600, SIZE) | {"sinks": floats(random, 6)}
    model = attention_graph(HEADS | {"window": window}, constants, names)
    one, two = session(model, path), session(model, path, 2)
    together = in_pieces(one, qkv, [count], 16, 0, names)
    assert same_bits(in_pieces(two, qkv, [count], 64, 1, names), together)
    cut = [100, 1, 47, 3, count - 151]
    assert same_bits(in_pieces(two, qkv, cut, 32, 2, names), together)
    assert same_bits(in_pieces(two, qkv, [1] * count, 64, 3, names), together)


@pytest.mark.parametrize("path", PATHS)
def test_neighbours_change_no_bits(path: str) -> None:
    random = np.random.default_rng(2)
    places = places_of(random, [(300, 1), (0, 0), (40, 30), (0, 17), (511, 1), (520, 9)], 16)
    caches = unwritten(random, places.table.size, 2, 16, SIZE)
    caches.key_scales[:] = random.random(caches.key_scales.shape, dtype=np.float32) / 64
    caches.value_scales[:] = random.random(caches.value_scales.shape, dtype=np.float32) / 64
    packed = caches.packed()
    qkv = floats(random, int(places.starts[-1]), WIDTH)
    opened = session(attention_graph(HEADS, {}), path, 2)
    together = run(opened, qkv, packed, places)[0]
    for i in range(len(places.pasts)):
        part = slice(places.starts[i], places.starts[i + 1])
        starts = places.starts[i : i + 2] - places.starts[i]
        own = Places(starts, places.pasts[i : i + 1], places.table[i : i + 1])
        assert same_bits(run(opened, qkv[part], packed, own)[0], together[part])
    cube = run(opened, qkv.reshape(2, -1, WIDTH), packed, places)[0]
    assert same_bits(cube, together.reshape(2, -1, 6 * SIZE))


@pytest.mark.parametrize("path", PATHS)
def test_values_may_be_the_keys(path: str) -> None:
    random = np.random.default_rng(5)
    places = places_of(random, [(300, 1), (0, 40), (520, 9)], 32)
    caches = unwritten(random, places.table.size, 2, 32, SIZE)
    caches.key_scales[:] = random.random(caches.key_scales.shape, dtype=np.float32) / 64
    caches.values, caches.value_scales = caches.keys, caches.key_scales
    x = floats(random, int(places.starts[-1]), 8 * SIZE)
    twice = np.concatenate((x, x[:, 6 * SIZE :]), axis=1)
    expected = run(session(attention_graph(HEADS, {}), path, 2), twice, caches.packed(), places)
    packed = {name: caches.packed()[name] for name in CACHES[:2]}
    found = run(session(attention_graph(HEADS, {}, CACHES[:2]), path, 2), x, packed, places)
    assert all(map(same_bits, found, expected))


def test_caches_change_where_they_lie_if_bound_twice() -> None:
    """And elsewhere if not: then a run leaves its inputs as they were."""
    random = np.random.default_rng(3)
    places = places_of(random, [(0, 40)], 16)
    packed = unwritten(random, places.table.size, 2, 16, SIZE).packed()
    before = {name: array.copy() for name, array in packed.items()}
    qkv = floats(random, 40, WIDTH)
    opened = session(attention_graph(HEADS, {}), "auto")
    copied = run(opened, qkv, packed, places)
    assert all(same_bits(packed[name], before[name]) for name in CACHES)

    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(packed[name]) for name in CACHES}
    binding = opened.io_binding()
    for name, array in ({"qkv": qkv} | places.inputs()).items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y")
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"new_{name}", value)
    opened.run_with_iobinding(binding)
    assert same_bits(binding.copy_outputs_to_cpu()[0], copied[0])
    for name, found in zip(CACHES, copied[1:], strict=True):
        assert same_bits(values[name].numpy(), found), name


@pytest.mark.parametrize("path", PATHS)
def test_the_largest_integers_do_not_overflow(path: str) -> None:
    """Each section has equal probabilities of the most bits, and the largest values."""
    places = places_of(np.random.default_rng(4), [(0, 600)], 64)
    packed = unwritten(np.random.default_rng(4), places.table.size, 1, 64, 512).packed()
    x = np.full((600, 3, 512), 127, dtype=np.float32)
    x[:, 2, 1::2] = -127
    attributes = {"heads": 1, "kv_heads": 1, "scale": 2.0**-14}
    found = run(session(attention_graph(attributes, {}), path), x.reshape(600, -1), packed, places)
    assert np.abs(found[0] - x[:, 2]).max() < 1e-4


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 6, 8])
@pytest.mark.parametrize("names", [CACHES, FLOAT_CACHES])
def test_a_sequence_that_is_not_finite_spoils_no_other(
    path: str, names: Sequence[str], bad: float, place: int
) -> None:
    """Of its query, key or value; and none of its earlier tokens."""
    random = np.random.default_rng(5)
    places = places_of(random, [(0, 30), (0, 30)], 16)
    packed = unwritten(random, places.table.size, 2, 16, SIZE, names).packed()
    qkv = floats(random, 60, WIDTH)
    opened = session(attention_graph(HEADS, {}, names), path)
    clean = run(opened, qkv, packed, places)[0]
    qkv[20, place * SIZE + 3] = bad
    found = run(opened, qkv, packed, places)[0]
    spoilt = [20] if place == 0 else range(20, 30)
    heads = slice(0, SIZE if place == 0 else 3 * SIZE)
    if names == CACHES or place == 0:
        assert np.isnan(found[spoilt, heads]).all()
    else:  # an infinite key may have scores of -infinity, and a value spoils its own element
        assert not np.isfinite(found[spoilt, heads]).all() or bad == np.inf
    found[spoilt, heads] = clean[spoilt, heads]
    assert same_bits(found, clean)


def test_zeros_attend_to_all_alike() -> None:
    places = places_of(np.random.default_rng(6), [(0, 40)], 16)
    packed = unwritten(np.random.default_rng(6), places.table.size, 2, 16, SIZE).packed()
    opened = session(attention_graph(HEADS, {}))
    found = run(opened, np.zeros((40, WIDTH), dtype=np.float32), packed, places)
    assert (found[0] == 0).all()
    nothing = Places(ints(0), ints(), ints().reshape(0, 3))
    assert run(opened, np.zeros((0, WIDTH), dtype=np.float32), packed, nothing)[0].shape == (0, 192)


@pytest.mark.parametrize("count", [20, 700])
def test_it_is_near_attention_that_rounds_nothing(count: int) -> None:
    """Eight bits of queries, keys and values leave about one part in a hundred."""
    random = np.random.default_rng(7)
    places = places_of(random, [(0, count)], 16)
    packed = unwritten(random, places.table.size, 2, 16, SIZE).packed()
    qkv = floats(random, count, WIDTH)
    found = run(session(attention_graph(HEADS, {}), "auto", 2), qkv, packed, places)[0]
    expected = exact_attention(qkv, 6, 2)
    assert np.linalg.norm(found - expected) < 0.015 * np.linalg.norm(expected)

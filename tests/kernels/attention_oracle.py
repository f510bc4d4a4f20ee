"""What `Attention` means, a token and a head at a time: slow and obvious, in float32 as written.

Of keys and values of floats, which have scales of 1, it is `Attention32`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATS = NDArray[np.float32]
INTS = NDArray[np.int32]
SECTION, MOST = 256, np.float32(127 * 256 + 127)
_ONE, _LOG2_E = np.float32(1), np.float32(1.44269504)


@dataclass
class Caches:
    """Integers and their scales in blocks, or floats, in the order of positions and elements."""

    keys: NDArray[Any]  # [N, G, B, D]
    key_scales: FLOATS  # [N, G, B]
    values: NDArray[Any]  # [N, G, B, D]
    value_scales: FLOATS  # [N, G, B]

    @property
    def are_floats(self) -> bool:
        return self.keys.dtype == np.float32

    def copy(self) -> Caches:
        """Return caches that share no memory with these."""
        return replace(self, **{name: array.copy() for name, array in vars(self).items()})

    def packed(self) -> dict[str, NDArray[Any]]:
        """Return the operator's inputs: 16 keys, or 4 values, lie side by side, 128 is added.

        Of floats 16 keys lie side by side.
        """
        n, g, b, d = self.keys.shape
        if self.are_floats:
            turned = self.keys.reshape(n, g, b // 16, 16, d).swapaxes(3, 4)
            keys = np.ascontiguousarray(turned).reshape(n, g, b, d)
            return {"keys": keys, "values": self.values}
        keys = self.keys.reshape(n, g, b // 16, 16, d // 4, 4).swapaxes(3, 4)
        values = self.values.reshape(n, g, b // 4, 4, d).swapaxes(3, 4)
        return vars(self) | {
            "keys": np.ascontiguousarray(keys ^ -128).reshape(n, g, b, d),
            "values": np.ascontiguousarray(values ^ -128).reshape(n, g, b, d),
        }


@dataclass(frozen=True)
class Places:
    """Which tokens a run has and where those before it lie."""

    starts: INTS  # [S + 1]
    pasts: INTS  # [S]
    table: INTS  # [S, M]

    def inputs(self) -> dict[str, INTS]:
        """Return the operator's inputs."""
        names = ("cumulative_sequence_length", "past_seqlens", "block_table")
        return dict(zip(names, (self.starts, self.pasts, self.table), strict=True))


def _fma(a: Any, b: Any, c: Any) -> FLOATS:
    exact: FLOATS = (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)
    return exact


def _round(x: FLOATS, most: np.float32, caches: Caches) -> tuple[NDArray[Any], np.float32]:
    """Return integers up to `most` and their scale; x itself where caches have floats."""
    if caches.are_floats:
        return x.astype(np.float64), _ONE
    scale = np.float32(np.abs(x).max() / most)
    if scale < np.finfo(np.float32).tiny:
        return np.zeros(x.shape, dtype=np.int64), np.float32(0)
    return np.rint(x * (_ONE / scale)).astype(np.int64), scale


def _rotate(x: FLOATS, position: int, constants: dict[str, FLOATS], interleaved: int) -> FLOATS:
    """Turn the pairs of x [D] by the angles of a position."""
    if "cos" not in constants:
        return x
    cos, sin = constants["cos"][position], constants["sin"][position]
    n = len(cos)
    first = slice(0, 2 * n, 2) if interleaved else slice(0, n)
    second = slice(1, 2 * n, 2) if interleaved else slice(n, 2 * n)
    y = x.copy()
    y[first] = _fma(x[first], cos, -(x[second] * sin))
    y[second] = _fma(x[second], cos, x[first] * sin)
    return y


def attention(
    qkv: FLOATS,
    caches: Caches,
    places: Places,
    constants: dict[str, FLOATS],
    attributes: dict[str, Any],
) -> tuple[FLOATS, Caches]:
    """Return what is attended, [T, H D], and the caches after the run.

    qkv: [T, (H + 2 G) D]. constants: cos and sin [P, rotated / 2], slopes and sinks [H], biases [1,
    H, S, S].
    """
    caches = caches.copy()
    heads, kv_heads = attributes["heads"], attributes["kv_heads"]
    block, size = caches.keys.shape[2:]
    x = qkv.reshape(len(qkv), heads + 2 * kv_heads, size)
    queries, keys, values = np.split(x, [heads, heads + kv_heads], axis=1)
    tokens = [
        (token, sequence, int(places.pasts[sequence]) + token - int(places.starts[sequence]))
        for sequence in range(len(places.pasts))
        for token in range(places.starts[sequence], places.starts[sequence + 1])
    ]
    turn = attributes.get("interleaved", 0)
    for token, sequence, position in tokens:
        for g in range(kv_heads):
            at = places.table[sequence, position // block], g, position % block
            key = _rotate(keys[token, g], position, constants, turn)
            for x, into, scales in (
                (key, caches.keys, caches.key_scales),
                (values[token, g], caches.values, caches.value_scales),
            ):
                into[at], scales[at] = _round(x, np.float32(127), caches)
    out = np.zeros((len(qkv), heads, size), dtype=np.float32)
    for token, sequence, position in tokens:
        seen = _seen(position, places, sequence, attributes)
        for h in range(heads):
            g = h * kv_heads // heads
            query = _rotate(queries[token, h], position, constants, turn)
            at = places.table[sequence, seen // block], g, seen % block
            part = Caches(*(array[at] for array in vars(caches).values()))
            slope = constants["slopes"][h] if "slopes" in constants else None
            scores = _scores(query, part, attributes, slope, seen - position)
            if "biases" in constants:
                scores = _fma(constants["biases"][0, h, position, seen], _LOG2_E, scores)
            sink = constants["sinks"][h] if "sinks" in constants else None
            out[token, h] = _softmax(scores, part, seen, sink)
    return out.reshape(len(qkv), heads * size), caches


def text_attention(
    qkv: FLOATS,
    starts: INTS,
    constants: dict[str, FLOATS],
    attributes: dict[str, Any],
    dtype: type = np.int8,
) -> FLOATS:
    """Return what is attended, [T, H D], by texts that nothing is kept of. dtype: of keys."""
    n, kv_heads = len(starts) - 1, attributes["kv_heads"]
    shape = (n, kv_heads, len(qkv), qkv.shape[1] // (attributes["heads"] + 2 * kv_heads))
    numbers, scales = np.zeros(shape, dtype=dtype), np.zeros(shape[:3], dtype=np.float32)
    places = Places(starts, np.zeros(n, dtype=np.int32), np.arange(n, dtype=np.int32)[:, None])
    caches = Caches(numbers, scales, numbers, scales)
    return attention(qkv, caches, places, constants, attributes)[0]


def _seen(position: int, places: Places, sequence: int, attributes: dict[str, Any]) -> INTS:
    """Return the positions that the token at one attends to."""
    in_run = places.starts[sequence + 1] - places.starts[sequence]
    positions = np.arange(places.pasts[sequence] + in_run, dtype=np.int32)
    away, window = position - positions, attributes.get("window", -1)
    is_seen = (away >= 0) | bool(attributes.get("looks_ahead", 0))
    seen: INTS = positions[is_seen & ((np.abs(away) < window) | (window < 0))]
    return seen


def _scores(
    query: FLOATS, part: Caches, attributes: dict[str, Any], slope: Any, distance: Any
) -> FLOATS:
    """Return the scores [n] of a query [D] with n keys, in bits."""
    rounded, step = _round(query, np.float32(127), part)
    scale = np.float32(attributes.get("scale", 0) or _ONE / np.sqrt(np.float32(len(query))))
    keys = part.keys.astype(rounded.dtype)
    scores = (keys @ rounded).astype(np.float32)
    cap = np.float32(attributes.get("softcap", 0))
    scores = scores * (part.key_scales * (step * (scale if cap else scale * _LOG2_E)))
    if cap:
        scores = cap * _LOG2_E * np.tanh(scores * (_ONE / cap))
    return scores if slope is None else _fma(slope * _LOG2_E, distance.astype(np.float32), scores)


def _softmax(scores: FLOATS, part: Caches, seen: NDArray[Any], sink: Any) -> FLOATS:
    """Return the mean [D] of n values that the scores at n positions give."""
    most = np.float32(-np.inf if sink is None else sink * _LOG2_E)
    total: Any = np.float32(0 if sink is None else 1)
    mean: FLOATS = np.zeros(part.values.shape[1], dtype=np.float32)
    for section in range(seen[0] // SECTION, seen[-1] // SECTION + 1):
        here = seen // SECTION == section
        largest = scores[here].max()
        if largest == -np.inf:
            continue
        powers = np.exp2(scores[here] - largest)
        probabilities, step = _round(powers * part.value_scales[here], MOST, part)
        values = part.values[here].astype(probabilities.dtype)
        value = (probabilities @ values).astype(np.float32) * step
        new = max(most, largest)
        kept, added = np.exp2(most - new), np.exp2(largest - new)
        mean = _fma(mean, kept, value * added)
        total = _fma(total, kept, powers.sum() * added)
        most = new
    mean *= _ONE / total
    return mean


def exact_attention(qkv: NDArray[Any], heads: int, kv_heads: int) -> NDArray[np.float64]:
    """Return causal attention [T, H D] of one sequence in float64, rounding nothing."""
    x = qkv.astype(np.float64).reshape(len(qkv), heads + 2 * kv_heads, -1)
    q, k, v = np.split(x.swapaxes(0, 1), [heads, heads + kv_heads])  # [heads, T, D]
    k, v = np.repeat(k, heads // kv_heads, axis=0), np.repeat(v, heads // kv_heads, axis=0)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(x.shape[2])
    scores[:, np.triu(np.ones(scores.shape[1:], dtype=bool), 1)] = -np.inf
    e = np.exp(scores - scores.max(axis=2, keepdims=True))
    mean = (e / e.sum(axis=2, keepdims=True)) @ v
    attended: NDArray[np.float64] = mean.swapaxes(0, 1).reshape(len(qkv), -1)
    return attended

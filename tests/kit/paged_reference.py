"""PagedAttention and MatMulNBits in numpy, by their documentation, to run CUDA graphs.

Every input that may be wrong is checked, because the real operator would write anywhere.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Array = NDArray[Any]


class PagedAttention(OpRun):
    op_domain = "com.microsoft"

    def _run(  # type: ignore[no-untyped-def]  # noqa: ANN202  called by name with the node's attributes
        self,
        query: Array,
        key: Array | None,
        value: Array | None,
        key_cache: Array,
        value_cache: Array,
        cumulative_sequence_length: Array,
        past_seqlens: Array,
        block_table: Array,
        cos_cache: Array | None = None,
        sin_cache: Array | None = None,
        slot_mapping: Array | None = None,
        head_sink: Array | None = None,
        q_norm_weight: Array | None = None,
        k_norm_weight: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        attention_metadata: Array | None = None,
        *,
        num_heads: int,
        kv_num_heads: int,
        scale: float | None = None,
        do_rotary: int = 0,
        rotary_interleaved: int = 0,
        local_window_size: int = -1,
        softcap: float = 0.0,
        qk_norm_epsilon: float = 1e-6,
        k_quant_type: str = "NONE",
        v_quant_type: str = "NONE",
    ):
        assert key is value is head_sink is None
        assert attention_metadata is not None
        assert not rotary_interleaved
        n_tokens, (_, block_size, _, head_dim) = len(query), key_cache.shape
        starts, past = cumulative_sequence_length, past_seqlens
        if slot_mapping is None:
            slot_mapping = _slots(starts, past, block_table, block_size)
        self._check(query, key_cache, starts, past, block_table, slot_mapping, attention_metadata)
        heads = query.astype(np.float64).reshape(n_tokens, num_heads + 2 * kv_num_heads, head_dim)
        queries, keys, values = np.split(heads, [num_heads, num_heads + kv_num_heads], axis=1)
        if q_norm_weight is not None:
            assert k_norm_weight is not None
            queries, keys = (
                _rms_norm(x, w, qk_norm_epsilon)
                for x, w in ((queries, q_norm_weight), (keys, k_norm_weight))
            )
        positions = np.concatenate(
            [p + np.arange(n) for p, n in zip(past, np.diff(starts), strict=True)]
        )
        if do_rotary:
            assert cos_cache is not None
            assert sin_cache is not None
            assert positions.max() < len(cos_cache)
            queries, keys = (
                _rotate(x, cos_cache[positions], sin_cache[positions]) for x in (queries, keys)
            )
        for cache, new, scale_of, kind in (
            (key_cache, keys, k_scale, k_quant_type),
            (value_cache, values, v_scale, v_quant_type),
        ):  # in place, as the operator does
            assert (kind == "PER_TENSOR") == (scale_of is not None) == (cache.dtype.itemsize == 1)
            assert scale_of is None or scale_of.tolist() == [1.0]
            rounded = np.clip(np.rint(new), -128, 127) if cache.dtype == np.int8 else new
            is_stored = slot_mapping >= 0
            slots_of = cache.reshape(-1, kv_num_heads, head_dim)
            slots_of[slot_mapping[is_stored]] = rounded[is_stored].astype(cache.dtype)
        output = np.zeros((n_tokens, num_heads, head_dim))
        shared = num_heads // kv_num_heads
        for row, (first, end) in enumerate(pairwise(starts)):
            at = positions[first:end, None]  # [tokens, 1]
            places = np.arange(positions[end - 1] + 1)
            slots = block_table[row][places // block_size] * block_size + places % block_size
            seen_keys, seen_values = (  # [num_heads, places, head_dim]
                np.repeat(
                    cache.reshape(-1, kv_num_heads, head_dim)[slots].astype(np.float64),
                    shared,
                    axis=1,
                ).swapaxes(0, 1)
                for cache in (key_cache, value_cache)
            )
            scores = queries[first:end].swapaxes(0, 1) @ seen_keys.swapaxes(1, 2)
            scores *= scale or 1 / math.sqrt(head_dim)  # [num_heads, tokens, places]
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            is_seen = places <= at
            if local_window_size >= 0:
                is_seen &= places > at - local_window_size
            scores[:, ~is_seen] = -np.inf
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            output[first:end] = (weights @ seen_values).swapaxes(0, 1)
        return output.reshape(n_tokens, -1).astype(query.dtype), key_cache, value_cache

    @staticmethod
    def _check(
        query: Array,
        cache: Array,
        starts: Array,
        past: Array,
        table: Array,
        slots: Array,
        metadata: Array,
    ) -> None:
        """Check the inputs that the operator trusts."""
        assert all(x.dtype == np.int32 for x in (starts, past, table, slots, metadata))
        assert starts[0] == 0
        assert starts[-1] == len(query) == len(slots)
        assert len(starts) - 1 == len(past) == len(table)
        lengths = np.diff(starts)
        assert (lengths > 0).all()
        assert metadata[0] >= lengths.max()
        assert metadata[1] >= (past + lengths).max() >= metadata[2]
        n_blocks, block_size = cache.shape[:2]
        assert (slots >= -1).all()
        assert (slots < n_blocks * block_size).all()
        stored = slots[slots >= 0].tolist()  # the others' keys and values are dropped
        assert len(set(stored)) == len(stored), "two tokens in one slot"
        for row, (start, end) in enumerate(pairwise(starts)):
            place = past[row] + np.arange(end - start)
            expected = table[row][place // block_size] * block_size + place % block_size
            assert ((slots[start:end] == expected) | (slots[start:end] < 0)).all()


class MatMulNBits(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Array, packed: Array, scales: Array, **sizes: int) -> tuple[Array]:
        assert scales.shape == packed.shape[:2]
        assert packed.shape[2] == sizes["block_size"] * sizes["bits"] // 8
        matrix = unpack(packed, scales, sizes["bits"])[: sizes["K"]]
        assert matrix.shape == (sizes["K"], sizes["N"])
        return ((x.astype(np.float32) @ matrix).astype(x.dtype),)


def unpack(packed: Array, scales: Array, bits: int) -> Array:
    """[in, out] of uint8 [out, blocks, bytes] and scales [out, blocks]."""
    steps = (
        packed
        if bits == 8
        else np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:2], -1)
    )
    weights: Array = (steps.astype(np.float32) - 2 ** (bits - 1)) * scales.astype(np.float32)[
        ..., None
    ]
    return weights.reshape(len(packed), -1).T


class RMSNormalization(OpRun):
    """A replacement of the reference's own, which does not take bfloat16."""

    def _run(  # type: ignore[no-untyped-def]  # noqa: ANN202
        self, x: Array, weight: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
    ):
        assert (axis, stash_type) == (-1, 1)
        return (_rms_norm(x.astype(np.float32), weight, epsilon).astype(x.dtype),)


def load(graph: Path) -> ReferenceEvaluator:
    """The exported graph itself, to be run by numpy."""
    return ReferenceEvaluator(
        onnx.load(graph), new_ops=[PagedAttention, MatMulNBits, RMSNormalization]
    )


def _slots(starts: Array, past: Array, table: Array, size: int) -> Array:
    """Return each new token's place in its sequence's blocks, which follow from the table."""
    places = [p + np.arange(n) for p, n in zip(past, np.diff(starts), strict=True)]
    slots = [row[of // size] * size + of % size for row, of in zip(table, places, strict=True)]
    return np.concatenate(slots).astype(np.int32)


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    normed: Array = (
        x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * weight.astype(x.dtype)
    )
    return normed


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """x [tokens, heads, head_dim], cos and sin [tokens, head_dim / 2]."""
    left, right = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)

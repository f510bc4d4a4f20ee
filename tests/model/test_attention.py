"""Attention, uncached and over cached rows, against its formula written one score at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import Attention, LayerCache, merge_heads, split_heads
from kvasir.model.network.positions import Positions, rotary_table, rotate
from kvasir.model.network.run_inputs import StepInputs
from tests.kit.random_models import make_config

Floats = NDArray[np.float64]

HEADS = {"multi-head": 4, "grouped": 2, "multi-query": 1}
HEAD_SHARING = pytest.mark.parametrize("n_kv_head", HEADS.values(), ids=HEADS.keys())
KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"position": "learned"},
    "partial rotary": {"rotary_dim": 4},
    "window": {"sliding_window": 3},
    "window of one": {"position": "none", "sliding_window": 1},
    "capped": {"attention_softcap": 1.5, "attention_scale": 0.7, "sliding_window": 6},
}
KIND = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())


def naive_rotate(
    vector: Floats, position: int, theta: float, rotary_dim: int | None = None
) -> Floats:
    """Pair (i, i + d/2) turned by position · θ^(-2i/r), for the r/2 pairs that turn."""
    d = len(vector)
    rotated = np.empty(d)
    r = rotary_dim or d
    for i in range(d // 2):
        angle = position * theta ** (-2 * i / r) if i < r // 2 else 0.0
        a, b = vector[i], vector[i + d // 2]
        rotated[i] = a * math.cos(angle) - b * math.sin(angle)
        rotated[i + d // 2] = a * math.sin(angle) + b * math.cos(angle)
    return rotated


def naive_attention(qkv: Floats, config: TransformerConfig) -> Floats:
    """One row [sequence, (n_head + 2 n_kv_head) · head_dim] → [sequence, n_head · head_dim]."""
    d, sequence = config.head_dim, len(qkv)
    heads = qkv.reshape(sequence, -1, d)
    queries = heads[:, : config.n_head]
    keys = heads[:, config.n_head : config.n_head + config.n_kv_head]
    values = heads[:, config.n_head + config.n_kv_head :]
    output = np.zeros((sequence, config.n_head, d))
    for head in range(config.n_head):
        shared = head // (config.n_head // config.n_kv_head)
        for t in range(sequence):
            scores = np.full(sequence, -np.inf)
            for s in range(t + 1):
                if config.sliding_window and t - s >= config.sliding_window:
                    continue
                query, key = queries[t, head], keys[s, shared]
                if config.position == "rotary":
                    query = naive_rotate(query, t, config.rope_theta, config.rotary_dim)
                    key = naive_rotate(key, s, config.rope_theta, config.rotary_dim)
                scores[s] = query @ key * (config.attention_scale or 1 / math.sqrt(d))
                if cap := config.attention_softcap:
                    scores[s] = cap * math.tanh(scores[s] / cap)
            weights = np.exp(scores - scores.max())
            for s in range(t + 1):
                output[t, head] += weights[s] / weights.sum() * values[s, shared]
    return output.reshape(sequence, -1)


def positions_of(config: TransformerConfig) -> Positions:
    return Positions(rotary_table(config) if config.position == "rotary" else None)


def cached(
    qkv: Tensor, inputs: StepInputs, cache: LayerCache, config: TransformerConfig
) -> tuple[Tensor, LayerCache]:
    return inputs.attend(Attention(config, 0), qkv, positions_of(config), cache)


def random_qkv(config: TransformerConfig, batch: int, sequence: int, seed: int = 0) -> Tensor:
    width = (config.n_head + 2 * config.n_kv_head) * config.head_dim
    return torch.randn(batch, sequence, width, generator=torch.Generator().manual_seed(seed))


def garbage_cache(config: TransformerConfig, batch: int) -> LayerCache:
    """Return rows full of large numbers: a read of a position that was not written shows."""
    shape = (batch, config.n_kv_head, config.max_model_len, config.head_dim)
    return LayerCache(torch.full(shape, 1e4), torch.full(shape, -1e4))


def step_inputs(lengths: list[int], sequence: int) -> StepInputs:
    """Row b holds lengths[b] tokens after a run of `sequence`."""
    starts = torch.tensor(lengths)[:, None] - sequence
    return StepInputs(
        seqlens_k=torch.tensor(lengths, dtype=torch.int32) - 1,
        total_sequence_length=torch.tensor(max(lengths), dtype=torch.int32),
        position_ids=starts.clamp(min=0) + torch.arange(sequence),
    )


def reference(qkv: Tensor, config: TransformerConfig) -> Tensor:
    """Every row of qkv [batch, sequence, …] through `naive_attention`."""
    rows = [naive_attention(row.double().numpy(), config) for row in qkv]
    return torch.from_numpy(np.stack(rows)).float()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)


@HEAD_SHARING
@KIND
def test_training_attention_is_the_formula(n_kv_head: int, changes: dict[str, Any]) -> None:
    """A mistake in sharing heads, in the scale or in the mask is far beyond the tolerance."""
    config = make_config(n_kv_head=n_kv_head, **changes, qkv_bias=True, output_bias=True)
    torch.manual_seed(1)
    attention = Attention(config, layer=0).eval()
    x = torch.randn(2, 9, config.d_model) * 3
    expected = attention.output(reference(attention.qkv(x).detach(), config))
    close(attention(x, positions_of(config)), expected)


def test_a_run_changes_only_the_positions_it_appends() -> None:
    config = make_config()
    before = garbage_cache(config, 2)
    _, after = cached(random_qkv(config, 2, 3), step_inputs([5, 8], 3), before, config)
    for row, written in enumerate([range(2, 5), range(5, 8)]):
        untouched = [p for p in range(config.max_model_len) if p not in written]
        assert torch.equal(after.key[row, :, untouched], before.key[row, :, untouched])
        assert torch.equal(after.value[row, :, untouched], before.value[row, :, untouched])
        assert (after.key[row, :, list(written)] != 1e4).all()


def test_heads_lie_side_by_side_and_merge_as_they_were_split() -> None:
    config = make_config(n_head=4, n_kv_head=2, head_dim=16)
    qkv = random_qkv(config, batch=2, sequence=3)
    query, key, value = split_heads(qkv, config)
    assert (query.shape, key.shape, value.shape) == ((2, 4, 3, 16), (2, 2, 3, 16), (2, 2, 3, 16))
    assert torch.equal(torch.cat([merge_heads(x) for x in (query, key, value)], dim=-1), qkv)
    assert torch.equal(key[1, 1, 2], qkv[1, 2, 5 * 16 : 6 * 16])


@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10000.0), (64, 500000.0)])
def test_rotary_turns_every_pair_by_its_angle(head_dim: int, theta: float) -> None:
    config = make_config(head_dim=head_dim, rope_theta=theta, max_model_len=2048)
    position_ids = torch.tensor([[0, 1, 2047], [5, 4, 4]])  # in any order
    torch.manual_seed(0)
    x = torch.randn(2, 3, 3, head_dim, dtype=torch.float64)
    rotated = rotate(x, rotary_table(config), position_ids)
    for batch, head, t in np.ndindex(2, 3, 3):
        expected = naive_rotate(x[batch, head, t].numpy(), int(position_ids[batch, t]), theta)
        np.testing.assert_allclose(rotated[batch, head, t].numpy(), expected, atol=1e-6)


def test_attention_dropout_acts_in_training_only() -> None:
    config = make_config(attention_dropout=0.5)
    torch.manual_seed(1)
    attention, without = Attention(config, layer=0), Attention(make_config(), layer=0)
    without.load_state_dict(attention.state_dict())
    x = torch.randn(2, 8, config.d_model)
    positions = positions_of(config)
    expected = without.eval()(x, positions)
    assert torch.equal(attention.eval()(x, positions), expected)
    inputs, cache = step_inputs([8, 8], 8), garbage_cache(config, 2)
    attention.train()
    torch.manual_seed(0)
    dropped = attention(x, positions)
    assert not torch.allclose(dropped, expected, atol=1e-3)
    torch.manual_seed(0)
    assert torch.equal(attention(x, positions), dropped)
    close(attention.step(x, positions, inputs, cache)[0], expected)  # serving never drops

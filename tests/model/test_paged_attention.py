"""Packed tokens over blocks against the uncached decoder: prompts, chunks and decodes of several sequences at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.network.attention import LayerCache
from model.network.decoder import Decoder
from model.network.paged_attention import PagedInputs
from tests.random_models import make_config, make_decoder

BLOCK = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "position": "learned",
        "norm": "layernorm",
        "feed_forward": "gelu_tanh",
        "qkv_bias": True,
        "n_kv_head": 4,
    },
    "gemma2": {
        "attention_softcap": 5.0,
        "attention_scale": 0.3,
        "norm_placement": "both",
        "sliding_window": 5,
        "sliding_window_layers": (0,),
    },
    "qwen3": {"qk_norm": True, "layers_without_rotary": (1,)},
}


def make_caches(decoder: Decoder, n_blocks: int) -> list[LayerCache]:
    """Blocks full of large numbers: whoever reads a slot that was not written shows it."""
    shape = (n_blocks, BLOCK, decoder.config.n_kv_head, decoder.config.head_dim)
    return [LayerCache(torch.full(shape, 1e4), torch.full(shape, -1e4)) for _ in decoder.blocks]


def packed(chunks: list[tuple[int, int]], blocks: list[list[int]]) -> PagedInputs:
    """Tokens [start, end) of each sequence, whose blocks are named in order."""
    widest = max(map(len, blocks))
    places = [np.arange(start, end) for start, end in chunks]
    slots = [
        np.array(b)[p // BLOCK] * BLOCK + p % BLOCK for p, b in zip(places, blocks, strict=True)
    ]

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(np.array(values), dtype=torch.int32)

    return PagedInputs(
        position_ids=torch.tensor(np.concatenate(places)),
        cumulative_sequence_length=tensor(np.cumsum([0, *map(len, places)])),
        past_seqlens=tensor([start for start, _ in chunks]),
        block_table=tensor([b + [0] * (widest - len(b)) for b in blocks]),
        slot_mapping=tensor(np.concatenate(slots)),
        attention_metadata=tensor([max(map(len, places)), *[max(end for _, end in chunks)] * 2]),
    )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_any_packing_of_any_sequences_computes_what_they_are_alone(changes: dict[str, Any]) -> None:
    """Three sequences in scattered blocks; each run takes some tokens of each, a decode beside a prompt's chunk."""
    decoder = make_decoder(make_config(**changes, max_model_len=32))
    generator = np.random.default_rng(1)
    tokens = [generator.integers(decoder.config.vocab_size, size=n) for n in (23, 9, 14)]
    free = generator.permutation(20).tolist()
    blocks = [[free.pop() for _ in range(-(-len(ids) // BLOCK))] for ids in tokens]
    caches, done = make_caches(decoder, 20), [0, 0, 0]
    found: list[list[torch.Tensor]] = [[], [], []]
    while any(n < len(ids) for n, ids in zip(done, tokens, strict=True)):
        rows = [i for i in range(3) if done[i] < len(tokens[i])]
        chunks = [
            (done[i], min(len(tokens[i]), done[i] + int(generator.integers(1, 7)))) for i in rows
        ]
        ids = np.concatenate(
            [tokens[i][start:end] for i, (start, end) in zip(rows, chunks, strict=True)]
        )
        inputs = packed(chunks, [blocks[i] for i in rows])
        with torch.inference_mode():
            logits, caches = decoder.step(
                torch.from_numpy(ids), inputs, torch.arange(len(ids)), caches
            )
        for i, (start, end), part in zip(
            rows, chunks, logits.split([e - s for s, e in chunks]), strict=True
        ):
            found[i].append(part)
            assert len(part) == end - start
            done[i] = end
    with torch.inference_mode():
        for ids, parts in zip(tokens, found, strict=True):
            expected = decoder(torch.from_numpy(ids)[None])[0]
            torch.testing.assert_close(
                torch.cat(parts), expected, rtol=1e-4, atol=1e-4 * float(expected.std())
            )


def test_a_slot_of_minus_one_is_not_written() -> None:
    decoder = make_decoder(make_config(max_model_len=32))
    inputs = packed([(0, 3)], [[1]])
    inputs.slot_mapping[1] = -1
    before = make_caches(decoder, 2)
    with torch.inference_mode():
        _, after = decoder.step(torch.tensor([5, 6, 7]), inputs, torch.arange(1), before)
    changed = (after[0].key != before[0].key).any(dim=(2, 3))
    assert changed.tolist() == [[False] * 4, [True, False, True, False]]


def test_scores_that_are_biased_cannot_be_paged() -> None:
    decoder = make_decoder(make_config(position="alibi", max_model_len=32))
    with pytest.raises(ValueError, match="cannot be biased"):
        decoder.step(
            torch.tensor([5]), packed([(0, 1)], [[0]]), torch.arange(1), make_caches(decoder, 1)
        )

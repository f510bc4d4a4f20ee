"""The decoder's beginnings, the cached one against the uncached one, and causality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import LayerCache
from kvasir.model.network.block import Cache
from kvasir.model.network.positions import Positions, sinusoidal_table
from kvasir.model.network.run_inputs import StepInputs
from kvasir.model.network.transformer import Transformer
from tests.kit.random_models import make_config, make_decoder
from tests.model.variants import VARIANTS

EVERY_VARIANT = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())


def empty_caches(config: TransformerConfig, batch: int) -> list[Cache]:
    """Return rows of large numbers: a read of a position that was not written shows.

    States are empty.
    """
    shape = (batch, config.n_kv_head, config.max_model_len, config.head_dim)
    of_layer = LayerCache(torch.full(shape, 1e4), torch.full(shape, -1e4))
    states = tuple(torch.zeros(batch, *shape) for shape in config.states.values())
    layers = range(config.n_layer)
    rows = [of_layer if config.attends(layer) else () for layer in layers]
    return [
        (*kept, *(states if layer in config.recurrent_layers else ()))
        for layer, kept in enumerate(rows)
    ]


def step(
    decoder: Transformer, tokens: Tensor, lengths: list[int], caches: Sequence[Cache]
) -> tuple[Tensor, list[Cache]]:
    """Append tokens [batch, sequence]; row b then holds lengths[b]. Returns logits of all."""
    batch, sequence = tokens.shape
    starts = (torch.tensor(lengths) - sequence).clamp(min=0)
    inputs = StepInputs(
        seqlens_k=torch.tensor(lengths, dtype=torch.int32) - 1,
        total_sequence_length=torch.tensor(max(lengths), dtype=torch.int32),
        position_ids=starts[:, None] + torch.arange(sequence),
        n_new=torch.tensor(lengths) - starts,
    )
    logits, presents = decoder.step(tokens, inputs, torch.arange(batch * sequence), caches)
    return logits.view(batch, sequence, -1), presents


def random_tokens(config: TransformerConfig, *shape: int) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("d_model", [48, 7])
def test_sinusoidal_table_by_formula(d_model: int) -> None:
    table = sinusoidal_table(make_config(position="sinusoidal", d_model=d_model))
    assert table.shape == (96, d_model)
    for position in range(96):
        for column in range(d_model):
            angle = position / 10000 ** (2 * (column // 2) / d_model)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert abs(float(table[position, column]) - expected) < 1e-6


def test_sinusoids_are_added_to_scaled_embeddings() -> None:
    """Vaswani et al. 2017, section 3.4; other decoders are compared with transformers."""
    config = make_config(**VARIANTS["vaswani"])
    decoder, tokens = make_decoder(config), random_tokens(make_config(), 2, 7)
    x = decoder.embedding.weight[tokens] * config.d_model**0.5 + sinusoidal_table(config)[:7]
    for block in decoder.blocks:
        x = block(x, Positions())
    close(decoder(tokens), x @ decoder.embedding.weight.T)


def test_weights_start_as_in_gpt2() -> None:
    torch.manual_seed(0)
    config = make_config(
        d_model=192, d_ff=384, n_layer=8, qkv_bias=True, output_bias=True, feed_forward_bias=True
    )
    decoder = Transformer(config)
    narrow = 0.02 / math.sqrt(2 * 8)
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            expected = narrow if residual else 0.02
            assert abs(parameter.std().item() / expected - 1) < 0.05, name


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_dropout_acts_in_training_only(kind: str) -> None:
    config = make_config(**{kind: 0.5})
    decoder = make_decoder(config)
    without = make_decoder(make_config())
    tokens = random_tokens(config, 2, 7)
    assert torch.equal(decoder(tokens), without(tokens))
    decoder.train()
    torch.manual_seed(0)
    dropped = decoder(tokens)
    assert not torch.allclose(dropped, without(tokens), atol=1e-2)
    torch.manual_seed(0)
    assert torch.equal(decoder(tokens), dropped)


# The cached decoder


@EVERY_VARIANT
@torch.inference_mode()
def test_cached_rows_give_each_row_its_own_logits(changes: dict[str, Any]) -> None:
    """Prompts padded on the right, then tokens of every row, as continuous batching does."""
    config = make_config(**changes)
    decoder = make_decoder(config)
    lengths, chunks = [4, 11, 1], (5, 1, 2, 1)
    tokens = random_tokens(config, len(lengths), max(lengths) + sum(chunks))
    expected = torch.cat([decoder(row[None]) for row in tokens])
    padded = tokens[:, : max(lengths)].clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 0
    logits, caches = step(decoder, padded, lengths, empty_caches(config, len(lengths)))
    for row, length in enumerate(lengths):
        close(logits[row, :length], expected[row, :length])
    starts, rows = torch.tensor(lengths), torch.arange(len(lengths))[:, None]
    for n_new in chunks:
        places = starts[:, None] + torch.arange(n_new)
        starts = starts + n_new
        logits, caches = step(decoder, tokens[rows, places], starts.tolist(), caches)
        close(logits, expected[rows, places])


@pytest.mark.parametrize("indices", [[], [0], [9], [7, 2, 2]])
@torch.inference_mode()
def test_logits_are_those_of_the_asked_positions(indices: list[int]) -> None:
    config = make_config()
    decoder = make_decoder(config)
    tokens = random_tokens(config, 2, 5)
    inputs = StepInputs(torch.tensor([4, 4]), torch.tensor(5), torch.arange(5).repeat(2, 1))
    rows = torch.tensor(indices, dtype=torch.long)
    logits, _ = decoder.step(tokens, inputs, rows, empty_caches(config, 2))
    assert logits.shape == (len(indices), config.vocab_size)
    close(logits, decoder(tokens).flatten(0, 1)[indices])


# Causality


def unmoved(config: TransformerConfig, moved: Tensor, logits: Tensor) -> bool:
    """Compare by bits; a mixture's sums in PyTorch depend on how many tokens share an expert."""
    return torch.allclose(moved, logits, atol=1e-5) if config.n_experts else moved.equal(logits)


@EVERY_VARIANT
@torch.inference_mode()
def test_no_position_sees_the_future_by_one_bit(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    decoder = make_decoder(config)
    tokens = random_tokens(config, 1, 19)
    logits = decoder(tokens)
    for t in (0, 9, 18):
        perturbed = tokens.clone()
        perturbed[0, t] = (tokens[0, t] + 1) % config.vocab_size
        moved = decoder(perturbed)
        assert unmoved(config, moved[0, :t], logits[0, :t])
        # And the past is seen.
        assert all(not torch.equal(moved[0, s], logits[0, s]) for s in range(t, 19))

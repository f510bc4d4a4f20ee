"""Encoders: a token sees both sides, padding changes nothing, and poolings by definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from tests.kit import encoders
from tests.kit.random_models import make_config, make_decoder

BERT, MODERN = (
    {field: value for field, value in shape.items() if field != "pooling"}
    for shape in (encoders.BERT, encoders.MODERN)
)
ENCODERS = {
    "bert": BERT,
    "mpnet": BERT | {"position": "learned_relative", "n_token_types": None},
    "modernbert": MODERN,
    "alibi": BERT | {"position": "alibi"},
    "embedding gemma": {"causal": False, "qk_norm": True, "norm_placement": "both"},
}
LENGTHS = [5, 23, 1]
EVERY_ENCODER = pytest.mark.parametrize("changes", ENCODERS.values(), ids=ENCODERS.keys())


def random_rows(config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Return rows of tokens and of token types."""
    shape = (len(LENGTHS), max(LENGTHS))
    generator = torch.Generator().manual_seed(0)
    types = torch.randint(config.n_token_types or 1, shape, generator=generator)
    return torch.randint(config.vocab_size, shape, generator=generator), types


@EVERY_ENCODER
@torch.inference_mode()
def test_padding_changes_no_row(changes: dict[str, Any]) -> None:
    encoder = make_decoder(make_config(**changes))
    rows, types = random_rows(encoder.config)
    lengths = torch.tensor(LENGTHS)
    found = encoder.hidden(rows, lengths, types)
    others = torch.where(torch.arange(rows.shape[1]) < lengths[:, None], rows, rows.flip(1))
    again = encoder.hidden(others, lengths, types)
    for row, length in enumerate(LENGTHS):
        alone = encoder.hidden(rows[row : row + 1, :length], None, types[row : row + 1, :length])
        torch.testing.assert_close(found[row, :length], alone[0], rtol=1e-4, atol=2e-5)
        assert torch.equal(found[row, :length], again[row, :length])


@EVERY_ENCODER
@torch.inference_mode()
def test_a_token_sees_both_sides_as_far_as_the_window(changes: dict[str, Any]) -> None:
    narrow = {"sliding_window_layers": None} if "sliding_window" in changes else {}
    one_layer = {"n_layer": 1, "layers_without_attention_norm": ()}
    encoder = make_decoder(make_config(**changes | narrow | one_layer))
    rows, _ = random_rows(encoder.config)
    reach = changes.get("sliding_window", rows.shape[1])
    hidden = encoder.hidden(rows[1:2])
    for place in range(rows.shape[1]):
        perturbed = rows[1:2].clone()
        perturbed[0, place] = (rows[1, place] + 1) % encoder.config.vocab_size
        moved = (encoder.hidden(perturbed) != hidden).any(dim=-1)[0]
        assert torch.equal(moved, (torch.arange(rows.shape[1]) - place).abs() < reach)

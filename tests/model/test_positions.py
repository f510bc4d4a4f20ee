"""Positions against transformers'; the families' logits hold further scalings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from kvasir.model.configuration.parts import RopeScaling
from kvasir.model.importing.families.options import Options
from kvasir.model.importing.families.positions import rotary_fields
from kvasir.model.network.positions import alibi_table, rotary_table
from tests.kit.random_models import make_config, make_decoder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.t5.modeling_t5 import T5Attention


def test_longrope_has_long_factors_beyond_the_original_length() -> None:
    """As vLLM has it: the exported length decides, once for all positions."""
    scaling = RopeScaling(
        kind="longrope",
        factor=4.0,
        original_max_model_len=64,
        attention_factor=1.0,
        short_factors=(1.0,) * 8,
        long_factors=(2.0,) * 8,
    )
    plain = rotary_table(make_config(head_dim=16))
    for length, factor in ((64, 1), (65, 2)):
        table = rotary_table(make_config(head_dim=16, max_model_len=length, rope_scaling=scaling))
        torch.testing.assert_close(table.cos[6], plain.cos[6 // factor])
        torch.testing.assert_close(table.sin[6], plain.sin[6 // factor])


FAR = 131_072
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 5e5},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 6.0},
    "llama3": {
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768},
    "longrope": {
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + i / 50 for i in range(8)],
        "long_factor": [1.0 + 2 * i for i in range(8)],
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_angles_are_those_of_transformers_at_far_positions(kind: str) -> None:
    """Theirs are float32, whose last bit is a 128th of a radian at position 131,071."""
    scaling = {"rope_type": kind, "rope_theta": 1e4} | SCALINGS[kind]
    published = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=16,
        max_position_embeddings=FAR,
        rope_parameters=scaling,
    )
    fields = rotary_fields(
        Options(
            {"head_dim": 16, "max_position_embeddings": FAR, "rope_scaling": None}
            | {"rope_parameters": scaling, "original_max_position_embeddings": None},
            {},
        ),
        tuple(SCALINGS),
    )
    table = rotary_table(make_config(head_dim=16, max_model_len=FAR, **fields))
    places = torch.tensor([0, 1, 4095, 4096, 16_383, 16_384, 65_536, FAR - 1])
    theirs = LlamaRotaryEmbedding(published)(torch.zeros(1), places[None])
    for ours, angles in zip(table, theirs, strict=True):
        torch.testing.assert_close(ours[places], angles[0, :, :8], rtol=0.0, atol=FAR * 2**-24)


@pytest.mark.parametrize("n_head", [1, 2, 3, 4, 6, 7, 12, 14, 25, 32, 71])
def test_alibi_is_that_of_transformers(n_head: int) -> None:
    """Theirs is a bias by the key's place; after softmax, only differences count."""
    config = make_config(position="alibi", n_head=n_head, n_kv_head=1, max_model_len=9)
    theirs = build_alibi_tensor(torch.ones(1, 9), n_head, torch.float32).reshape(n_head, 9)
    torch.testing.assert_close(alibi_table(config).flip(1), theirs - theirs[:, -1:])


@pytest.mark.parametrize(("n_buckets", "largest"), [(32, 128), (16, 50), (8, 5), (4, 40)])
@pytest.mark.parametrize("causal", [True, False])
def test_relative_biases_are_those_of_transformers(
    n_buckets: int, largest: int, causal: bool
) -> None:
    config = make_config(
        causal=causal,
        position="relative",
        relative_buckets=n_buckets,
        relative_max_distance=largest,
        max_model_len=300,
    )
    place = torch.arange(300)
    buckets = T5Attention._relative_position_bucket(
        place - place[:, None],
        bidirectional=not causal,
        num_buckets=n_buckets,
        max_distance=largest,
    )
    assert buckets.max() == n_buckets - 1
    decoder = make_decoder(config)
    bias = decoder.positions(place[None], lambda: place).bias
    assert bias is not None
    assert torch.equal(bias[0], decoder.relative_bias.weight[buckets].permute(2, 0, 1))

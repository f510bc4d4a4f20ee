"""The decoder's configuration: what it refuses and how it says so, its file, and the presets' published shapes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import PRESETS, ConfigError, DecoderConfig, RopeScaling, preset
from model.network.decoder import Decoder

VALID: dict[str, Any] = {
    "vocab_size": 300,
    "max_model_len": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "head_dim": 16,
    "d_model": 48,
    "d_ff": 96,
}
SIZES = list(VALID)
# Counts of the published checkpoints, tied weights counted once.
PUBLISHED_PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "llama3.2-1b": 1_235_814_400,
}
# (rope_theta, norm_eps) of the published config.json: neither shows in a parameter count.
PUBLISHED_CONSTANTS = {
    "smollm2-135m": (100_000.0, 1e-5),
    "qwen2.5-0.5b": (1_000_000.0, 1e-6),
    "llama3.2-1b": (500_000.0, 1e-5),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -3, 1.5, 2.0, "4", None, True])
def test_a_size_must_be_a_positive_whole_number(name: str, value: object) -> None:
    with pytest.raises(
        ConfigError, match=f"^{name} must be a positive whole number, not {value!r}$"
    ):
        DecoderConfig(**{**VALID, name: value})


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "x", None, True])
def test_a_constant_must_be_a_positive_number(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be a positive number, not {value!r}$"):
        DecoderConfig(**{**VALID, name: value})


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.0, 7, math.nan, "0.1", None, True])
def test_a_dropout_must_be_a_share_below_one(name: str, value: object) -> None:
    with pytest.raises(
        ConfigError, match=f"^{name} must be at least 0 and less than 1, not {value!r}$"
    ):
        DecoderConfig(**{**VALID, name: value})


@pytest.mark.parametrize(
    "name", ["qkv_bias", "output_bias", "feed_forward_bias", "tied_embeddings"]
)
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_must_be_true_or_false(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be true or false, not {value!r}$"):
        DecoderConfig(**{**VALID, name: value})


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("position", "rotary, learned, sinusoidal, alibi, relative, none"),
        ("norm", "rmsnorm, layernorm"),
        ("norm_placement", "pre, post, both"),
        ("feed_forward", "swiglu, geglu, geglu_tanh, gelu, gelu_tanh, relu"),
    ],
)
@pytest.mark.parametrize("value", ["other", None, 3, ["rotary"]])
def test_a_choice_must_be_one_of_those_that_exist(name: str, choices: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(**{**VALID, name: value})
    assert str(caught.value) == f"{name} must be one of {choices}, not {value!r}"
    for choice in choices.split(", "):
        DecoderConfig(**{**VALID, name: choice})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": 3}, "rotary_dim must be an even number up to head_dim, 16, not 3"),
        ({"rotary_dim": 18}, "rotary_dim must be an even number up to head_dim, 16, not 18"),
        (
            {"position": "alibi", "rotary_dim": 8},
            "rotary_dim must be left out with alibi positions, not 8",
        ),
        (
            {"position": "none", "layers_without_rotary": (0,)},
            "must be left out with none positions",
        ),
        (
            {"layers_without_rotary": (2,)},
            r"layers_without_rotary must be layers below 2, not \(2,\)",
        ),
        ({"sliding_window": 0}, "sliding_window must be a positive whole number, not 0"),
        (
            {"sliding_window_layers": (0,)},
            "sliding_window_layers must be left out without a window",
        ),
        (
            {"sliding_window": 4, "sliding_window_layers": ("0",)},
            "sliding_window_layers must be layers below 2",
        ),
        ({"attention_scale": 0.0}, "attention_scale must be a positive number, not 0.0"),
        ({"logit_softcap": math.nan}, "logit_softcap must be a positive number, not nan"),
        ({"qk_norm": 1}, "qk_norm must be true or false, not 1"),
        ({"relative_buckets": 0}, "relative_buckets must be a whole number of at least 2, not 0"),
        (
            {"position": "relative", "relative_max_distance": 16},
            r"relative_max_distance \(16\) must be more than half",
        ),
        (
            {"parallel_residual": True, "norm_placement": "post"},
            "parallel_residual needs norm_placement pre",
        ),
    ],
)
def test_attention_that_cannot_be_computed_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig(**{**VALID, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kind": "longrope"},
            "rope_scaling's kind must be linear, llama3 or yarn, not 'longrope'",
        ),
        ({"factor": 0.0}, "rope_scaling's factor must be a positive number, not 0.0"),
        ({"attention_factor": -1.0}, "rope_scaling's attention_factor must be a positive number"),
        (
            {"kind": "yarn"},
            "rope_scaling yarn needs original_max_model_len, a positive whole number, not None",
        ),
        (
            {"kind": "llama3", "original_max_model_len": 8, "low_freq_factor": 4.0},
            "low_freq_factor must be less than its high_freq_factor",
        ),
    ],
)
def test_rope_scaling_that_has_no_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeScaling(**{"kind": "linear", "factor": 2.0, **changes})
    with pytest.raises(ConfigError, match="rope_scaling must be an object, not 7"):
        DecoderConfig.from_dict({**VALID, "rope_scaling": 7})


def test_layers_differ_in_windows_and_positions() -> None:
    config = DecoderConfig(
        **VALID, sliding_window=4, sliding_window_layers=(1,), layers_without_rotary=(0,)
    )
    assert [(config.window_of(i), config.rotates(i)) for i in range(2)] == [
        (None, False),
        (4, True),
    ]
    everywhere = DecoderConfig(**VALID, sliding_window=4)
    assert [(everywhere.window_of(i), everywhere.rotates(i)) for i in range(2)] == [(4, True)] * 2


def test_query_heads_must_share_key_value_heads_evenly() -> None:
    with pytest.raises(ConfigError, match=r"^n_head \(4\) must be a multiple of n_kv_head \(3\)$"):
        DecoderConfig(**{**VALID, "n_kv_head": 3})
    for n_kv_head in (1, 2, 4):
        config = DecoderConfig(**{**VALID, "n_kv_head": n_kv_head})
        assert config.n_groups * config.n_kv_head == config.n_head


@pytest.mark.parametrize(
    ("position", "multiple"), [("rotary", 16), ("learned", 8), ("alibi", 8), ("none", 8)]
)
def test_head_dim_must_be_what_the_served_operator_takes(position: str, multiple: int) -> None:
    for head_dim in range(1, 33):
        values = {**VALID, "position": position, "head_dim": head_dim}
        if head_dim % multiple == 0:
            DecoderConfig(**values)
        else:
            with pytest.raises(
                ConfigError,
                match=f"^head_dim must be a multiple of {multiple} with .*not {head_dim}$",
            ):
                DecoderConfig(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bos_token_id", 300),
        ("bos_token_id", -1),
        ("bos_token_id", "0"),
        ("eos_token_ids", (0, 300)),
        ("eos_token_ids", (-1,)),
        ("eos_token_ids", (1.0,)),
        ("eos_token_ids", (True,)),
    ],
)
def test_special_tokens_must_lie_in_the_vocabulary(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(**{**VALID, name: value})
    assert str(caught.value) == f"{name} must be in the vocabulary of 300, not {value!r}"


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        DecoderConfig(
            **VALID,
            position="sinusoidal",
            norm="layernorm",
            norm_placement="post",
            feed_forward="relu",
            norm_eps=1e-6,
            output_bias=True,
            tied_embeddings=False,
            dropout=0.25,
            attention_dropout=0.5,
            bos_token_id=0,
            eos_token_ids=(0, 299),
        ),
        DecoderConfig(
            **VALID,
            rope_scaling=RopeScaling(
                kind="yarn", factor=4.0, original_max_model_len=32, attention_factor=1.2
            ),
            rotary_dim=8,
            layers_without_rotary=(1,),
            sliding_window=8,
            sliding_window_layers=(0,),
            qk_norm=True,
            attention_scale=0.1,
            attention_softcap=50.0,
            logit_softcap=30.0,
            embedding_scale=7.0,
            norm_placement="both",
        ),
        DecoderConfig(
            **VALID,
            position="relative",
            relative_buckets=16,
            sliding_window=3,
            parallel_residual=True,
        ),
    ],
)
def test_saving_and_loading_gives_an_equal_configuration(
    tmp_path: Path, config: DecoderConfig
) -> None:
    config.save(tmp_path / "config.json")
    loaded = DecoderConfig.load(tmp_path / "config.json")
    assert loaded == config
    assert hash(loaded) == hash(
        config
    )  # a list for eos_token_ids would compare unequal, or not hash


@pytest.mark.parametrize("missing", SIZES)
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks the field '{missing}'$"):
        DecoderConfig.from_dict({name: value for name, value in VALID.items() if name != missing})


def test_an_unknown_field_is_named() -> None:
    """A field of a newer version that is passed over would build another decoder than the one that was trained."""
    with pytest.raises(ConfigError, match="unknown field 'n_experts'"):
        DecoderConfig.from_dict({**VALID, "n_experts": 8})
    scaling = {"kind": "linear", "factor": 2.0, "mscale": 1.0}
    with pytest.raises(ConfigError, match="unknown field 'mscale' in rope_scaling"):
        DecoderConfig.from_dict({**VALID, "rope_scaling": scaling})


@pytest.mark.parametrize("value", [None, 7, "12"])
def test_ending_tokens_of_another_type_are_refused(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.from_dict({**VALID, "eos_token_ids": value})
    assert str(caught.value) == f"eos_token_ids must be a list, not {value!r}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"", "is not JSON"),
        (b"[]", "must hold a JSON object"),
        (
            json.dumps({**VALID, "n_head": "4"}).encode(),
            "n_head must be a positive whole number, not '4'",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.load(path)


def test_a_configuration_cannot_be_changed() -> None:
    config = DecoderConfig(**VALID)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layer = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        decoder = Decoder(preset(name))
    assert decoder.n_parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_CONSTANTS)
def test_a_rotary_preset_has_the_published_constants(name: str) -> None:
    config = preset(name)
    assert (config.position, config.rope_theta, config.norm_eps) == (
        "rotary",
        *PUBLISHED_CONSTANTS[name],
    )


def test_gpt2_has_the_published_positions() -> None:
    config = preset("gpt2-124m")
    assert (config.position, config.max_model_len) == ("learned", 1024)


def test_a_preset_can_be_changed_and_is_checked_again() -> None:
    assert preset("tiny", n_layer=7, dropout=0.1) == dataclasses.replace(
        PRESETS["tiny"], n_layer=7, dropout=0.1
    )
    with pytest.raises(ConfigError, match=r"^no preset 'huge'; there are tiny, gpt2-124m"):
        preset("huge")
    with pytest.raises(ConfigError, match="unknown field 'n_layers'"):
        preset("tiny", n_layers=7)
    with pytest.raises(ConfigError, match=r"^n_layer must be a positive whole number, not 0$"):
        preset("tiny", n_layer=0)

"""The decoder's configuration: refusals, its file, and the presets' published shapes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.configuration.parts import Projection, RopeScaling
from kvasir.model.network.skeleton import check_size, count_parameters
from kvasir.model.network.transformer import Transformer
from kvasir.model.presets import PRESETS, preset
from tests.kit.encoders import BERT, MODERN, MPNET
from tests.kit.random_models import SHAPE, make_config
from tests.model.variants import VARIANTS

VALID = SHAPE | {"max_model_len": 64}
SIZES = list(VALID)
SPARSE = {"router": "sparse_mixer"}
MIXTURE = {"d_model": 64, "n_experts": 4, "n_experts_per_token": 2, "d_expert": 32}
# Counts of the published checkpoints, tied weights counted once.
PUBLISHED_PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "llama3.2-1b": 1_235_814_400,
}


def refused(**changes: Any) -> str:
    """Return the one line with which a configuration with these changes is refused."""
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(**{**VALID, **changes})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (SIZES, [0, -3, 1.5, 2.0, "4", None, True]),
        (["rope_theta", "norm_eps"], [0, -1.0, math.nan, math.inf, "x", None, True]),
        (["dropout", "attention_dropout"], [-0.1, 1.0, 7, math.nan, "0.1", None, True]),
        (["attention_scale", "attention_softcap", "logit_softcap"], [0.0, math.nan, "1", True]),
        (["qkv_bias", "qk_norm", "tied_embeddings"], ["no", 1, None]),
        (["position", "norm", "norm_placement", "feed_forward"], ["other", None, 3, ["rotary"]]),
        (["sliding_window", "relative_max_distance"], [0, 2.0, True]),
        (["relative_buckets"], [0, 1, None]),
        (["rotary_dim"], [3, 18, "8"]),
        (["layers_without_rotary"], [(2,), (-1,), 7, None]),
        (["eos_token_ids"], [(0, 300), (-1,), None, 7, "12"]),
        (["bos_token_id"], [300, -1, "0"]),
        (["rope_scaling"], [7]),
    ],
)
def test_a_value_that_a_field_cannot_have_is_named(names: list[str], values: list[Any]) -> None:
    for name in names:
        for value in values:
            message = refused(**{name: value})
            assert message.startswith(f"{name} must be ")
            assert message.endswith(f", not {value!r}")


GROWING = RopeScaling(kind="yarn", factor=2.0, original_max_model_len=8, query_growth=0.1)
LONGROPE = RopeScaling(
    kind="longrope",
    factor=2.0,
    original_max_model_len=8,
    short_factors=(1.0,) * (VALID["head_dim"] // 2),
    long_factors=(2.0,) * (VALID["head_dim"] // 2),
)


FEW = dataclasses.replace(LONGROPE, long_factors=(2.0,))
LINEAR = {"kind": "linear", "factor": 2.0}
LLAMA3 = {"kind": "llama3", "factor": 2.0}
YARN = {"kind": "yarn", "factor": 2.0, "original_max_model_len": 8}
OWN_THETA = {"sliding_window_rope_theta": 10.0}
RULE = {"kind": "short_convolution", "kernel": 3}
RECURRENT = {"recurrence": RULE, "recurrent_layers": (0, 1)}
HUGE = 2**31 - 1
OF_HEADS = {"kind": "delta_rule", "kernel": 2, "n_head": HUGE, "key_dim": HUGE, "value_dim": 1}
OF_CHANNELS = OF_HEADS | {"n_key_head": 1, "decays_by_channel": True, "rank": 1}
MAMBA = {"kind": "mamba", "kernel": 2, "d_state": 64, "step_rank": 1}
MAMBA2 = {"kind": "mamba2", "kernel": 2, "head_dim": 8, "d_state": 8}
LSTM = {"kind": "lstm", "width": 8}
PAIR = {"encoder": VALID | {"causal": False}, "target_prefix": (0,)}
CLAMPED = {"feed_forward": "swiglu_clamped"}
# Changes of VALID, and how the message begins.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"eos_token_ids": [1.0]}, "eos_token_ids.0 must be a valid integer, not 1.0"),
    ({"eos_token_ids": [0, True]}, "eos_token_ids.1 must be a valid integer, not True"),
    ({"sliding_window_layers": ["0"]}, "sliding_window_layers.0 must be a valid integer"),
    ({"norm": "batchnorm"}, "norm must be 'rmsnorm' or 'layernorm', not 'batchnorm'"),
    ({"n_heads": 8}, "unknown field 'n_heads' in the model's configuration"),
    ({"rope_scaling": {"kind": "linear"}}, "rope_scaling lacks the field 'factor'"),
    ({"rope_scaling": LINEAR | {"mscale": 1.0}}, "unknown field 'mscale' in rope_scaling"),
    ({"rope_scaling": LLAMA3}, "rope_scaling llama3 needs original_max_model_len"),
    ({"rope_scaling": FEW}, "rope_scaling must be one with 8 long_factors, for as many"),
    ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta must be more than 1 with yarn"),
    ({"rope_scaling": YARN | {"beta_fast": 1e308}}, "rope_scaling.beta_fast must be less than"),
    ({"rope_scaling": YARN | {"beta_slow": 5e-324}}, "rope_scaling.beta_slow must be greater"),
    ({"qk_norm": True, "rope_scaling": GROWING}, "qk_norm must be "),
    ({"position": "alibi", "rotary_dim": 8}, "rotary_dim must be "),
    ({"position": "none", "layers_without_rotary": (0,)}, "layers_without_rotary must be "),
    ({"sliding_window_layers": (0,)}, "sliding_window_layers must be "),
    ({"sliding_window": 4, "sliding_window_layers": (2,)}, "sliding_window_layers must be "),
    (OWN_THETA, "sliding_window_rope_theta must be "),
    (OWN_THETA | {"sliding_window": 4, "position": "none"}, "sliding_window_rope_theta must be "),
    ({"position": "relative", "relative_max_distance": 16}, "relative_max_distance must be "),
    ({"parallel_residual": True, "norm_placement": "post"}, "norm_placement must be "),
    (
        {"parallel_residual": True, "layers_without_feed_forward": (0,)},
        "layers_without_feed_forward must be left out",
    ),
    ({"n_kv_head": 3}, "n_head must be "),
    ({"qk_norm_across_heads": True}, "qk_norm_across_heads must be "),
    ({"head_projection": Projection(d_out=48)}, "head_projection must be one with d_out of d_mod"),
    (MIXTURE | SPARSE | {"normalize_expert_shares": True}, "normalize_expert_shares must be left"),
    (CLAMPED, "feed_forward must be another one without n_experts"),
    (MIXTURE | {"n_experts_per_token": 5}, "n_experts_per_token must be from 1 to n_experts, 4"),
    (MIXTURE | {"n_experts_per_token": None}, "n_experts_per_token must be from 1 to n_experts"),
    (MIXTURE | {"n_experts": None}, "n_experts_per_token must be left out without n_experts"),
    (MIXTURE | {"d_expert": 48}, "d_expert must be a multiple of 32 with experts, not 48"),
    (MIXTURE | {"d_expert": None}, "d_expert must be a multiple of 32 with experts, not None"),
    (MIXTURE | {"d_model": 48}, "d_model must be a multiple of 32 with experts, not 48"),
    (MIXTURE | {"dense_layers": (2,)}, "dense_layers must be layers from 0 to 1, not (2,)"),
    (MIXTURE | {"feed_forward": "gelu"}, "feed_forward must be swiglu or swiglu_clamped with"),
    (MIXTURE | CLAMPED | {"dense_layers": (0,)}, "feed_forward must be swiglu with these experts"),
    ({"recurrence_beside_attention": True}, "recurrence_beside_attention must be false without"),
    ({"recurrence": RULE, "recurrent_layers": (0, 0)}, "recurrent_layers must be layers that are"),
    (
        {"recurrence": LSTM, "recurrent_layers": (0, 1)},
        "recurrence must be an lstm in and with an enc",
    ),
    (PAIR | {"recurrence": RULE, "recurrent_layers": (0, 1)}, "recurrence must be an lstm in and"),
    (PAIR | {"recurrence": LSTM, "recurrent_layers": (0,)}, "recurrent_layers must be all layers"),
    (
        PAIR | {"recurrence": LSTM | {"both_ways": True}, "recurrent_layers": (0, 1)},
        "recurrence must be an lstm without both_ways outside an encoder",
    ),
    (PAIR | {"cross_attention": "none"}, "cross_attention must be additive or none with an encod"),
    (
        PAIR | {"recurrence": LSTM, "recurrent_layers": (0, 1)},
        "cross_attention must be additive or",
    ),
    (
        RECURRENT | {"recurrence": OF_CHANNELS | {"least_log_decay": -1e308}},
        "recurrence.delta_rule.least_log_decay must be greater than or equal to -1",
    ),
    ({**RECURRENT, "position": "alibi"}, "position must be one without biases on scores"),
    ({**RECURRENT, "position": "relative"}, "position must be one without biases on scores"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_wrong_is_told_with_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    assert refused(**changes).startswith(message)


@pytest.mark.parametrize("missing", SIZES)
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks the field '{missing}'$"):
        TransformerConfig(**{name: value for name, value in VALID.items() if name != missing})


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "longrope"},
        {"factor": 0.0},
        {"attention_factor": -1.0},
        {"kind": "yarn"},
        {"query_growth": 0.1},
        {"kind": "llama3", "original_max_model_len": 8, "low_freq_factor": 4.0},
    ],
)
def test_rope_scaling_that_has_no_meaning_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RopeScaling(**{"kind": "linear", "factor": 2.0, **changes})


def test_layers_differ_in_windows_and_positions() -> None:
    config = TransformerConfig(
        **VALID, sliding_window=4, sliding_window_layers=(1,), layers_without_rotary=(0,)
    )
    assert [(config.window_of(i), config.rotates(i)) for i in range(2)] == [
        (None, False),
        (4, True),
    ]
    everywhere = TransformerConfig(**VALID, sliding_window=4)
    assert [(everywhere.window_of(i), everywhere.rotates(i)) for i in range(2)] == [(4, True)] * 2


@pytest.mark.parametrize(
    ("position", "multiple"), [("rotary", 16), ("learned", 8), ("alibi", 8), ("none", 8)]
)
def test_head_dim_must_be_what_the_served_operator_takes(position: str, multiple: int) -> None:
    for head_dim in range(1, 33):
        if head_dim % multiple == 0:
            TransformerConfig(**{**VALID, "position": position, "head_dim": head_dim})
        else:
            message = refused(position=position, head_dim=head_dim)
            assert message.startswith(f"head_dim must be a multiple of {multiple} ")


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        *(make_config(**changes) for changes in (*VARIANTS.values(), BERT, MPNET, MODERN)),
        make_config(dropout=0.25, attention_dropout=0.5, bos_token_id=0, eos_token_ids=(0, 299)),
    ],
)
def test_saving_and_loading_gives_an_equal_configuration(
    tmp_path: Path, config: TransformerConfig
) -> None:
    config.save(tmp_path / "config.json")
    loaded = TransformerConfig.load(tmp_path / "config.json")
    assert loaded == config
    # A list for eos_token_ids would compare unequal, or not hash.
    assert hash(loaded) == hash(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"", "is not JSON"),
        (b"[]", "must hold a JSON object"),
        (json.dumps({**VALID, "n_head": "4"}).encode(), "n_head must be .*, not '4'"),
        (json.dumps({**VALID, "self": 1}).encode(), "unknown field 'self'"),
        (json.dumps({**VALID, "__dataclass_self__": 1}).encode(), "__dataclass_self__"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        TransformerConfig.load(path)


WIDE = VALID | MIXTURE | {"d_shared_expert": 32, "dense_layers": (0,)}
RECURRENCES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (RULE, {"kernel": HUGE}),
    (OF_HEADS | {"n_head": 2, "n_key_head": 2, "key_dim": 8}, OF_HEADS | {"n_key_head": HUGE}),
    (OF_CHANNELS | {"n_head": 2, "key_dim": 8}, OF_CHANNELS | {"n_head": 10**5, "key_dim": 10**5}),
    (MAMBA | {"d_inner": 64}, {"d_inner": 2**22}),
    (MAMBA2 | {"n_head": 4}, {"n_head": HUGE}),
    (LSTM, {"width": HUGE}),
]


def recurrent(recurrence: dict[str, Any]) -> dict[str, Any]:
    shape = VALID | {"recurrence": recurrence, "recurrent_layers": (0, 1)}
    return shape | PAIR | {"cross_attention": "none"} if recurrence["kind"] == "lstm" else shape


@pytest.mark.parametrize(
    ("shape", "huge"),
    [
        (VALID, VALID | {"n_layer": HUGE}),
        *((WIDE, WIDE | {name: 2**30}) for name in ("d_model", "d_ff", "n_experts", "d_expert")),
        (WIDE, WIDE | {"d_shared_expert": 2**30}),
        *((recurrent(small), recurrent(small | huge)) for small, huge in RECURRENCES),
    ],
)
def test_shapes_that_no_file_fills_are_refused_before_memory_is_taken(
    shape: dict[str, Any], huge: dict[str, Any]
) -> None:
    """Some numbers of recurrences are set where a decoder is made, which touches their memory."""
    whole = TransformerConfig(**shape)
    check_size(whole, count_parameters(whole))
    with pytest.raises(ConfigError, match=r"^a model of this shape has at least .*again$"):
        check_size(TransformerConfig(**huge), 10**9)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        decoder = Transformer(preset(name))
    assert decoder.n_parameters == PUBLISHED_PARAMETERS[name]


def test_a_preset_can_be_changed_and_is_checked_again() -> None:
    assert preset("tiny", n_layer=7, dropout=0.1) == dataclasses.replace(
        PRESETS["tiny"], n_layer=7, dropout=0.1
    )
    with pytest.raises(ConfigError, match=r"^no preset 'tinny'; did you mean 'tiny'\?"):
        preset("tinny")
    with pytest.raises(ConfigError, match=r"unknown field 'n_layers' .*; did you mean 'n_layer'"):
        preset("tiny", n_layers=7)
    with pytest.raises(ConfigError, match=r"^n_layer must be greater than 0, not 0$"):
        preset("tiny", n_layer=0)

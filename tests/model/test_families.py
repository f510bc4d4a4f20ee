"""config.json of published decoders → TransformerConfig: both styles, defaults and refusals."""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.configuration.parts import RopeScaling
from kvasir.model.configuration.recurrences import Mamba
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.families.decoders import DECODERS, WITH_VISION
from kvasir.model.importing.families.encoder_decoders import ENCODER_DECODERS
from kvasir.model.importing.families.encoders import ENCODERS
from kvasir.model.importing.families.family import NEUTRAL
from kvasir.model.presets import preset
from tests.kit.families import FAMILIES as CHECKPOINTS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoConfig


ALL = DECODERS | ENCODERS | ENCODER_DECODERS


def config_of(family: str, **values: Any) -> TransformerConfig:
    return ALL[family].config(values, bos_token_id=None, eos_token_ids=[])


# Preset: family, and the keys of its published config.json that say something about the decoder.
PUBLISHED: dict[str, tuple[str, str]] = {
    "gpt2-124m": (
        "gpt2",
        """{"activation_function": "gelu_new", "attn_pdrop": 0.1, "n_ctx": 1024,
        "summary_activation": null,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}}""",
    ),
    "smollm2-135m": (
        "llama",
        """{"hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
        "is_llama_config": true, "max_position_embeddings": 8192, "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
        "rope_theta": 100000, "tie_word_embeddings": true, "vocab_size": 49152}""",
    ),
    "qwen2.5-0.5b": (
        "qwen2",
        """{"hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
        "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}""",
    ),
    "llama3.2-1b": (
        "llama",
        """{"attention_bias": false, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": true,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "vocab_size": 128256}""",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_its_published_file_says(name: str) -> None:
    family, text = PUBLISHED[name]
    values = json.loads(text)
    config = config_of(family, **values)
    assert replace(config, max_model_len=preset(name).max_model_len) == preset(name)
    assert config.max_model_len == values.get("max_position_embeddings", 1024)


_SCOUT = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 0.5, "rope_type": "llama3"}
_SCOUT |= {"original_max_position_embeddings": 8192}
# Published decoders: family, keys of their config.json, and what these say.
RELEASED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma-3-27b": (
        "gemma3_text",
        {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504}
        | {"num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16}
        | {"query_pre_attn_scalar": 168, "sliding_window": 1024, "sliding_window_pattern": 6},
        {"attention_scale": 168**-0.5, "embedding_scale": math.sqrt(5376)},
    ),
    "falcon-mamba-7b": (
        "falcon_mamba",
        {"hidden_size": 4096, "expand": 16, "intermediate_size": 8192, "num_hidden_layers": 64}
        | {"state_size": 16, "time_step_rank": 256, "tie_word_embeddings": False},
        {
            "recurrence": Mamba(
                kernel=4, d_inner=8192, d_state=16, step_rank=256, inner_norm_eps=1e-6
            ),
            "tied_embeddings": False,
        },
    ),
    "granite-4.0 without experts": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * 28, "num_hidden_layers": 28, "num_local_experts": 0}
        | {"num_experts_per_tok": 0, "position_embedding_type": "rope", "mamba_d_conv": 4}
        | {"hidden_size": 1024, "shared_intermediate_size": 2048, "intermediate_size": 2048}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "rope_theta": 10000000}
        | {"normalization_function": "rmsnorm", "attention_multiplier": 0.015625},
        {"d_ff": 2048, "head_dim": 64, "position": "rotary", "rope_theta": 10000000},
    ),
    "OLMo-3-7B": (
        "olmo3",
        {"rope_theta": 500000, "sliding_window": 4096, "max_position_embeddings": 65536}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}
        | {"rms_norm_eps": 1e-6, "vocab_size": 100278}
        | {
            "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0}
            | {"beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192}
            | {"rope_type": "yarn"}
        },
        {"sliding_window_rope_theta": 500000, "norm_placement": "output"},
    ),
    "Phi-3.5-mini": (
        "phi3",
        {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
        | {"sliding_window": 262144, "num_key_value_heads": 32}
        | {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}
            | {"long_factor": [1.08] * 48}
        },
        {"sliding_window": 262144},
    ),
    "Phi-4-mini": (
        "phi3",
        {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
        | {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8}
        | {"partial_rotary_factor": 0.75, "sliding_window": 262144, "vocab_size": 200064}
        | {"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}
        | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
        | {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48}
            | {"long_factor": [1.1] * 48}
        },
        {"rotary_dim": 96, "head_dim": 128, "tied_embeddings": True},
    ),
    "Devstral-Small-2": (
        "ministral3",
        {"hidden_size": 5120, "num_hidden_layers": 40, "max_position_embeddings": 393216}
        | {
            "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 48.0}
            | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
            | {"original_max_position_embeddings": 8192, "rope_theta": 100000000.0}
            | {"rope_type": "yarn", "type": "yarn", "max_position_embeddings": 393216}
        },
        {"rope_theta": 1e8, "sliding_window": None, "head_dim": 128},
    ),
    "GLM-4.5-Air": (
        "glm4_moe",
        {"attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096}
        | {"eos_token_id": [151329, 151336, 151338], "moe_intermediate_size": 1408, "n_group": 1}
        | {"num_attention_heads": 96, "num_key_value_heads": 8, "num_nextn_predict_layers": 1}
        | {"partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000}
        | {"routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False},
        {"rotary_dim": 64, "d_shared_expert": 1408, "dense_layers": (0,), "output_bias": False},
    ),
    "Hunyuan-MT-7B": (
        "hunyuan_v1_dense",
        {"attention_head_dim": 128, "head_dim": 128, "hidden_size": 4096, "use_qk_norm": True}
        | {"intermediate_size": 14336, "num_key_value_heads": 8, "rope_theta": 10000.0}
        | {"add_classification_head": False, "mlp_bias": False, "use_rotary_pos_emb": True}
        | {
            "rope_scaling": {"alpha": 100000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0}
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"}
        },
        {"rope_theta": 1e4 * 1e5 ** (128 / 126), "rope_scaling": None},
    ),
    "internlm3-8b": (
        "internlm3",
        {"bias": False, "qkv_bias": False, "head_dim": 128, "rope_theta": 50000000}
        | {"rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "vocab_size": 128512},
        {"rope_theta": 50000000, "rope_scaling": None, "qkv_bias": False},
    ),
    "MiniMax-M2": (
        "minimax_m2",
        {"attn_type_list": [1] * 62, "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000}
        | {"scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_routing_bias": True}
        | {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_mtp": True, "num_mtp_modules": 3},
        {"rotary_dim": 64, "choice_bias": "scores", "d_expert": 1536},
    ),
    "EXAONE-4.0-32B": (
        "exaone4",
        {"head_dim": 128, "hidden_size": 5120, "num_attention_heads": 40, "sliding_window": 4096}
        | {"num_hidden_layers": 8, "sliding_window_pattern": "LLLG", "num_key_value_heads": 8}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2}
        | {
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
            | {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
        },
        {"layers_without_rotary": (3, 7), "sliding_window_layers": (0, 1, 2, 4, 5, 6)},
    ),
    "Hunyuan-A13B": (
        "hunyuan_v1_moe",
        {"num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32}
        | {"num_shared_expert": [1] * 32, "intermediate_size": 3072, "head_dim": 128},
        {"n_experts_per_token": 8, "d_expert": 3072, "d_shared_expert": 3072},
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | {"qk_rope_head_dim": 64, "num_attention_heads": 16, "hidden_size": 2048}
        | {"first_k_dense_replace": 1, "moe_intermediate_size": 1408, "num_experts_per_tok": 6}
        | {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax"}
        | {
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"}
            | {"mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
        },
        {"head_dim": 576, "n_kv_head": 1, "n_expert_groups": None, "d_shared_expert": 2816}
        | {"attention_scale": pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)},
    ),
    "Kimi-Linear-48B-A3B": (
        "kimi_linear",
        {"first_k_dense_replace": 1, "head_dim": 72, "hidden_size": 2304, "kv_lora_rank": 512}
        | {"mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024}
        | {"moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid"}
        | {"num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "topk_group": 1}
        | {"num_hidden_layers": 27, "num_shared_experts": 1, "q_lora_rank": None}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000.0}
        | {"rope_scaling": None, "use_grouped_topk": True, "v_head_dim": 128}
        | {
            "linear_attn_config": {"full_attn_layers": [*range(4, 25, 4), 27], "head_dim": 128}
            | {"kda_layers": [i for i in range(1, 27) if i % 4], "num_heads": 32}
            | {"short_conv_kernel_size": 4}
        },
        {"position": "none", "head_dim": 576, "rotary_dim": 64, "attention_scale": None}
        | {"recurrent_layers": tuple(i for i in range(26) if (i + 1) % 4), "dense_layers": (0,)},
    ),
    "Edge0-8B-A1B": (
        "bailing_hybrid",
        {"first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 1536, "kv_lora_rank": 512}
        | {"gated_attention_proj_granularity_type": "head_wise", "kda_lower_bound": -5}
        | {"kda_safe_gate": True, "layer_group_size": 4, "linear_silu": True, "n_group": 8}
        | {"expert_swiglu_limit_list": None, "no_kda_lora": True, "num_attention_heads": 16}
        | {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 24}
        | {"num_nextn_predict_layers": 0, "num_shared_experts": 1, "partial_rotary_factor": 0.5}
        | {"q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rotary_dim": 64}
        | {"rope_interleave": True, "score_function": "sigmoid", "short_conv_kernel_size": 4}
        | {"topk_group": 4, "topk_method": "noaux_tc", "use_qk_norm": True, "v_head_dim": 128}
        | {
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000}
            | {"rope_type": "default"}
        },
        {"head_dim": 576, "rotary_dim": 64, "rope_theta": 6000000, "dense_layers": (0,)}
        | {"recurrent_layers": tuple(i for i in range(24) if (i + 1) % 4)}
        | {"attention_gate_by_head": True, "attention_scale": pytest.approx(192**-0.5)},
    ),
    "Llama-4-Scout": (
        "llama4_text",
        {"attention_chunk_size": 8192, "max_position_embeddings": 10485760, "use_qk_norm": True}
        | {"num_hidden_layers": 8, "no_rope_layers": [], "layer_types": None, "moe_layers": None}
        | {"rope_scaling": _SCOUT},
        {"max_model_len": 8191, "layers_without_rotary": (3, 7), "dense_layers": ()},
    ),
    "command-r7b": (
        "cohere2",
        {"layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0}
        | {"position_embedding_type": "rope_gptj", "sliding_window": 4096, "use_qk_norm": False}
        | {"sliding_window_pattern": 4, "use_parallel_block": True, "logit_scale": 0.25},
        {"layers_without_rotary": tuple(range(3, 40, 4)), "parallel_residual": True},
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_what_is_published_is_accepted(name: str) -> None:
    family, values, expected = RELEASED[name]
    config = config_of(family, **values)
    assert {key: getattr(config, key) for key in expected} == expected


def test_growth_and_amplitude_are_read() -> None:
    ministral = config_of(*RELEASED["Devstral-Small-2"][:1], **RELEASED["Devstral-Small-2"][1])
    expected = RopeScaling(
        kind="yarn",
        factor=48.0,
        original_max_model_len=8192,
        attention_factor=1.0,
        query_growth=0.1,
    )
    assert ministral.rope_scaling == expected
    phi = config_of("phi3", **RELEASED["Phi-3.5-mini"][1]).rope_scaling
    assert phi is not None
    assert (phi.factor, phi.original_max_model_len) == (32.0, 4096)
    assert phi.attention_factor == pytest.approx(1.190238)


NEWER = {"cohere_compass_text", "olmo_hybrid without rotary"}  # which the older style cannot say
OLDER = [n for n in CHECKPOINTS if CHECKPOINTS[n][0] in DECODERS and n not in NEWER]


@pytest.mark.parametrize("name", OLDER)
def test_the_older_style_of_rotary_parameters_is_the_same(name: str) -> None:
    """The older style has rope_theta beside rope_scaling; two families have names of their own."""
    family, new = CHECKPOINTS[name]
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    rope = dict(new.get("rope_parameters", {}))
    if in_windows := rope.pop("sliding_attention", None):
        old["rope_local_base_freq"] = in_windows["rope_theta"]
        rope = dict(rope["full_attention"])
    theta, fraction = rope.pop("rope_theta", None), rope.pop("partial_rotary_factor", None)
    if theta is not None:
        old["rotary_emb_base" if family == "gpt_neox" else "rope_theta"] = theta
        old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    if fraction is not None:
        old["rotary_pct" if family == "gpt_neox" else "partial_rotary_factor"] = fraction
    assert config_of(family, **old) == config_of(family, **new)


def test_the_documents_list_every_decoder() -> None:
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    section = page.partition("## Decoders")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [name for cell in cells for name in re.findall("`(.+?)`", cell)]
    assert sorted(listed) == sorted([*DECODERS, *WITH_VISION, *["model_type"] * 3])


# Of these the defaults make no model, or one with experts.
NO_MODELS = {"dots1", "glm4_moe", "deepseek_v2", "nemotron_h"}


@pytest.mark.parametrize("name", sorted(ALL.keys() - NO_MODELS))
def test_what_a_file_leaves_out_is_what_transformers_takes(name: str) -> None:
    """A config.json leaves out what is the default of its class."""
    family, values = ALL[name], AutoConfig.for_model(name).to_dict()
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": []}
    tokens |= {"target_prefix": (1,)} if family.encoder else {}
    assert family.config({}, **tokens) == family.config(values, **tokens)
    if name in DECODERS:
        for key in ("bos_token_id", "eos_token_id"):
            assert family.options({})[key] == values[key]


@pytest.mark.parametrize("of_dense", [1, 2, 3])
def test_windows_of_first_dense_layers(of_dense: int) -> None:
    values = {"num_hidden_layers": 12, "first_k_dense_replace": 5, "sliding_window_pattern": 3}
    values["prefix_dense_sliding_window_pattern"] = of_dense
    theirs, ours = AutoConfig.for_model("cohere2_moe", **values), config_of("cohere2_moe", **values)
    windowed = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [ours.window_of(layer) is not None for layer in range(12)] == windowed


@pytest.mark.parametrize("name", ["cwm", "apertus", "ministral3", "gpt_oss"])
def test_a_scaling_of_null_is_the_default_as_in_transformers(name: str) -> None:
    scalings = [
        config_of(name, **values).rope_scaling for values in ({"rope_parameters": None}, {})
    ]
    assert scalings[0] == scalings[1] is not None


EVEN_WINDOWS = {"sliding_window": None, "sliding_window_layers": None}
LING: Any = config_of("bailing_hybrid").recurrence
IGNORED = {
    "attention_dropout": 0.1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("family", "values", "changes"),
    [
        ("mistral", {"sliding_window": None}, {"sliding_window": None}),
        ("gemma2", {"sliding_window": None}, EVEN_WINDOWS),
        ("gemma2", {"final_logit_softcapping": None}, {"logit_softcap": None}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, {}),
        ("gpt2", {"scale_attn_weights": False}, {"attention_scale": 1.0}),
        ("gpt2", {"n_inner": 1000}, {"d_ff": 1000}),
        ("gpt2", {"activation_function": "relu"}, {"feed_forward": "relu"}),
        ("llama", {"hidden_act": "gelu"}, {"feed_forward": "geglu"}),
        ("llama", {"num_key_value_heads": 4, "head_dim": None}, {"n_kv_head": 4}),
        (
            "qwen2",
            {"use_sliding_window": True},
            {"sliding_window": 4096, "sliding_window_layers": (28, 29, 30, 31)},
        ),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 32}, {}),
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 0},
            {"sliding_window": 4096, "sliding_window_layers": tuple(range(32))},
        ),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 64},
            {"sliding_window": 64, "sliding_window_layers": tuple(range(3, 36, 4))},
        ),
        ("smollm3", {"no_rope_layers": [1] * 35 + [0]}, {"layers_without_rotary": (35,)}),
        ("llama", {"sliding_window": 4096, "use_sliding_window": False}, {}),
        # Mistral has no such switch.
        ("mistral", {"sliding_window": 64, "use_sliding_window": False}, {"sliding_window": 64}),
        ("llama", IGNORED, {}),
        # As transformers 4.47 saves it, under its own name and the usual one.
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.5}, {"rotary_dim": 48}),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, {"rotary_dim": 48}),
        (
            "bailing_hybrid",
            {"kda_safe_gate": False, "kda_lower_bound": None},
            {"recurrence": replace(LING, least_log_decay=None)},
        ),
    ],
)
def test_a_key_changes_what_it_should(
    family: str, values: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert config_of(family, **values) == replace(config_of(family), **changes)


def yarn(factor: float, original: int, attention_factor: float, **more: Any) -> RopeScaling:
    scaling = RopeScaling(kind="yarn", factor=factor, original_max_model_len=original)
    return replace(scaling, attention_factor=attention_factor, **more)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "linear", "factor": 4}, RopeScaling(kind="linear", factor=4)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            yarn(4.0, 512, 0.1 * math.log(4.0) + 1.0),
        ),
        (
            {"type": "yarn", "original_max_position_embeddings": 512, "attention_factor": 1.5},
            yarn(4.0, 512, 1.5),
        ),
        (
            {"type": "yarn", "factor": 2.0, "attention_factor": 1.0, "beta_fast": 16}
            | {"truncate": False, "finetuned": True, "attn_factor": 1, "extrapolation_factor": 1},
            yarn(2.0, 2048, 1, beta_fast=16, truncate=False),
        ),
        ({"rope_type": "default", "rope_theta": 7.0}, None),
    ],
)
def test_rotary_scalings(rope: dict[str, Any], expected: RopeScaling | None) -> None:
    assert config_of("llama", rope_scaling=rope).rope_scaling == expected
    assert config_of("llama", rope_parameters=rope).rope_theta == rope.get("rope_theta", 10000.0)


LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
# Keys and values that a message quotes.
QUOTED: list[tuple[str, str, Any]] = [
    ("gpt2", "activation_function", "quick_gelu"),
    ("gpt2", "activation_function", "xielu"),  # whose numbers only Apertus has
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "add_cross_attention", True),
    ("gpt_neox", "hidden_act", "quick_gelu"),
    ("opt", "do_layer_norm_before", False),
    ("opt", "_remove_final_layer_norm", True),
    ("opt", "layer_norm_elementwise_affine", False),
    ("llama", "quantization_config", {"bits": 4}),
    ("llama", "rope_interleaved", True),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "sliding_window", 64),
    ("llama", "hidden_act", ["silu"]),
    ("llama", "num_local_experts", 8),
    ("stablelm", "qk_layernorm", True),
    ("falcon", "alibi", True),
    ("falcon", "parallel_attn", False),
    ("modernbert", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("gemma", "hidden_activation", "relu"),
    ("gemma2", "hidden_activation", "relu"),
    ("gemma2", "use_bidirectional_attention", True),
    ("gemma3_text", "attn_logit_softcapping", 50.0),  # transformers has the key, and no use of it
]
ANOTHER_GELU = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}
YARN_SCALING = {"type": "yarn", "factor": 2.0}
HALF_TURNED = {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}
LINEAR_WINDOWS = {"sliding_attention": {"rope_type": "linear"}}
# Keys, and what a message says of them.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "partial_rotary_factor is"),
    ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim is 512, .* hidden_size, 768"),
    ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu', .* only 'silu' or"),
    ("llama", {"rope_scaling": {"type": "dynamic"}}, "'dynamic', .* linear, llama3"),
    ("llama", {"rope_scaling": LONGROPE}, "rope_scaling is 'longrope'"),
    ("llama", {"rope_scaling": YARN_SCALING | {"ntk": 1}}, "computes no ntk"),
    ("llama", {"rope_scaling": YARN_SCALING | {"attn_factor": 0.5}}, "computes no attn_factor"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor must be a positive number, not None"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "computes no full_attention"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', .* an object"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ("llama", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "no llama_4_scaling_beta"),
    ("llama", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window is 64"),
    ("llama", {"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling is \['yarn'\]"),
    ("llama", {"num_hidden_layers": "many"}, "num_hidden_layers must be a whole number"),
    ("llama", {"num_attention_heads": 0}, "heads must be a whole number from 1 to 2147483647"),
    ("llama", {"hidden_size": 40, "num_attention_heads": 1}, "head_dim must be a multiple of 16"),
    ("mistral", {"layer_types": ["full_attention"] * 32}, "layer_types is"),
    ("ministral", {"layer_types": ["chunked_attention"] * 32}, "layer_types is .*chunked"),
    ("ministral", {"layer_types": ["full_attention"]}, "32 layers of full_attention"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is .* each of 36 layers"),
    ("phi3", {"rope_scaling": LONGROPE}, "rope_scaling must be one with 48 short_factors"),
    ("phi3", {"rope_scaling": LONGROPE | {"short_factor": "x"}}, "short_factors must be"),
    ("phi3", {"rope_scaling": LONGROPE | {"type": "yarn"}}, "rope_scaling is 'yarn'"),
    ("gemma3_text", {"rope_parameters": {"full_attention": 1}}, "rope_parameters is 1"),
    ("gemma3_text", {"rope_parameters": LINEAR_WINDOWS}, "of sliding_attention is 'linear'"),
    ("lfm3", {"rope_parameters": HALF_TURNED}, "partial_rotary_factor is 0.5"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
    ("t5", ANOTHER_GELU, "dense_act_fn is 'gelu', .* only 'gelu_new' with .*'gated-gelu'"),
    ("nanochat", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling is 'yarn'"),
    ("llama4_text", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling is 'yarn'"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi is False, .* only True"),
    ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, r"moe_topk is \[1, 2\], .* same number in all layers"),
    (
        "exaone4",
        {"sliding_window_pattern": "LLLG"},
        "sliding_window_pattern must be a whole number",
    ),
    ("granite_swa", {"layer_rope_theta": [1.0] * 3}, "layer_rope_theta is .* in 24"),
    ("glm4_moe", {"head_dim": 128, "n_group": 3}, "n_expert_groups must be a part of 128 experts"),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min is 0.5, .* only 1e-12"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax', .* only 'sigmoid'"),
    ("deepseek_v2", {"topk_method": "x"}, "topk_method is 'x', .* only 'greedy' or"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias is True, .* only False"),
    ("youtu", {"qk_rope_head_dim": 9}, "rotary_dim"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False, .* only True"),
    (
        "kimi_linear",
        {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [27]}},
        r"linear_attn_config is .*27.* layers 1 to 27, each in one of two lists",
    ),
    (
        "kimi_linear",
        {"linear_attn_config": {"kda_layers": [1, 2]}},
        r"linear_attn_config is .*\[1, 2\].* layers 1 to 27, each in one of two lists",
    ),
    ("kimi_linear", {"linear_attn_config": 5}, "linear_attn_config must be an object, not 5"),
    ("bailing_hybrid", {"kda_lower_bound": 5}, "kda_lower_bound is 5, .* below 0"),
    (
        "bailing_hybrid",
        {"kda_lower_bound": -1e308},
        r"kda_lower_bound is -1e\+308, .* from -1e\+09",
    ),
    ("bailing_hybrid", {"expert_swiglu_limit_list": [0, 7]}, r"_list is \[0, 7\], .* only None"),
    ("llama4_text", {"moe_layers": [48]}, r"moe_layers is \[48\], .* from 0 to 47"),
    ("bamba", {"time_step_limit": [0.1, 2.0]}, "time_step_limit is .* only None or .0.0, inf."),
    ("bamba", {"partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0, .* only 0.5"),
    ("bamba", {"attn_layer_indices": [32]}, "attn_layer_indices is .* layers from 0 to 31"),
    ("bamba", {"mamba_d_head": 63}, "mamba_d_head is 63, .* 128 of them in 8192 channels"),
    ("mamba", {"time_step_rank": "all"}, "time_step_rank must be a whole number .* not 'all'"),
    ("mamba", {"hidden_act": "relu"}, "hidden_act is 'relu', .* only 'silu'"),
    ("falcon_mamba", {"mixer_rms_eps": 0}, "mixer_rms_eps must be a positive number, not 0"),
    ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset must be .* from 0 to 7, not 8"),
    ("jamba", {"expert_layer_period": 1}, "expert_layer_offset must be .* from 0 to 0, not 1"),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate is True, .* only False with"),
    ("falcon_h1", {"key_multiplier": -1}, "key_multiplier must be a positive number, not -1"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias is True, .* only False"),
    ("granitemoehybrid", {"layer_types": ["conv"] * 32}, "layer_types is .* of mamba or linear"),
    ("nemotron_h", {"hybrid_override_pattern": "ME"}, "_pattern is 'ME', .* without experts"),
    ("nemotron_h", {"hybrid_override_pattern": "M" * 10_001}, "_pattern is .* list of 1 to"),
    ("nemotron_h", {"layers_block_type": ["mlp", "mamba"]}, "layers_block_type is .*mlp after"),
]


@pytest.mark.parametrize(("family", "key", "value"), QUOTED)
def test_a_value_that_the_decoder_does_not_compute_is_quoted(
    family: str, key: str, value: Any
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"config.json's {key} is {value!r}")):
        config_of(family, **{key: value})


@pytest.mark.parametrize(("family", "values", "message"), REFUSED)
def test_what_the_decoder_does_not_compute_is_refused_by_key_and_value(
    family: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        config_of(family, **values)


@pytest.mark.parametrize("wrong", [[1.0], "x", [1.0, 0], [10**400, 1.0], [True, 1.0], [None] * 2])
def test_a_wrong_factor_of_weights_is_refused(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"mlp_multipliers (is|must be) .* positive number"):
        DECODERS["falcon_h1"].adapted({"mlp_multipliers": wrong})


WRONG: list[Any] = [None, True, "x", [], ["x"], [[]], {"x": 1}, 0, -1, 1.5, math.nan, math.inf]
WRONG += [2**31, 10**400]
ROPE = ["rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "type"]
ROPE += ["beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale"]
ROPE += ["mscale_all_dim", "truncate", "partial_rotary_factor"]
YARN = {"type": "yarn", "original_max_position_embeddings": 512, "mscale": 1.0}
YARN |= {"mscale_all_dim": 0.5}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: list[dict[str, Any]] = [YARN, YARN | {"factor": 2.0}, {"type": "linear", "factor": 2.0}]
KINDS += [LLAMA3, {}]


@pytest.mark.parametrize("family", DECODERS)
def test_a_value_that_makes_no_sense_is_refused_and_nothing_worse(family: str) -> None:
    """Try every key that is read with every wrong type, with and without windows.

    Others that must be neutral are those of all.
    """
    read = DECODERS[family].options({})
    keys = {read.names.get(key, key) for key in read} | (NEUTRAL.keys() & {*read})
    switches: list[dict[str, Any]] = [{}]
    if "use_sliding_window" in keys:
        switches.append({"use_sliding_window": True})
    if family == "llama":
        keys |= NEUTRAL.keys()
    changes = [{key: wrong} for key in sorted(keys) for wrong in WRONG]
    if family in {"llama", "gpt_neox"}:
        changes += [
            {"rope_scaling": kind | {key: wrong}}
            for kind in KINDS
            for key in ROPE
            for wrong in WRONG
        ]
        changes += [{"rope_scaling": YARN, "max_position_embeddings": wrong} for wrong in WRONG]
    for change in changes:
        for switch in switches:
            with contextlib.suppress(UnsupportedError, ConfigError):
                config_of(family, **{**switch, **change})

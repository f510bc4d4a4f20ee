"""Tiny configurations of published decoders, which tests compare with transformers."""

from __future__ import annotations

from typing import Any

LENGTH = 96  # of a row
WINDOW = 12
_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = _SHAPE | {"intermediate_size": 96, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_MIXTURE = _GROUPED | {"tie_word_embeddings": False}
_GEMMA = _GROUPED | {"head_dim": 32}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _rope_by_layer_type(**kinds: dict[str, Any] | None) -> dict[str, Any]:
    return {"rope_parameters": kinds}


# Name: model_type, configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _SHAPE),
    "gpt_neox": ("gpt_neox", _SHAPE | {"intermediate_size": 96, "attention_dropout": 0.1}),
    "gpt_neox sequential": (
        "gpt_neox",
        _SHAPE
        | {"intermediate_size": 96, "use_parallel_residual": False, "attention_bias": False}
        | rope("linear", factor=2.0, partial_rotary_factor=0.5),
    ),
    "opt": ("opt", _SHAPE | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "llama": ("llama", _GROUPED | {"tie_word_embeddings": False}),
    "llama3": (
        "llama",
        _GROUPED
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}
        | rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "yarn": (
        "llama",
        _GROUPED
        | rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=1.5, mscale=1.5),
    ),
    "yarn with two weights": (
        "llama",
        _GROUPED
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            truncate=False,
            mscale=1.5,
            mscale_all_dim=0.5,
        ),
    ),
    "smollm3": ("smollm3", _GROUPED | {"no_rope_layer_interval": 2}),
    "mistral": ("mistral", _GROUPED | {"head_dim": 16, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", _GROUPED | _QWEN),
    "qwen3": ("qwen3", _GROUPED | {"head_dim": 32, "sliding_window": None}),
    "qwen3 with windows": (
        "qwen3",
        _GROUPED
        | {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "phi3": ("phi3", _GROUPED | {"sliding_window": WINDOW}),
    "phi3 partial": ("phi3", _GROUPED | rope("default", partial_rotary_factor=0.75)),
    "gemma": ("gemma", _GEMMA),
    "gemma2": (
        "gemma2",
        _GEMMA
        | {"query_pre_attn_scalar": 24, "sliding_window": WINDOW}
        | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 12.0},
    ),
    "gemma3": (
        "gemma3_text",
        _GEMMA
        | {"query_pre_attn_scalar": 24, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | _rope_by_layer_type(
            full_attention={"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
            sliding_attention={"rope_type": "default", "rope_theta": 100.0},
        ),
    ),
    "longrope": (
        "phi3",
        _GROUPED
        | {"original_max_position_embeddings": 16}
        | rope(
            "longrope",
            short_factor=[1.0 + i / 8 for i in range(6)],
            long_factor=[2.0 + i for i in range(6)],
            partial_rotary_factor=0.75,
        ),
    ),
    "granite": (
        "granite",
        _GROUPED
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3}
        | {"residual_multiplier": 0.7, "logits_scaling": 4.0, "attention_bias": True},
    ),
    "olmo2": ("olmo2", _GROUPED),
    "olmo3": (
        "olmo3",
        _GROUPED
        | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        | _rope_by_layer_type(
            full_attention={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
            | {"original_max_position_embeddings": 24},
            sliding_attention={"rope_type": "default", "rope_theta": 500.0},
        ),
    ),
    "phi": ("phi", _GROUPED | rope("default", partial_rotary_factor=0.5)),
    "stablelm": (
        "stablelm",
        _GROUPED | {"use_qkv_bias": True} | rope("default", partial_rotary_factor=0.25),
    ),
    "stablelm parallel": (
        "stablelm",
        _GROUPED | {"use_parallel_residual": True} | rope("default", partial_rotary_factor=0.25),
    ),
    "starcoder2": ("starcoder2", _GROUPED | {"sliding_window": WINDOW}),
    "ministral": (
        "ministral",
        _GROUPED
        | {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3": (
        "ministral3",
        _GROUPED
        | {"head_dim": 32}
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=24,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "falcon": ("falcon", _SHAPE),
    "falcon with groups": (
        "falcon",
        _SHAPE | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    ),
    "falcon with one norm": (
        "falcon",
        _SHAPE
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
        | {"bias": True},
    ),
    "bloom": ("bloom", _SHAPE),
    "gptj": ("gptj", _SHAPE | {"rotary_dim": 8}),
    "qwen3_moe": (
        "qwen3_moe",
        _MIXTURE
        | {"moe_intermediate_size": 32, "mlp_only_layers": [0], "head_dim": 32}
        | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_moe with shares of all experts": (
        "qwen3_moe",
        _MIXTURE | {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        "gpt_oss",
        _MIXTURE
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32}
        | {"sliding_window": WINDOW}
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            truncate=False,
            beta_slow=2.0,
            attention_factor=1.5,
        ),
    ),
}

WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
}
_MULTIPLIERS |= {"logits_scaling": 4.0}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
_EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
_LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-5}
_DELTA = {"full_attention_interval": 2, "head_dim": 32}
_DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 8}
_QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_QWEN_EXPERTS |= {"shared_expert_intermediate_size": 48}
# Name, whose first word is the model_type: what it adds.
_FURTHER: dict[str, dict[str, Any]] = {
    "internlm3": {"attention_bias": True, "mlp_bias": True, "head_dim": 32}
    | rope("dynamic", factor=6.0),
    "iquestcoder": {"head_dim": 32},
    "cwm": {"head_dim": 32, "bos_token_id": 0, "eos_token_id": [1, 2]} | WINDOWED,
    "seed_oss": {"head_dim": 32},
    "ernie4_5": {"head_dim": 32, "use_bias": True},
    "helium": {"head_dim": 16, "attention_bias": True},
    "glm": {"head_dim": 32, "eos_token_id": [1, 2, 9999]},
    "glm4": {"head_dim": 32, "eos_token_id": [1]},
    "exaone4": WINDOWED,
    "exaone4 without windows": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3} | WINDOWED,
    "hyperclovax": _MULTIPLIERS,
    "hyperclovax without norms after": _MULTIPLIERS | {"use_post_norm": False},
    "vaultgemma": {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW},
    "olmo": {"attention_bias": True},
    "gpt_bigcode": _GPT,
    "gpt_bigcode with many heads": _GPT | {"multi_query": False},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "window_size": WINDOW}
    | {"attention_types": [[["local", "global"], 1]]},
    "biogpt": {},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": LENGTH},
    "mpt with odd heads": {"d_model": 48, "n_layers": 1, "n_heads": 3, "max_seq_len": LENGTH},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
    "codegen": _GPT | {"rotary_dim": 8},
    "openai-gpt": _GPT,
    "mixtral": _EXPERTS | {"num_local_experts": 5, "sliding_window": WINDOW},
    "olmoe": _EXPERTS | {"num_experts": 5, "intermediate_size": 64},
    "flex_olmo": _EXPERTS | {"num_experts": 5, "norm_topk_prob": True},
    "granitemoe": _EXPERTS | _MULTIPLIERS | {"num_local_experts": 5},
    "mellum": _EXPERTS
    | {"num_experts": 5, "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"]}
    | WINDOWED,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_SPARSE: dict[str, Any] = _EXPERTS | {"moe_intermediate_size": 32}
_BALANCED: dict[str, Any] = _SPARSE | {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_BALANCED["routed_scaling_factor"] = 1.7
_FURTHER |= {
    "arcee": {"mlp_bias": True},
    "jais2": {"head_dim": 16},
    "nemotron": {"head_dim": 32},
    "nanochat": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
    "apertus": {"pad_token_id": 3},
    "persimmon": {},
    "persimmon without norms of heads": {"qk_layernorm": False},
    "phi with norms of heads": {"qk_layernorm": True} | rope("default", partial_rotary_factor=0.5),
    "cohere with norms of heads": {"use_qk_norm": True},
    "olmo clipped": {"clip_qkv": 0.9},
    "olmoe clipped": _EXPERTS | {"num_experts": 5, "intermediate_size": 64, "clip_qkv": 1.1},
    "mpt clipped": {"d_model": 64, "n_layers": 1, "n_heads": 4, "max_seq_len": LENGTH}
    | {"attn_config": {"clip_qkv": 0.8}},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": LENGTH}
    | {"attn_config": {"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 500.0}}
    | {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 5, "moe_top_k": 3}},
    "hunyuan_v1_dense": {"head_dim": 32} | rope("dynamic", factor=1.0, alpha=50.0),
    "hunyuan_v1_moe": _EXPERTS | {"head_dim": 32, "num_experts": 5, "moe_topk": 2},
    "granite_swa": _MULTIPLIERS | WINDOWED | {"layer_rope_theta": [100.0, 0]},
    "granite_swa with two thetas": _MULTIPLIERS | WINDOWED | {"layer_rope_theta": [100.0, 900.0]},
    "granitemoe_swa": _EXPERTS
    | _MULTIPLIERS
    | WINDOWED
    | {"num_local_experts": 5, "shared_intermediate_size": 96},
    "granitemoeshared": _EXPERTS
    | _MULTIPLIERS
    | {"num_local_experts": 5, "shared_intermediate_size": 96},
    "qwen2_moe": _SPARSE | {"num_experts": 5, "shared_expert_intermediate_size": 48},
    "qwen2_moe with windows": _SPARSE
    | {"num_experts": 5, "mlp_only_layers": [0], "use_sliding_window": True}
    | {"sliding_window": WINDOW, "max_window_layers": 2},
    "aria_text": _EXPERTS | {"moe_num_experts": 5, "moe_topk": 3},
    "glm4_moe": _BALANCED | {"use_qk_norm": True, "attention_bias": True, "head_dim": 32},
    "glm4_moe in groups": _BALANCED | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False},
    "dots1": _BALANCED | {"sliding_window": WINDOW, "max_window_layers": 1},
    "solar_open": _BALANCED | {"head_dim": 32, "first_k_dense_replace": 0},
    "hy_v3": _SPARSE | {"num_experts": 5, "head_dim": 32},
    "exaone_moe": _SPARSE | WINDOWED | {"num_experts": 5},
    "minimax_m2": _EXPERTS | {"num_local_experts": 5, "head_dim": 32, "rotary_dim": 16},
    "ernie4_5_moe": _SPARSE | {"moe_num_experts": 5, "moe_k": 2},
    "flint": _SPARSE | WINDOWED | {"num_experts": 5, "mlp_only_layers": [0], "head_dim": 32},
    "kolibri1": _SPARSE | WINDOWED | {"num_local_experts": 5, "head_dim": 32},
    "cohere2_moe": _EXPERTS
    | {"rms_norm_eps": None}
    | WINDOWED
    | {"num_experts": 5, "num_shared_experts": 2, "head_dim": 16, "logit_scale": 0.3}
    | {"mlp_layer_types": ["sparse", "dense"], "prefix_dense_intermediate_size": 48},
    "cohere2_moe with sigmoids": _EXPERTS
    | {"rms_norm_eps": None}
    | WINDOWED
    | {"num_experts": 5, "head_dim": 16, "expert_selection_fn": "sigmoid"}
    | {"mlp_layer_types": ["sparse", "dense"], "prefix_dense_sliding_window_pattern": 2},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "fuyu": {"text_config": _SHAPE | {"intermediate_size": 96} | {"model_type": "persimmon"}},
    "emu3": {"text_config": _GROUPED | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}},
    "gemma3 beside vision": {
        "text_config": _GEMMA | WINDOWED,
        "vision_config": _VISION | {"num_attention_heads": 2},
    },
    "phi4_multimodal": {"eos_token_id": 1, "vision_config": _VISION}
    | {"audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1}},
}
_MSCALES = {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": LENGTH}
_FURTHER |= {
    "phimoe": _EXPERTS | {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True},
    "phimoe with longrope": _EXPERTS
    | {"num_local_experts": 5, "sliding_window": WINDOW}
    | rope("longrope", short_factor=[1.5] * 8, long_factor=[2.0 + i for i in range(8)], **_MSCALES),
    "cohere_compass_text": WINDOWED
    | {"logit_scale": 0.3}
    | _rope_by_layer_type(
        full_attention=None,
        sliding_attention={"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]},
    ),
    "cohere_compass_text turned everywhere": WINDOWED
    | _rope_by_layer_type(
        **{
            kind: {"rope_type": "default", "rope_theta": theta, "mrope_section": [4, 2, 2]}
            for kind, theta in (("full_attention", 900.0), ("sliding_attention", 100.0))
        }
    ),
    "modernbert-decoder": {"local_attention": 2 * WINDOW, "pad_token_id": 0, "bos_token_id": 1}
    | {"norm_bias": True, "attention_bias": True, "global_attn_every_n_layers": 2},
}
_LATENTS: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
}
_LATENTS |= {"v_head_dim": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-4}
_YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7}
_YARN |= {"mscale_all_dim": 1.3}
_FURTHER |= {
    "deepseek_v2": _BALANCED | _LATENTS | {"q_lora_rank": None} | rope("yarn", **_YARN),
    "deepseek_v2 in groups": _BALANCED
    | _LATENTS
    | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    "deepseek_v3": _BALANCED | _LATENTS | {"n_group": 3, "topk_group": 2} | rope("yarn", **_YARN),
    "glm4_moe_lite": _BALANCED | _LATENTS | {"rope_interleave": False},
    "axk1": _BALANCED | _LATENTS | {"n_group": 1, "topk_group": 1},
    "minicpm3": _LATENTS | {"scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 32},
    "minicpm3 without scales": _LATENTS
    | {"v_head_dim": None, "scale_depth": None, "dim_model_base": None},
    "youtu": _LATENTS,
}
_KIMI: dict[str, Any] = _SPARSE | _LATENTS | {"num_local_experts": 6, "n_shared_experts": 2}
_KIMI |= {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
_LING = {key: value for key, value in _KIMI.items() if key != "q_lora_rank"}
_LING |= {"layer_group_size": 2, "head_dim": 24}
_FURTHER |= {
    "kimi_linear": _KIMI
    | {"layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_heads": 3, "linear_head_dim": 16},
    "kimi_linear with lists": _KIMI
    | {"q_lora_rank": None, "norm_topk_prob": False}
    | {
        "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 5}
        | {"head_dim": 8, "short_conv_kernel_size": 3}
    },
    "bailing_hybrid": _LING,
    "bailing_hybrid with any decays": _LING | {"kda_safe_gate": False, "first_k_dense_replace": 0},
}
_MAMBA2: dict[str, Any] = {"num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_state": 16}
_JAMBA: dict[str, Any] = _EXPERTS | {
    "num_hidden_layers": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
}
_JAMBA |= {"rms_norm_eps": 0.1}
_FALCON_H1: dict[str, Any] = _MAMBA2 | {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 96,
    "mamba_d_head": "auto",
}
_FALCON_H1 |= {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.3, "key_multiplier": 0.6}
_FALCON_H1 |= {"attention_in_multiplier": 1.4, "attention_out_multiplier": 0.8}
_FALCON_H1 |= {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.7, "mlp_multipliers": [0.9, 0.5]}
_NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2}
_NEMOTRON |= {"head_dim": 16}
_LLAMA4: dict[str, Any] = _EXPERTS | {"num_experts_per_tok": 1, "head_dim": 32}
_LLAMA4 |= {"intermediate_size_mlp": 48, "num_local_experts": 5, "no_rope_layer_interval": 2}
_FURTHER |= {
    "llama4_text": _LLAMA4 | {"moe_layers": [1]},
    "llama4_text without norms of heads": _LLAMA4 | {"use_qk_norm": False, "attention_bias": True},
    "llama4_text with two experts": _LLAMA4 | {"num_experts_per_tok": 2},
    "lfm2": _LFM2 | {"block_multiple_of": 32, "block_ffn_dim_multiplier": 1.3},
    "lfm2 with listed layers": _LFM2
    | {"layer_types": None, "full_attn_idxs": [1, 3], "conv_bias": True}
    | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    "lfm2_moe": _LFM2
    | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    | {"num_dense_layers": 1, "routed_scaling_factor": 1.3},
    "qwen3_5_text": _DELTA | {"attention_bias": True},
    "qwen3_5_moe_text": _DELTA | _QWEN_EXPERTS,
    "qwen3_next": _DELTA | _QWEN_EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_5": {"text_config": _GROUPED | _DELTA | {"head_dim": 16}, "vision_config": {"depth": 1}},
    "qwen3_5_moe": {
        "text_config": _GROUPED | _DELTA | _QWEN_EXPERTS,
        "vision_config": {"depth": 1},
    },
    # Queries as wide as values: transformers cuts the convolution into three equal parts.
    "olmo_hybrid": {"attention_bias": True, "linear_value_head_dim": 12},
    "olmo_hybrid without rotary": {"linear_allow_neg_eigval": False, "linear_num_key_heads": 2}
    | {"linear_value_head_dim": 12, "num_hidden_layers": 3}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "sliding_window": WINDOW,
        "head_dim": 16,
        "attention_bias": True,
    }
    | _rope_by_layer_type(
        full_attention={"rope_type": "proportional", "rope_theta": 900.0}
        | {"partial_rotary_factor": 0.5},
        sliding_attention={"rope_type": "default", "rope_theta": 100.0},
    ),
    "afmoe": _SPARSE
    | WINDOWED
    | {"num_experts": 6, "num_shared_experts": 2, "route_scale": 1.7, "mup_enabled": True}
    | {"head_dim": 32, "attention_bias": True},
    "falcon_h1": _FALCON_H1 | {"ssm_multipliers": [0.4, 0.3, 1.5, 0.6, 0.7]},
    "falcon_h1 with norms": _FALCON_H1
    | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mlp_bias": True}
    | {"mamba_d_ssm": None, "mamba_n_groups": 2, "tie_word_embeddings": True},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1], "mamba_n_groups": 2, "mlp_bias": True},
    "mamba": {"num_hidden_layers": 3, "state_size": 8, "time_step_rank": 5, "use_bias": True},
    "falcon_mamba": {"num_hidden_layers": 3, "mixer_rms_eps": 0.1, "use_conv_bias": False},
    "jamba": _JAMBA | {"num_experts": 5, "intermediate_size": 32, "expert_layer_offset": 0},
    "jamba without experts": _JAMBA
    | {"num_experts": 1, "mamba_proj_bias": True, "mamba_dt_rank": 3, "mamba_conv_bias": False},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "use_bias": True},
    "nemotron_h": _NEMOTRON | {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]},
    "nemotron_h with biases": _NEMOTRON
    | {"hybrid_override_pattern": "*M-", "use_bias": True, "mlp_bias": True, "expand": 3},
    "granitemoehybrid": _MAMBA2
    | _MULTIPLIERS
    | _EXPERTS
    | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 5}
    | {"shared_intermediate_size": 96, "mamba_proj_bias": True, "intermediate_size": 32},
    "granitemoehybrid without experts": _MAMBA2
    | _MULTIPLIERS
    | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0}
    | {"shared_intermediate_size": 96, "mamba_conv_bias": False},
    "granitemoehybrid without mamba": _MULTIPLIERS
    | {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"}
    | {"shared_intermediate_size": 96, "num_local_experts": 0},
    "llama4": {"text_config": _GROUPED | _LLAMA4, "vision_config": {"num_hidden_layers": 1}},
}
_EVERY_HEAD_ITS_OWN = {"biogpt", "codegen", "gpt_bigcode", "gpt_neo", "mpt", "openai-gpt"}
_EVERY_HEAD_ITS_OWN |= {"gpt_neox_japanese", "persimmon", "xglm", "modernbert-decoder"}


def _values(kind: str, more: dict[str, Any]) -> dict[str, Any]:
    shared = {"num_key_value_heads"} if kind in _EVERY_HEAD_ITS_OWN else set()
    shared |= {"intermediate_size"} if kind == "openai-gpt" else set()
    return {key: value for key, value in (_GROUPED | more).items() if key not in shared}


FAMILIES |= {
    name: (name.split()[0], _values(name.split()[0], more)) for name, more in _FURTHER.items()
}

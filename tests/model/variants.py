"""Every kind of decoder that a configuration describes, as changes of `make_config`.

Each has several features that do not hide one another, since exporting one takes seconds. Layers
that are alike are traced once.
"""

from __future__ import annotations

from typing import Any

from kvasir.model.configuration.parts import Latents, Projection, RopeScaling
from kvasir.model.configuration.recurrences import DeltaRule, Mamba, Mamba2, ShortConvolution

BIASES = {"qkv_bias": True, "output_bias": True, "feed_forward_bias": True}
GPT2 = {"position": "learned", "norm": "layernorm", "n_kv_head": 4, **BIASES}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {**GPT2, "feed_forward": "gelu", "tied_embeddings": False},
    "vaswani": {
        **GPT2,
        "n_layer": 1,
        "position": "sinusoidal",
        "norm_placement": "post",
        "feed_forward": "relu",
        "head_dim": 8,
    },
    "qwen": {
        "n_layer": 1,
        "qkv_bias": True,
        "n_kv_head": 1,
        "head_dim": 32,
        "norm_placement": "post",
        "tied_embeddings": False,
        "rope_theta": 1e6,
        "rope_scaling": RopeScaling(
            kind="yarn", factor=4.0, original_max_model_len=5, query_growth=0.5
        ),
    },
    "phi": {
        **GPT2,
        "n_layer": 1,
        "position": "rotary",
        "rotary_dim": 8,
        "parallel_residual": True,
        "tied_embeddings": False,
        "head_bias": True,
        "rope_scaling": RopeScaling(
            kind="longrope",
            factor=2.0,
            original_max_model_len=24,
            attention_factor=1.2,
            short_factors=(1.0,) * 4,
            long_factors=(1.0, 2.0, 3.0, 4.0),
        ),
    },
    "qwen3": {
        "qk_norm": True,
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_model_len=24),
        "layers_without_rotary": (0,),
    },
    "gemma": {
        "attention_softcap": 5.0,
        "logit_softcap": 3.0,
        "norm_placement": "both",
        "qk_norm": True,
        "feed_forward": "geglu_tanh",
        "embedding_scale": 6.9,
        "attention_scale": 0.3,
        "sliding_window": 5,
        "sliding_window_layers": (0,),
        "sliding_window_rope_theta": 50.0,
        "rope_scaling": RopeScaling(kind="linear", factor=4.0),
    },
    "olmo2": {
        "norm_placement": "output",
        "qk_norm": True,
        "qk_norm_across_heads": True,
        "qkv_clip": 0.7,
        "feed_forward": "xielu",
    },
    "bloom": {
        "n_layer": 1,
        "position": "alibi",
        "n_kv_head": 4,
        "norm": "layernorm",
        "embedding_norm": True,
        "feed_forward_bias": True,
        "head_bias": True,
        "head_projection": Projection(d_out=48, activation="gelu", bias=False, norm=True),
    },
    "relative": {
        "position": "relative",
        "n_kv_head": 1,
        "head_dim": 24,
        "feed_forward": "geglu",
        "output_bias": True,
    },
    "qwen3 mixture": {
        "d_model": 64,
        "n_experts": 5,
        "n_experts_per_token": 3,
        "d_expert": 32,
        "dense_layers": (0,),
        "qk_norm": True,
        "layers_without_qk_norm": (0,),
        "shares_scale_inputs": True,
    },
    "gpt-oss": {
        **BIASES,
        "d_model": 64,
        "n_experts": 4,
        "n_experts_per_token": 2,
        "d_expert": 32,
        "normalize_expert_shares": True,
        "feed_forward": "swiglu_clamped",
        "attention_sinks": True,
        "sliding_window": 5,
        "sliding_window_layers": (0,),
        "tied_embeddings": False,
    },
    "persimmon": {
        **GPT2,
        "n_layer": 1,
        "position": "rotary",
        "rotary_dim": 8,
        "qk_norm": True,
        "qk_norm_kind": "layernorm",
        "qk_norm_after_rotary": True,
        "feed_forward": "relu2",
    },
    "deepseek": {
        "n_kv_head": 1,
        "head_dim": 32,
        "rotary_dim": 16,
        "latents": Latents(rank=16, key_dim=8, value_dim=12, query_rank=24),
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_model_len=24),
        "output_bias": True,
    },
    "lfm2": {
        "n_layer": 4,
        "recurrence": ShortConvolution(kernel=3, bias=True),
        "recurrent_layers": (0, 2),
        "attention_gate": True,
        "attention_gate_by_head": True,
        "qk_norm": True,
    },
    "qwen3.5": {
        "recurrence": DeltaRule(
            kernel=4, n_head=4, n_key_head=2, key_dim=8, value_dim=24, doubled_rates=True
        ),
        "recurrent_layers": (0,),
        "attention_gate": True,
        "qkv_bias": True,
    },
    "kimi": {  # rates and decays of few numbers, and latents as they are
        "position": "none",
        "n_kv_head": 1,
        "head_dim": 24,
        "rotary_dim": 8,
        "latents": Latents(rank=16, key_dim=8, value_dim=12),
        "recurrence": DeltaRule(
            kernel=3,
            n_head=3,
            n_key_head=3,
            key_dim=8,
            value_dim=16,
            output_gate="sigmoid",
            decays_by_channel=True,
            rank=16,
        ),
        "recurrent_layers": (0,),
    },
    "ling": {
        "n_kv_head": 1,
        "head_dim": 32,
        "rotary_dim": 16,
        "latents": Latents(rank=16, key_dim=8, value_dim=12),
        "attention_gate": True,
        "attention_gate_by_head": True,
        "recurrence": DeltaRule(
            kernel=3,
            n_head=4,
            n_key_head=2,
            key_dim=24,
            value_dim=8,
            decays_by_channel=True,
            least_log_decay=-5.0,
        ),
        "recurrent_layers": (1,),
    },
    "bamba": {
        "n_layer": 3,
        "recurrence": Mamba2(kernel=3, n_head=4, head_dim=12, d_state=16, n_group=2, bias=True),
        "recurrent_layers": (0, 2),
        "rotary_dim": 8,
    },
    "falcon h1": {
        "recurrence": Mamba2(kernel=3, n_head=4, head_dim=12, d_state=16, normed=False),
        "recurrent_layers": (0, 1),
        "recurrence_beside_attention": True,
        "qk_norm": True,
    },
    "olmo hybrid": {
        "n_layer": 3,
        "norm_placement": "output_of_attention",
        "recurrence": DeltaRule(
            kernel=3, n_head=4, n_key_head=4, key_dim=8, value_dim=16, norm_eps=1e-4
        ),
        "recurrent_layers": (0, 2),
    },
    "mamba2": {
        "position": "none",
        "recurrence": Mamba2(kernel=3, n_head=4, head_dim=12, d_state=16, least_step=0.9),
        "recurrent_layers": (0, 1),
        "layers_without_feed_forward": (0, 1),
    },
    "mamba": {
        "position": "none",
        "recurrence": Mamba(kernel=3, d_inner=40, d_state=8, step_rank=5, bias=True),
        "recurrent_layers": (0, 1),
        "layers_without_feed_forward": (0, 1),
    },
    "jamba": {
        "position": "none",
        "recurrence": Mamba(kernel=4, d_inner=96, d_state=8, step_rank=6, inner_norm_eps=0.1),
        "recurrent_layers": (0,),
    },
    "without attention": {
        "position": "none",
        "recurrence": DeltaRule(kernel=2, n_head=2, n_key_head=2, key_dim=16, value_dim=8),
        "recurrent_layers": (0, 1),
    },
    "hunyuan mixture": {
        "d_model": 64,
        "n_experts": 6,
        "n_experts_per_token": 3,
        "d_expert": 32,
        "router": "sigmoid",
        "choice_bias": "scores",
        "n_expert_groups": 3,
        "n_groups_per_token": 2,
        "normalize_expert_shares": True,
        "expert_scale": 1.7,
        "d_shared_expert": 48,
        "shared_expert_gate": True,
        "qk_norm": True,
        "qk_norm_after_rotary": True,
    },
}

"""llama.cpp's architectures: the families that they are, and the names of their keys and tensors.

A new one is a line in ARCHITECTURES and what else it needs in the other tables.
"""

from __future__ import annotations

from typing import Any

_SAME = (
    *("llama", "smollm3", "qwen2", "qwen3", "phi3", "gpt2", "gemma", "gemma2", "granite", "olmo"),
    *("olmo2", "stablelm", "starcoder2", "glm4", "exaone4", "cohere2", "seed_oss", "ernie4_5"),
    *("nemotron", "arcee", "olmoe", "dots1", "lfm2"),
)
ARCHITECTURES = {  # general.architecture: the model_type of its config.json
    **{name: name for name in _SAME},
    "gemma3": "gemma3_text",
    "gptneox": "gpt_neox",
    "phi2": "phi",
    "command-r": "cohere",
    "hunyuan-dense": "hunyuan_v1_dense",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "granitemoe": "granitemoeshared",
    "gpt-oss": "gpt_oss",
    "glm4moe": "glm4_moe",
    "hunyuan-moe": "hunyuan_v1_moe",
    "minimax-m2": "minimax_m2",
    "lfm2moe": "lfm2_moe",
}
# Whose converter makes neighbours of the two channels of a rotary pair.
NEIGHBOURS = {"llama", "smollm3", "granite", "granitemoe", "arcee", "olmo"}
RENAMED = {  # our module and an architecture: its name there
    **{
        ("blocks.*.feed_forward_norm", kind): "post_attention_norm"
        for kind in ("seed_oss", "gpt-oss", "glm4moe")
    },
    **{("norm", kind): "token_embd_norm" for kind in ("lfm2", "lfm2moe")},
}
REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
}
PATTERN = "attention.sliding_window_pattern"
CLAMP = "attention.clamp_kqv"
EXPERT_WIDTH, SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
OF_SOME = {  # keys whose defaults are those of their families
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window_pattern": PATTERN,
    "clip_qkv": CLAMP,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "expert_count"),
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": EXPERT_WIDTH,
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), SHARED_WIDTH),
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), "leading_dense_block_count"),
    "conv_L_cache": "shortconv.l_cache",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
KEYS = REQUIRED | OPTIONAL | OF_SOME
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
# The last layer of each has no window.
PERIODS = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "exaone4": 4, "cohere2": 4, "gpt-oss": 2}
# Keys that are read elsewhere, or that change nothing: tensors tell the size of the vocabulary.
KNOWN = (
    *("attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.finetuned"),
    *("vocab_size", "expert_used_count", "pooling_type", "tensor_data_layout", *EPSILONS),
)
# Keys that change what is computed, and the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "nextn_predict_layers": (0,),
    CLAMP: (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0,),
    "attention.temperature_length": (0,),
}
MODULES: dict[str, tuple[str, ...]] = {  # our module: tensors, where there is one, and several
    "embedding": ("token_embd",),
    "position_embedding": ("position_embd",),
    "norm": ("output_norm",),
    "head": ("output",),
    "blocks.*.attention_norm": ("attn_norm",),
    "blocks.*.attention.qkv": ("attn_qkv", "attn_q", "attn_k", "attn_v"),
    "blocks.*.attention.query_norm": ("attn_q_norm",),
    "blocks.*.attention.key_norm": ("attn_k_norm",),
    "blocks.*.attention.output": ("attn_output",),
    "blocks.*.attention.sinks": ("attn_sinks",),
    "blocks.*.recurrence.input": ("shortconv.in_proj",),
    "blocks.*.recurrence.convolution": ("shortconv.conv",),
    "blocks.*.recurrence.output": ("shortconv.out_proj",),
    "blocks.*.attention_output_norm": ("post_attention_norm",),
    "blocks.*.feed_forward_norm": ("ffn_norm",),
    "blocks.*.feed_forward.up": ("ffn_up", "ffn_gate", "ffn_up"),
    "blocks.*.feed_forward.down": ("ffn_down",),
    "blocks.*.feed_forward.router": ("ffn_gate_inp",),
    "blocks.*.feed_forward.choice_bias": ("exp_probs_b",),
    "blocks.*.feed_forward.expert_up": ("ffn_gate_exps", "ffn_up_exps"),
    "blocks.*.feed_forward.expert_down": ("ffn_down_exps",),
    "blocks.*.feed_forward.shared.up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "blocks.*.feed_forward.shared.down": ("ffn_down_shexp",),
    "blocks.*.feed_forward.shared_gate": ("ffn_gate_inp_shexp",),
    "blocks.*.feed_forward_output_norm": ("post_ffw_norm",),
}

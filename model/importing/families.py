"""The published decoders that `kvasir import` reads, a table each; keys, defaults and names are transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from model.importing.family import (
    Family,
    Options,
    activation,
    gemma2_window_layers,
    head_dim,
    key_value_heads,
    layers_without_rotary,
    number,
    qwen_window_layers,
    rope_scaling,
    rope_theta,
    rotary_dim,
    smollm3_window_layers,
    unprojected_width,
    unscaled_rope,
    whole,
    whole_heads,
    windows,
    with_usual_names,
)
from model.importing.tensors import (
    as_is,
    interleaved_by_head,
    plus_one,
    repeated_for_heads,
    stacked,
    transposed,
    without_rows,
)

_LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "max_model_len": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_LLAMA_DERIVED: dict[str, Callable[[Options], Any]] = {
    "n_kv_head": key_value_heads,
    "head_dim": head_dim,
    "feed_forward": activation("hidden_act", gated=True),
    "rope_theta": rope_theta,
    "rope_scaling": rope_scaling,
    "rotary_dim": whole_heads,
}
_LLAMA_MODULES = {
    "embedding": as_is("embed_tokens"),
    "norm": as_is("norm"),
    "head": as_is("lm_head"),
    "blocks.*.attention_norm": as_is("layers.*.input_layernorm"),
    "blocks.*.attention.qkv": stacked(*(f"layers.*.self_attn.{part}_proj" for part in "qkv")),
    "blocks.*.attention.output": as_is("layers.*.self_attn.o_proj"),
    "blocks.*.feed_forward_norm": as_is("layers.*.post_attention_layernorm"),
    "blocks.*.feed_forward.up": stacked("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
    "blocks.*.feed_forward.down": as_is("layers.*.mlp.down_proj"),
}
_BIASES = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_MLP_BIAS = {"feed_forward_bias": "mlp_bias"}
_ALL_BIASES = dict.fromkeys(("qkv_bias", "output_bias", "feed_forward_bias"), True)

_QWEN2_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GEMMA_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA_DERIVED = {
    name: derive for name, derive in _LLAMA_DERIVED.items() if name != "feed_forward"
} | {"embedding_scale": lambda options: math.sqrt(whole(options, "hidden_size"))}
_GEMMA_MODULES = _LLAMA_MODULES | {
    "norm": plus_one("norm"),
    "blocks.*.attention_norm": plus_one("layers.*.input_layernorm"),
    "blocks.*.feed_forward_norm": plus_one("layers.*.post_attention_layernorm"),
}
_GELU_TANH = (
    "gelu",
    "gelu_pytorch_tanh",
    None,
)  # "gelu" in Gemma's files has always meant the approximation

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        title="GPT-2",
        architectures=("GPT2LMHeadModel", "GPT2Model"),
        prefixes=("transformer.",),
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        fields={
            "vocab_size": "vocab_size",
            "max_model_len": "n_positions",
            "n_layer": "n_layer",
            "n_head": "n_head",
            "n_kv_head": "n_head",
            "d_model": "n_embd",
            "norm_eps": "layer_norm_epsilon",
            "tied_embeddings": "tie_word_embeddings",
        },
        fixed={"position": "learned", "norm": "layernorm", **_ALL_BIASES},
        derived={
            "head_dim": lambda options: whole(options, "n_embd") // whole(options, "n_head"),
            "d_ff": lambda options: (
                4 * whole(options, "n_embd") if options["n_inner"] is None else options["n_inner"]
            ),
            "feed_forward": activation("activation_function", gated=False),
            "attention_scale": lambda options: None if options["scale_attn_weights"] else 1.0,
        },
        only={"scale_attn_by_inverse_layer_idx": (False,)},
        modules={
            "embedding": as_is("wte"),
            "position_embedding": as_is("wpe"),
            "norm": as_is("ln_f"),
            "head": as_is("lm_head"),
            "blocks.*.attention_norm": as_is("h.*.ln_1"),
            "blocks.*.attention.qkv": transposed("h.*.attn.c_attn"),
            "blocks.*.attention.output": transposed("h.*.attn.c_proj"),
            "blocks.*.feed_forward_norm": as_is("h.*.ln_2"),
            "blocks.*.feed_forward.up": transposed("h.*.mlp.c_fc"),
            "blocks.*.feed_forward.down": transposed("h.*.mlp.c_proj"),
        },
    ),
    "gpt_neox": Family(
        title="GPT-NeoX",
        architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
        prefixes=("gpt_neox.",),
        former_names={"embed_out": "lm_head"},
        defaults={
            "vocab_size": 50432,
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "attention_bias": True,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        fields=_LLAMA_FIELDS
        | _BIASES
        | {
            "n_kv_head": "num_attention_heads",
            "norm_eps": "layer_norm_eps",
            "parallel_residual": "use_parallel_residual",
        },
        fixed={"norm": "layernorm", "feed_forward_bias": True},
        derived={
            "head_dim": head_dim,
            "feed_forward": activation("hidden_act", gated=False),
            "rope_theta": lambda options: rope_theta(with_usual_names(options)),
            "rope_scaling": lambda options: rope_scaling(with_usual_names(options)),
            "rotary_dim": lambda options: rotary_dim(with_usual_names(options)),
        },
        modules={
            "embedding": as_is("embed_in"),
            "norm": as_is("final_layer_norm"),
            "head": as_is("lm_head"),
            "blocks.*.attention_norm": as_is("layers.*.input_layernorm"),
            "blocks.*.attention.qkv": interleaved_by_head("layers.*.attention.query_key_value"),
            "blocks.*.attention.output": as_is("layers.*.attention.dense"),
            "blocks.*.feed_forward_norm": as_is("layers.*.post_attention_layernorm"),
            "blocks.*.feed_forward.up": as_is("layers.*.mlp.dense_h_to_4h"),
            "blocks.*.feed_forward.down": as_is("layers.*.mlp.dense_4h_to_h"),
        },
    ),
    "opt": Family(
        title="OPT",
        architectures=("OPTForCausalLM", "OPTModel"),
        prefixes=("model.decoder.", "decoder."),
        defaults={
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "activation_function": "relu",
            "enable_bias": True,
            "word_embed_proj_dim": None,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
        },
        fields={
            "vocab_size": "vocab_size",
            "max_model_len": "max_position_embeddings",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_kv_head": "num_attention_heads",
            "d_ff": "ffn_dim",
            "tied_embeddings": "tie_word_embeddings",
            "qkv_bias": "enable_bias",
            "output_bias": "enable_bias",
            "feed_forward_bias": "enable_bias",
        },
        fixed={"position": "learned", "norm": "layernorm", "norm_eps": 1e-5},
        derived={
            "d_model": unprojected_width,
            "head_dim": head_dim,
            "feed_forward": activation("activation_function", gated=False),
        },
        only={
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
        },
        modules={
            "embedding": as_is("embed_tokens"),
            "position_embedding": without_rows("embed_positions", 2),
            "norm": as_is("final_layer_norm"),
            "head": as_is("lm_head"),
            "blocks.*.attention_norm": as_is("layers.*.self_attn_layer_norm"),
            "blocks.*.attention.qkv": stacked(
                *(f"layers.*.self_attn.{part}_proj" for part in "qkv")
            ),
            "blocks.*.attention.output": as_is("layers.*.self_attn.out_proj"),
            "blocks.*.feed_forward_norm": as_is("layers.*.final_layer_norm"),
            "blocks.*.feed_forward.up": as_is("layers.*.fc1"),
            "blocks.*.feed_forward.down": as_is("layers.*.fc2"),
        },
    ),
    "llama": Family(
        title="Llama",
        architectures=("LlamaForCausalLM", "LlamaModel"),
        defaults=_LLAMA_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
        fields=_LLAMA_FIELDS | _BIASES | _MLP_BIAS,
        derived=_LLAMA_DERIVED,
        modules=_LLAMA_MODULES,
    ),
    "smollm3": Family(
        title="SmolLM3",
        architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        fields=_LLAMA_FIELDS | _BIASES | _MLP_BIAS,
        derived=_LLAMA_DERIVED
        | {"layers_without_rotary": layers_without_rotary, **windows(smollm3_window_layers)},
        modules=_LLAMA_MODULES,
    ),
    "mistral": Family(
        title="Mistral",
        architectures=("MistralForCausalLM", "MistralModel"),
        defaults=_LLAMA_DEFAULTS
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        fields=_LLAMA_FIELDS | {"sliding_window": "sliding_window"},
        derived=_LLAMA_DERIVED,
        modules=_LLAMA_MODULES,
    ),
    "qwen2": Family(
        title="Qwen2",
        architectures=("Qwen2ForCausalLM", "Qwen2Model"),
        defaults=_QWEN2_DEFAULTS,
        fields=_LLAMA_FIELDS,
        fixed={"qkv_bias": True},
        derived=_LLAMA_DERIVED | windows(qwen_window_layers),
        modules=_LLAMA_MODULES,
    ),
    "qwen3": Family(
        title="Qwen3",
        architectures=("Qwen3ForCausalLM", "Qwen3Model"),
        defaults=_QWEN2_DEFAULTS | {"head_dim": 128, "attention_bias": False},
        fields=_LLAMA_FIELDS | _BIASES,
        fixed={"qk_norm": True},
        derived=_LLAMA_DERIVED | windows(qwen_window_layers),
        modules=_LLAMA_MODULES
        | {
            "blocks.*.attention.query_norm": repeated_for_heads("layers.*.self_attn.q_norm"),
            "blocks.*.attention.key_norm": repeated_for_heads("layers.*.self_attn.k_norm"),
        },
    ),
    "phi3": Family(
        title="Phi-3",
        architectures=("Phi3ForCausalLM", "Phi3Model"),
        defaults=_LLAMA_DEFAULTS
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
            "eos_token_id": 32000,
        },
        fields=_LLAMA_FIELDS | {"sliding_window": "sliding_window"},
        derived=_LLAMA_DERIVED | {"rope_scaling": unscaled_rope, "rotary_dim": rotary_dim},
        modules=_LLAMA_MODULES
        | {
            "blocks.*.attention.qkv": as_is("layers.*.self_attn.qkv_proj"),
            "blocks.*.feed_forward.up": as_is("layers.*.mlp.gate_up_proj"),
        },
    ),
    "gemma": Family(
        title="Gemma",
        architectures=("GemmaForCausalLM", "GemmaModel"),
        defaults=_GEMMA_DEFAULTS,
        fields=_LLAMA_FIELDS | _BIASES,
        fixed={"feed_forward": "geglu_tanh"},
        derived=_GEMMA_DERIVED,
        only={"hidden_act": _GELU_TANH, "hidden_activation": _GELU_TANH},
        modules=_GEMMA_MODULES,
    ),
    "gemma2": Family(
        title="Gemma 2",
        architectures=("Gemma2ForCausalLM", "Gemma2Model"),
        defaults=_GEMMA_DEFAULTS
        | {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": None,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        fields=_LLAMA_FIELDS
        | _BIASES
        | {
            "attention_softcap": "attn_logit_softcapping",
            "logit_softcap": "final_logit_softcapping",
        },
        fixed={"norm_placement": "both"},
        derived=_GEMMA_DERIVED
        | {
            "feed_forward": activation("hidden_activation", gated=True),
            "attention_scale": lambda options: number(options, "query_pre_attn_scalar") ** -0.5,
            **windows(gemma2_window_layers),
        },
        modules=_GEMMA_MODULES
        | {
            "blocks.*.attention_output_norm": plus_one("layers.*.post_attention_layernorm"),
            "blocks.*.feed_forward_norm": plus_one("layers.*.pre_feedforward_layernorm"),
            "blocks.*.feed_forward_output_norm": plus_one("layers.*.post_feedforward_layernorm"),
        },
    ),
}

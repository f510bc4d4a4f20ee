"""The published decoders that Kvasir reads.

To add one, add a `Family` to FAMILIES; its fields say what belongs there. Keys, defaults and tensor
names are those of Hugging Face transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvasir.model.importing.families.family import Family, Options, layers_without_rotary, refuse
from kvasir.model.importing.tensors import (
    Source,
    interleaved_by_head,
    of_experts,
    pairs_apart,
    plus_one,
    repeated_for_heads,
    split_by_head,
    stacked,
    transposed,
    transposed_experts,
    without_rows,
)

_ROPE: dict[str, Any] = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None}
_ROPE |= {"original_max_position_embeddings": None}
_LLAMA = _ROPE | {"hidden_act": "silu", "head_dim": None, "rms_norm_eps": 1e-6}
_LLAMA |= {"tie_word_embeddings": False}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_ALL_BIASES = dict.fromkeys(("qkv_bias", "output_bias", "feed_forward_bias"), True)
_QKV = stacked(*(f"layers.*.self_attn.{part}_proj" for part in "qkv"))
_LLAMA_MODULES: dict[str, str | Source] = {
    "embedding": "embed_tokens",
    "norm": "norm",
    "head": "lm_head",
    "blocks.*.attention_norm": "layers.*.input_layernorm",
    "blocks.*.attention.qkv": _QKV,
    "blocks.*.attention.output": "layers.*.self_attn.o_proj",
    "blocks.*.feed_forward_norm": "layers.*.post_attention_layernorm",
    "blocks.*.feed_forward.up": stacked("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
    "blocks.*.feed_forward.down": "layers.*.mlp.down_proj",
}

# Of tensors, alone or within a model that also sees images.
_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_WINDOWS = {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
_QWEN = _LLAMA | _WINDOWS | {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA = _LLAMA | {"head_dim": 256, "tie_word_embeddings": True, "attention_bias": False}
_GEMMA_FIELDS: dict[str, Any] = {
    "embedding_scale": lambda options: math.sqrt(options.whole("hidden_size"))
}
_GEMMA_MODULES = _LLAMA_MODULES | {
    "norm": plus_one("norm"),
    "blocks.*.attention_norm": plus_one("layers.*.input_layernorm"),
    "blocks.*.feed_forward_norm": plus_one("layers.*.post_attention_layernorm"),
}
_GEMMA2_MODULES = _GEMMA_MODULES | {
    "blocks.*.attention_output_norm": plus_one("layers.*.post_attention_layernorm"),
    "blocks.*.feed_forward_norm": plus_one("layers.*.pre_feedforward_layernorm"),
    "blocks.*.feed_forward_output_norm": plus_one("layers.*.post_feedforward_layernorm"),
}
_GEMMA_GELU = ("gelu", "gelu_pytorch_tanh", None)  # in Gemma's files "gelu" means the approximation


_GRANITE = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE_FIELDS: dict[str, Any] = {
    "embedding_scale": lambda options: options.number("embedding_multiplier"),
    "attention_scale": lambda options: options.number("attention_multiplier"),
}
_GRANITE_SCALES: dict[str, Callable[[Options], float]] = {
    "blocks.*.attention.output": lambda options: options.number("residual_multiplier"),
    "blocks.*.feed_forward.down": lambda options: options.number("residual_multiplier"),
    "norm": lambda options: 1.0 / options.number("logits_scaling"),
}
_OLMO_FIELDS = {"norm_placement": "output", "qk_norm": True, "qk_norm_across_heads": True}
_OLMO_MODULES = {
    name: source for name, source in _LLAMA_MODULES.items() if not name.endswith("_norm")
} | {
    "blocks.*.attention.query_norm": split_by_head("layers.*.self_attn.q_norm"),
    "blocks.*.attention.key_norm": split_by_head("layers.*.self_attn.k_norm"),
    "blocks.*.attention_output_norm": "layers.*.post_attention_layernorm",
    "blocks.*.feed_forward_output_norm": "layers.*.post_feedforward_layernorm",
}
_QWEN3_NORMS = {
    f"blocks.*.attention.{name}_norm": repeated_for_heads(f"layers.*.self_attn.{name[0]}_norm")
    for name in ("query", "key")
}
_FALCON_MODULES: dict[str, str | Source] = {
    "embedding": "word_embeddings",
    "norm": "ln_f",
    "head": "lm_head",
    "blocks.*.attention.qkv": interleaved_by_head("h.*.self_attention.query_key_value"),
    "blocks.*.attention.output": "h.*.self_attention.dense",
    "blocks.*.feed_forward.up": "h.*.mlp.dense_h_to_4h",
    "blocks.*.feed_forward.down": "h.*.mlp.dense_4h_to_h",
}


def _qwen_windows(options: Options) -> range:
    return range(options.whole("max_window_layers", least=0), options.whole("num_hidden_layers"))


def _granite_position(options: Options) -> str:
    """Return the positions of a dense Granite 4; refuse its other layers."""
    if options["num_local_experts"] != 0:
        raise refuse("num_local_experts", options["num_local_experts"], "only 0")
    kinds = options["layer_types"]
    if not isinstance(kinds, list) or not all(
        kind in ("attention", "full_attention") for kind in kinds
    ):
        raise refuse("layer_types", kinds, "only layers of attention")
    if options["position_embedding_type"] not in ("rope", "nope", None):
        raise refuse("position_embedding_type", options["position_embedding_type"], "only 'rope'")
    return "rotary" if options["position_embedding_type"] == "rope" else "none"


def _falcon_kv_heads(options: Options) -> int:
    if options["multi_query"] and not options["new_decoder_architecture"]:
        return 1
    grouped = options["num_key_value_heads"] is not None
    return options.whole(f"num_{'key_value' if grouped else 'attention'}_heads")


def _gptj_rotary_dim(options: Options) -> int | None:
    turned = options.whole("rotary_dim")
    head_dim = options.whole("hidden_size") // options.whole("num_attention_heads")
    return None if turned == head_dim else turned


def _gemma3_windows(options: Options) -> list[int]:
    keys = ("_sliding_window_pattern", "sliding_window_pattern")
    every = next((options.whole(key) for key in keys if options[key]), 6)
    if options["use_bidirectional_attention"]:  # half of it on either side
        options["sliding_window"] = options.whole("sliding_window") // 2 + 1
    return [i for i in range(options.whole("num_hidden_layers")) if (i + 1) % every]


def _four_times(options: Options) -> Any:
    inner = options["intermediate_size"]
    return 4 * options.whole("hidden_size") if inner is None else inner


def _opt_width(options: Options) -> int:
    width, projected = options.whole("hidden_size"), options["word_embed_proj_dim"]
    if projected not in (None, width):
        raise refuse("word_embed_proj_dim", projected, f"only hidden_size, {width} (opt-350m)")
    return width


def _n_experts(options: Options) -> int:
    named = options["num_local_experts"] is None
    return options.whole("num_experts" if named else "num_local_experts")


def _dense_layers(options: Options) -> tuple[int, ...]:
    step, listed = options.whole("decoder_sparse_step"), options["mlp_only_layers"] or []
    layers = range(options.whole("num_hidden_layers"))
    if not isinstance(listed, list) or not all(layer in layers for layer in listed):
        raise refuse("mlp_only_layers", listed, f"a list of layers from 0 to {layers[-1]}")
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step)


# fmt: off
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        title="GPT-2", architectures=("GPT2LMHeadModel", "GPT2Model"),
        shape=(50257, 768, None, 12, 12, None, 1024), tokens=(50256, 50256),
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "scale_attn_weights": True,
                  "tie_word_embeddings": True},
        names={"hidden_size": "n_embd", "intermediate_size": "n_inner",
               "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
               "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
               "rms_norm_eps": "layer_norm_epsilon"},
        only={"scale_attn_by_inverse_layer_idx": (False,)},
        fields=_ALL_BIASES | {
            "position": "learned", "norm": "layernorm", "d_ff": _four_times,
            "attention_scale": lambda options: None if options["scale_attn_weights"] else 1.0},
        gated=False, prefixes=("transformer.",),
        modules={
            "embedding": "wte", "position_embedding": "wpe", "norm": "ln_f", "head": "lm_head",
            "blocks.*.attention_norm": "h.*.ln_1", "blocks.*.feed_forward_norm": "h.*.ln_2",
            "blocks.*.attention.qkv": transposed("h.*.attn.c_attn"),
            "blocks.*.attention.output": transposed("h.*.attn.c_proj"),
            "blocks.*.feed_forward.up": transposed("h.*.mlp.c_fc"),
            "blocks.*.feed_forward.down": transposed("h.*.mlp.c_proj"),
        },
    ),
    "gpt_neox": Family(
        title="GPT-NeoX", architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
        shape=(50432, 6144, 24576, 44, 64, None, 2048), tokens=(0, 2),
        defaults=_ROPE | {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_bias": True,
                          "use_parallel_residual": True, "partial_rotary_factor": 0.25,
                          "tie_word_embeddings": False},
        names={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base",
               "partial_rotary_factor": "rotary_pct"},
        fields={"norm": "layernorm", "feed_forward_bias": True},
        gated=False, prefixes=("gpt_neox.",), former_names={"embed_out": "lm_head"},
        modules={
            "embedding": "embed_in", "norm": "final_layer_norm", "head": "lm_head",
            "blocks.*.attention_norm": "layers.*.input_layernorm",
            "blocks.*.attention.qkv": interleaved_by_head("layers.*.attention.query_key_value"),
            "blocks.*.attention.output": "layers.*.attention.dense",
            "blocks.*.feed_forward_norm": "layers.*.post_attention_layernorm",
            "blocks.*.feed_forward.up": "layers.*.mlp.dense_h_to_4h",
            "blocks.*.feed_forward.down": "layers.*.mlp.dense_4h_to_h",
        },
    ),
    "opt": Family(
        title="OPT", architectures=("OPTForCausalLM", "OPTModel"),
        shape=(50272, 768, 3072, 12, 12, None, 2048), tokens=(2, 2),
        defaults={"hidden_act": "relu", "attention_bias": True, "mlp_bias": True,
                  "word_embed_proj_dim": None, "tie_word_embeddings": True},
        names={"intermediate_size": "ffn_dim", "hidden_act": "activation_function",
               "attention_bias": "enable_bias", "mlp_bias": "enable_bias"},
        only={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,),
              "layer_norm_elementwise_affine": (True,)},
        fields={"position": "learned", "norm": "layernorm", "norm_eps": 1e-5,
                "d_model": _opt_width},
        gated=False, prefixes=("model.decoder.", "decoder."),
        modules={
            "embedding": "embed_tokens",
            "position_embedding": without_rows("embed_positions", 2),
            "norm": "final_layer_norm", "head": "lm_head",
            "blocks.*.attention_norm": "layers.*.self_attn_layer_norm",
            "blocks.*.attention.qkv": _QKV,
            "blocks.*.attention.output": "layers.*.self_attn.out_proj",
            "blocks.*.feed_forward_norm": "layers.*.final_layer_norm",
            "blocks.*.feed_forward.up": "layers.*.fc1",
            "blocks.*.feed_forward.down": "layers.*.fc2",
        },
    ),
    "llama": Family(
        title="Llama", architectures=("LlamaForCausalLM", "LlamaModel"),
        shape=(32000, 4096, 11008, 32, 32, None, 2048), tokens=(1, 2),
        defaults=_LLAMA | _BIASES,
        modules=_LLAMA_MODULES,
    ),
    "smollm3": Family(
        title="SmolLM3", architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
        shape=(128256, 2048, 11008, 36, 16, 4, 32768), tokens=(128000, 128001),
        defaults=_LLAMA | _BIASES | _WINDOWS | {
            "rope_theta": 2000000.0, "tie_word_embeddings": True,
            "no_rope_layers": None, "no_rope_layer_interval": 4},
        fields={"layers_without_rotary": layers_without_rotary},
        windowed=layers_without_rotary,
        modules=_LLAMA_MODULES,
    ),
    "mistral": Family(
        title="Mistral", architectures=("MistralForCausalLM", "MistralModel"),
        shape=(32000, 4096, 14336, 32, 32, 8, 131072), tokens=(1, 2),
        defaults=_LLAMA | {"sliding_window": 4096},
        prefixes=_PREFIXES,
        modules=_LLAMA_MODULES,
    ),
    "qwen2": Family(
        title="Qwen2", architectures=("Qwen2ForCausalLM", "Qwen2Model"),
        shape=(151936, 4096, 22016, 32, 32, 32, 32768), tokens=(None, None),
        defaults=_QWEN,
        fields={"qkv_bias": True},
        windowed=_qwen_windows,
        modules=_LLAMA_MODULES,
    ),
    "qwen3": Family(
        title="Qwen3", architectures=("Qwen3ForCausalLM", "Qwen3Model"),
        shape=(151936, 4096, 22016, 32, 32, 32, 32768), tokens=(None, None),
        defaults=_QWEN | {"head_dim": 128, "attention_bias": False},
        fields={"qk_norm": True},
        windowed=_qwen_windows,
        modules=_LLAMA_MODULES | _QWEN3_NORMS,
    ),
    "phi3": Family(
        title="Phi-3", architectures=("Phi3ForCausalLM", "Phi3Model"),
        shape=(32064, 3072, 8192, 32, 32, None, 4096), tokens=(1, 32000),
        defaults=_LLAMA | {
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "sliding_window": None},
        scalings=("longrope",),
        modules=_LLAMA_MODULES | {
            "blocks.*.attention.qkv": "layers.*.self_attn.qkv_proj",
            "blocks.*.feed_forward.up": "layers.*.mlp.gate_up_proj",
        },
    ),
    "gemma": Family(
        title="Gemma", architectures=("GemmaForCausalLM", "GemmaModel"),
        shape=(256000, 3072, 24576, 28, 16, 16, 8192), tokens=(2, 1),
        defaults=_GEMMA,
        only={"hidden_act": _GEMMA_GELU, "hidden_activation": _GEMMA_GELU},
        fields=_GEMMA_FIELDS | {"feed_forward": "geglu_tanh"},
        modules=_GEMMA_MODULES,
    ),
    "gemma2": Family(
        title="Gemma 2", architectures=("Gemma2ForCausalLM", "Gemma2Model"),
        shape=(256000, 2304, 9216, 26, 8, 4, 8192), tokens=(2, 1),
        defaults=_GEMMA | {
            "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
            "sliding_window": 4096, "layer_types": None,
            "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        names={"hidden_act": "hidden_activation"},
        fields=_GEMMA_FIELDS | {
            "norm_placement": "both",
            "attention_scale": lambda options: options.number("query_pre_attn_scalar") ** -0.5},
        windowed=lambda options: range(0, options.whole("num_hidden_layers"), 2),
        modules=_GEMMA2_MODULES,
    ),
    "gemma3_text": Family(
        title="Gemma 3", architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
        shape=(262208, 2304, 9216, 26, 8, 4, 131072), tokens=(2, 1),
        defaults=_GEMMA | {
            "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "sliding_window": 4096, "layer_types": None,
            "sliding_window_pattern": None, "_sliding_window_pattern": None,
            "use_bidirectional_attention": False,
            "final_logit_softcapping": None, "attn_logit_softcapping": None},
        names={"hidden_act": "hidden_activation"},
        fields=_GEMMA_FIELDS | {
            "norm_placement": "both", "qk_norm": True,
            "causal": lambda options: not options["use_bidirectional_attention"],
            "attention_scale": lambda options: options.number("query_pre_attn_scalar") ** -0.5},
        windowed=_gemma3_windows,
        prefixes=_PREFIXES,
        modules=_GEMMA2_MODULES | {
            "blocks.*.attention.query_norm":
                repeated_for_heads(plus_one("layers.*.self_attn.q_norm")),
            "blocks.*.attention.key_norm":
                repeated_for_heads(plus_one("layers.*.self_attn.k_norm")),
        },
    ),
    "granite": Family(
        title="Granite", architectures=("GraniteForCausalLM", "GraniteModel"),
        shape=(32000, 4096, 11008, 32, 32, None, 2048), tokens=(1, 2),
        defaults=_LLAMA | _BIASES | _GRANITE,
        fields=_GRANITE_FIELDS, scales=_GRANITE_SCALES,
        modules=_LLAMA_MODULES,
    ),
    "granitemoehybrid": Family(
        title="Granite 4 without experts",
        architectures=("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"),
        shape=(32000, 4096, 1024, 32, 32, None, 2048), tokens=(1, 2),
        defaults=_LLAMA | _GRANITE | {
            "attention_bias": False, "position_embedding_type": None,
            "num_local_experts": 8, "layer_types": None},
        names={"intermediate_size": "shared_intermediate_size"},
        fields=_GRANITE_FIELDS | {"position": _granite_position}, scales=_GRANITE_SCALES,
        modules=_LLAMA_MODULES | {
            "blocks.*.feed_forward.up": "layers.*.shared_mlp.input_linear",
            "blocks.*.feed_forward.down": "layers.*.shared_mlp.output_linear",
        },
    ),
    "olmo2": Family(
        title="OLMo 2", architectures=("Olmo2ForCausalLM", "Olmo2Model"),
        shape=(50304, 4096, 11008, 32, 32, None, 2048), tokens=(None, 50279),
        defaults=_LLAMA | {"rms_norm_eps": 1e-5, "attention_bias": False},
        fields=_OLMO_FIELDS,
        modules=_OLMO_MODULES,
    ),
    "olmo3": Family(
        title="OLMo 3", architectures=("Olmo3ForCausalLM", "Olmo3Model"),
        shape=(50304, 4096, 11008, 32, 32, None, 2048), tokens=(None, 50279),
        defaults=_LLAMA | {
            "rms_norm_eps": 1e-5, "attention_bias": False, "rope_theta": 500000.0,
            "rope_local_base_freq": None, "sliding_window": 4096, "layer_types": None},
        fields=_OLMO_FIELDS,
        windowed=lambda options: [
            layer for layer in range(options.whole("num_hidden_layers")) if (layer + 1) % 4],
        modules=_OLMO_MODULES,
    ),
    "phi": Family(
        title="Phi", architectures=("PhiForCausalLM", "PhiModel"),
        shape=(51200, 2048, 8192, 24, 32, None, 2048), tokens=(1, 2),
        defaults=_ROPE | {"hidden_act": "gelu_new", "rms_norm_eps": 1e-5,
                          "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
        names={"rms_norm_eps": "layer_norm_eps"},
        fields=_ALL_BIASES | {"norm": "layernorm", "parallel_residual": True, "head_bias": True},
        gated=False,
        modules=_LLAMA_MODULES | {
            "norm": "final_layernorm",
            "blocks.*.attention.output": "layers.*.self_attn.dense",
            "blocks.*.feed_forward_norm": "layers.*.input_layernorm",
            "blocks.*.feed_forward.up": "layers.*.mlp.fc1",
            "blocks.*.feed_forward.down": "layers.*.mlp.fc2",
        },
    ),
    "stablelm": Family(
        title="StableLM", architectures=("StableLmForCausalLM", "StableLmModel"),
        shape=(50304, 2560, 6912, 32, 32, 32, 4096), tokens=(0, 0),
        defaults=_LLAMA | {"rms_norm_eps": 1e-5, "attention_bias": False,
                           "use_parallel_residual": False, "partial_rotary_factor": 0.25},
        names={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
        fields={"norm": "layernorm", "output_bias": False},
        modules=_LLAMA_MODULES | {
            "blocks.*.feed_forward_norm":
                "layers.*.post_attention_layernorm|layers.*.input_layernorm",
        },
    ),
    "starcoder2": Family(
        title="StarCoder2", architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
        shape=(49152, 3072, 12288, 30, 24, 2, 4096), tokens=(50256, 50256),
        defaults=_ROPE | {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5,
                          "attention_bias": True, "mlp_bias": True, "sliding_window": None,
                          "tie_word_embeddings": True},
        names={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias",
               "mlp_bias": "use_bias"},
        fields={"norm": "layernorm"},
        gated=False,
        modules=_LLAMA_MODULES | {
            "blocks.*.feed_forward.up": "layers.*.mlp.c_fc",
            "blocks.*.feed_forward.down": "layers.*.mlp.c_proj",
        },
    ),
    "ministral": Family(
        title="Ministral", architectures=("MinistralForCausalLM", "MinistralModel"),
        shape=(32000, 4096, 14336, 32, 32, 8, 131072), tokens=(1, 2),
        defaults=_LLAMA | {"sliding_window": 4096, "layer_types": None},
        windowed=lambda options: range(options.whole("num_hidden_layers")),
        modules=_LLAMA_MODULES,
    ),
    "ministral3": Family(
        title="Ministral 3", architectures=("Ministral3ForCausalLM", "Ministral3Model"),
        shape=(131072, 4096, 14336, 34, 32, 8, 262144), tokens=(1, 2),
        defaults=_LLAMA | {
            "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None,
            "llama_4_scaling_beta": None, "rope_theta": 1000000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        prefixes=_PREFIXES,
        modules=_LLAMA_MODULES,
    ),
    "falcon": Family(
        title="Falcon", architectures=("FalconForCausalLM", "FalconModel"),
        shape=(65024, 4544, None, 32, 71, None, 2048), tokens=(11, 11),
        defaults=_ROPE | {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_bias": False,
                          "mlp_bias": False, "tie_word_embeddings": True, "multi_query": True,
                          "new_decoder_architecture": False},
        names={"hidden_act": "activation", "rms_norm_eps": "layer_norm_epsilon",
               "attention_bias": "bias", "mlp_bias": "bias", "hidden_size": "n_embed",
               "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        only={"parallel_attn": (True,)},
        fields={"norm": "layernorm", "parallel_residual": True, "d_ff": _four_times,
                "n_kv_head": _falcon_kv_heads},
        gated=False, prefixes=("transformer.",),
        modules=_FALCON_MODULES | {
            "blocks.*.attention_norm": "h.*.ln_attn|h.*.input_layernorm",
            "blocks.*.feed_forward_norm": "h.*.ln_mlp|h.*.input_layernorm",
        },
    ),
    "bloom": Family(
        title="BLOOM", architectures=("BloomForCausalLM", "BloomModel"),
        shape=(250880, 64, None, 2, 8, None, 2048), tokens=(1, 2),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        names={"hidden_size": "n_embed", "num_hidden_layers": "n_layer",
               "num_attention_heads": "n_head", "rms_norm_eps": "layer_norm_epsilon",
               "max_position_embeddings": "seq_length"},
        only={"apply_residual_connection_post_layernorm": (False,)},
        fields=_ALL_BIASES | {"position": "alibi", "norm": "layernorm", "embedding_norm": True,
                              "d_ff": lambda options: 4 * options.whole("hidden_size"),
                              "feed_forward": "gelu_tanh"},
        prefixes=("transformer.",),
        modules=_FALCON_MODULES | {
            "embedding_norm": "word_embeddings_layernorm",
            "blocks.*.attention_norm": "h.*.input_layernorm",
            "blocks.*.feed_forward_norm": "h.*.post_attention_layernorm",
        },
    ),
    "gptj": Family(
        title="GPT-J", architectures=("GPTJForCausalLM", "GPTJModel"),
        shape=(50400, 4096, None, 28, 16, None, 2048), tokens=(50256, 50256),
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "rotary_dim": 64,
                  "tie_word_embeddings": False},
        names={"hidden_size": "n_embd", "intermediate_size": "n_inner",
               "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
               "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
               "rms_norm_eps": "layer_norm_epsilon"},
        fields={"norm": "layernorm", "parallel_residual": True, "feed_forward_bias": True,
                "head_bias": True, "d_ff": _four_times, "rotary_dim": _gptj_rotary_dim},
        gated=False, prefixes=("transformer.",),
        modules={
            "embedding": "wte", "norm": "ln_f", "head": "lm_head",
            "blocks.*.attention_norm": "h.*.ln_1", "blocks.*.feed_forward_norm": "h.*.ln_1",
            "blocks.*.attention.qkv":
                pairs_apart(stacked(*(f"h.*.attn.{part}_proj" for part in "qkv"))),
            "blocks.*.attention.output": "h.*.attn.out_proj",
            "blocks.*.feed_forward.up": "h.*.mlp.fc_in",
            "blocks.*.feed_forward.down": "h.*.mlp.fc_out",
        },
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE", architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        shape=(151936, 2048, 6144, 24, 32, 4, 32768), tokens=(None, None),
        defaults=_LLAMA | {
            "attention_bias": False, "num_experts": 128, "num_local_experts": None,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
            "decoder_sparse_step": 1, "mlp_only_layers": None},
        only={"hidden_act": ("silu",)},
        fields={"qk_norm": True, "n_experts": _n_experts, "dense_layers": _dense_layers,
                "n_experts_per_token": lambda options: options.whole("num_experts_per_tok"),
                "d_expert": lambda options: options.whole("moe_intermediate_size"),
                "normalize_expert_shares": lambda options: options["norm_topk_prob"]},
        modules=_LLAMA_MODULES | _QWEN3_NORMS | {
            "blocks.*.feed_forward.router": "layers.*.mlp.gate",
            "blocks.*.feed_forward.expert_up": of_experts(
                "layers.*.mlp.experts.#.gate_proj", "layers.*.mlp.experts.#.up_proj"),
            "blocks.*.feed_forward.expert_down": of_experts("layers.*.mlp.experts.#.down_proj"),
        },
    ),
    "gpt_oss": Family(
        title="gpt-oss", architectures=("GptOssForCausalLM", "GptOssModel"),
        shape=(201088, 2880, 2880, 36, 64, 8, 131072), tokens=(None, None),
        defaults=_LLAMA | {
            "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128,
            "layer_types": None, "num_experts": None, "num_local_experts": 128,
            "num_experts_per_tok": 4, "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096}},
        only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        fields={"attention_sinks": True, "feed_forward": "swiglu_clamped",
                "feed_forward_bias": True, "n_experts": _n_experts,
                "n_experts_per_token": lambda options: options.whole("num_experts_per_tok"),
                "d_expert": lambda options: options.whole("intermediate_size"),
                "normalize_expert_shares": True},
        windowed=lambda options: range(0, options.whole("num_hidden_layers"), 2),
        modules=_LLAMA_MODULES | {
            "blocks.*.attention": "layers.*.self_attn",  # its sinks
            "blocks.*.feed_forward.router": "layers.*.mlp.router",
            "blocks.*.feed_forward.expert_up":
                transposed_experts("layers.*.mlp.experts.gate_up_proj"),
            "blocks.*.feed_forward.expert_down":
                transposed_experts("layers.*.mlp.experts.down_proj"),
        },
    ),
}
# Models that also see images: their architecture, and the usual model_type of their text part.
WITH_VISION: dict[str, tuple[str, str]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
}
# fmt: on

"""The published decoders whose tensors have Llama's names, but for those that they add.

A row of LLAMAS says how a family differs from Llama: its shape (see `Family`), and what follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.families.positions import layers_without_rotary
from kvasir.model.importing.tensors import (
    Source,
    in_layers,
    of_experts,
    plus_one,
    repeated_for_heads,
    split_by_head,
    stacked,
    transposed_experts,
)

ROPE: dict[str, Any] = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None}
ROPE |= {"original_max_position_embeddings": None}
QKV = stacked(*(f"self_attn.{part}_proj" for part in "qkv"))
_LLAMA = ROPE | {"hidden_act": "silu", "head_dim": None, "rms_norm_eps": 1e-6}
_LLAMA |= {"tie_word_embeddings": False}
_IN, _MIDDLE = "input_layernorm", "post_attention_layernorm"
_MODULES = {"embedding": "embed_tokens", "norm": "norm", "head": "lm_head"} | in_layers(
    "layers.*.",
    attention_norm=_IN,
    qkv=QKV,
    output="self_attn.o_proj",
    feed_forward_norm=_MIDDLE,
    up=stacked("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)


def _llama(
    name: str,
    shape: tuple[int | None, ...],
    tokens: tuple[int | None, int | None] = (1, 2),
    *,
    body: str | None = None,
    without: tuple[str, ...] = (),
    norm: str | Source = "norm",
    layers: Mapping[str, str | Source] | None = None,
    keys: Mapping[str, Any] | None = None,
    **more: Any,
) -> Family:
    """Return a family with Llama's modules and keys, except those `without`.

    body: the name without a head, if it differs. norm, layers: other places of modules, those of a
    layer by the last part of our name. keys: further ones of config.json, or other defaults.
    """
    modules = _MODULES | {"norm": norm} | in_layers("layers.*.", **(layers or {}))
    return Family(
        architectures=(f"{name}ForCausalLM", f"{body or name}Model"),
        shape=shape,
        tokens=tokens,
        defaults={k: v for k, v in (_LLAMA | dict(keys or {})).items() if k not in without},
        modules={k: v for k, v in modules.items() if k not in without},
        **more,
    )


# Of tensors, alone or within a model that also sees images.
_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOWS = {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
_QWEN = _WINDOWS | {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "attention_bias": False}
_GEMMA2 = _GEMMA | {
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
_GEMMA_FIELDS: dict[str, Any] = {
    "embedding_scale": lambda options: math.sqrt(options.whole("hidden_size"))
}
_GEMMA2_FIELDS = _GEMMA_FIELDS | {
    "norm_placement": "both",
    "attention_scale": lambda options: options.number("query_pre_attn_scalar") ** -0.5,
}
_GEMMA2_LAYERS = {
    "attention_norm": plus_one(_IN),
    "attention_output_norm": plus_one(_MIDDLE),
    "feed_forward_norm": plus_one("pre_feedforward_layernorm"),
    "feed_forward_output_norm": plus_one("post_feedforward_layernorm"),
}
_GEMMA_GELU = ("gelu", "gelu_pytorch_tanh", None)  # in Gemma's files "gelu" means the approximation
_GRANITE = dict.fromkeys(
    ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)
_GRANITE_SCALES = {
    "blocks.*.attention.output": lambda options: options.number("residual_multiplier"),
    "blocks.*.feed_forward.down": lambda options: options.number("residual_multiplier"),
    "norm": lambda options: 1.0 / options.number("logits_scaling"),
}
_ATTENTION = ("attention", "full_attention")  # names of a layer of Granite 4
_OLMO_SHAPE = (50304, 4096, 11008, 32, 32, None, 2048)
_OLMO: dict[str, Any] = {
    "without": ("blocks.*.attention_norm", "blocks.*.feed_forward_norm"),
    "fields": {"norm_placement": "output", "qk_norm": True, "qk_norm_across_heads": True},
    "layers": {
        "query_norm": split_by_head("self_attn.q_norm"),
        "key_norm": split_by_head("self_attn.k_norm"),
        "attention_output_norm": _MIDDLE,
        "feed_forward_output_norm": "post_feedforward_layernorm",
    },
}
_HEAD_NORMS = {
    "query_norm": repeated_for_heads("self_attn.q_norm"),
    "key_norm": repeated_for_heads("self_attn.k_norm"),
}


def _every_layer(options: Options) -> range:
    return range(options.whole("num_hidden_layers"))


def _even_layers(options: Options) -> range:
    return range(0, options.whole("num_hidden_layers"), 2)


def _qwen_windows(options: Options) -> range:
    return range(options.whole("max_window_layers", least=0), options.whole("num_hidden_layers"))


def _gemma3_windows(options: Options) -> list[int]:
    keys = ("_sliding_window_pattern", "sliding_window_pattern")
    every = next((options.whole(key) for key in keys if options[key]), 6)
    if options["use_bidirectional_attention"]:  # half of it on either side
        options["sliding_window"] = options.whole("sliding_window") // 2 + 1
    return [layer for layer in _every_layer(options) if (layer + 1) % every]


def _granite_position(options: Options) -> str:
    """Return the positions of a dense Granite 4; refuse its other layers."""
    if options["num_local_experts"] != 0:
        raise refuse("num_local_experts", options["num_local_experts"], "only 0")
    kinds, position = options["layer_types"], options["position_embedding_type"]
    if not isinstance(kinds, list) or any(kind not in _ATTENTION for kind in kinds):
        raise refuse("layer_types", kinds, "only layers of attention")
    if position not in ("rope", "nope", None):
        raise refuse("position_embedding_type", position, "only 'rope'")
    return "rotary" if position == "rope" else "none"


def _n_experts(options: Options) -> int:
    named = options["num_local_experts"] is None
    return options.whole("num_experts" if named else "num_local_experts")


def _dense_layers(options: Options) -> tuple[int, ...]:
    step, listed = options.whole("decoder_sparse_step"), options["mlp_only_layers"] or []
    layers = _every_layer(options)
    if not isinstance(listed, list) or not all(layer in layers for layer in listed):
        raise refuse("mlp_only_layers", listed, f"a list of layers from 0 to {layers[-1]}")
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step)


# fmt: off
LLAMAS: dict[str, Family] = {
    "llama": _llama("Llama", (32000, 4096, 11008, 32, 32, None, 2048), keys=_BIASES),
    "smollm3": _llama(
        "SmolLM3", (128256, 2048, 11008, 36, 16, 4, 32768), (128000, 128001),
        keys=_BIASES | _WINDOWS | {"rope_theta": 2000000.0, "tie_word_embeddings": True,
                                   "no_rope_layers": None, "no_rope_layer_interval": 4},
        fields={"layers_without_rotary": layers_without_rotary}, windowed=layers_without_rotary),
    "mistral": _llama(
        "Mistral", (32000, 4096, 14336, 32, 32, 8, 131072),
        keys={"sliding_window": 4096}, prefixes=_PREFIXES),
    "ministral": _llama(
        "Ministral", (32000, 4096, 14336, 32, 32, 8, 131072),
        keys={"sliding_window": 4096, "layer_types": None}, windowed=_every_layer),
    "ministral3": _llama(
        "Ministral3", (131072, 4096, 14336, 34, 32, 8, 262144),
        keys={
            "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None,
            "llama_4_scaling_beta": None, "rope_theta": 1000000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        prefixes=_PREFIXES),
    "qwen2": _llama(
        "Qwen2", (151936, 4096, 22016, 32, 32, 32, 32768), (None, None),
        keys=_QWEN, fields={"qkv_bias": True}, windowed=_qwen_windows),
    "qwen3": _llama(
        "Qwen3", (151936, 4096, 22016, 32, 32, 32, 32768), (None, None),
        keys=_QWEN | {"head_dim": 128, "attention_bias": False},
        fields={"qk_norm": True}, windowed=_qwen_windows, layers=_HEAD_NORMS),
    "qwen3_moe": _llama(
        "Qwen3Moe", (151936, 2048, 6144, 24, 32, 4, 32768), (None, None),
        keys={
            "attention_bias": False, "num_experts": 128, "num_local_experts": None,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
            "decoder_sparse_step": 1, "mlp_only_layers": None},
        only={"hidden_act": ("silu",)},
        fields={"qk_norm": True, "n_experts": _n_experts, "dense_layers": _dense_layers},
        layers=_HEAD_NORMS | {
            "router": "mlp.gate", "expert_down": of_experts("mlp.experts.#.down_proj"),
            "expert_up": of_experts("mlp.experts.#.gate_proj", "mlp.experts.#.up_proj")}),
    "gpt_oss": _llama(
        "GptOss", (201088, 2880, 2880, 36, 64, 8, 131072), (None, None),
        keys={
            "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128,
            "layer_types": None, "num_experts": None, "num_local_experts": 128,
            "num_experts_per_tok": 4, "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096}},
        only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        fields={"attention_sinks": True, "feed_forward": "swiglu_clamped",
                "feed_forward_bias": True, "n_experts": _n_experts,
                "d_expert": lambda options: options.whole("intermediate_size"),
                "normalize_expert_shares": True},
        windowed=_even_layers,
        layers={
            "attention": "self_attn",  # its sinks
            "router": "mlp.router", "expert_up": transposed_experts("mlp.experts.gate_up_proj"),
            "expert_down": transposed_experts("mlp.experts.down_proj")}),
    "phi": _llama(
        "Phi", (51200, 2048, 8192, 24, 32, None, 2048), without=("head_dim",),
        keys={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        names={"rms_norm_eps": "layer_norm_eps"},
        fields={"norm": "layernorm", "parallel_residual": True, "head_bias": True,
                "qkv_bias": True, "output_bias": True, "feed_forward_bias": True},
        gated=False, norm="final_layernorm",
        layers={"output": "self_attn.dense", "feed_forward_norm": _IN,
                "up": "mlp.fc1", "down": "mlp.fc2"}),
    "phi3": _llama(
        "Phi3", (32064, 3072, 8192, 32, 32, None, 4096), (1, 32000),
        keys={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "sliding_window": None},
        scalings=("longrope",),
        layers={"qkv": "self_attn.qkv_proj", "up": "mlp.gate_up_proj"}),
    "gemma": _llama(
        "Gemma", (256000, 3072, 24576, 28, 16, 16, 8192), (2, 1),
        keys=_GEMMA, only={"hidden_act": _GEMMA_GELU, "hidden_activation": _GEMMA_GELU},
        fields=_GEMMA_FIELDS | {"feed_forward": "geglu_tanh"}, norm=plus_one("norm"),
        layers={"attention_norm": plus_one(_IN), "feed_forward_norm": plus_one(_MIDDLE)}),
    "gemma2": _llama(
        "Gemma2", (256000, 2304, 9216, 26, 8, 4, 8192), (2, 1),
        keys=_GEMMA2 | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        names={"hidden_act": "hidden_activation"}, fields=_GEMMA2_FIELDS, windowed=_even_layers,
        norm=plus_one("norm"), layers=_GEMMA2_LAYERS),
    "gemma3_text": _llama(
        "Gemma3", (262208, 2304, 9216, 26, 8, 4, 131072), (2, 1), body="Gemma3Text",
        keys=_GEMMA2 | {
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": None, "_sliding_window_pattern": None,
            "use_bidirectional_attention": False},
        names={"hidden_act": "hidden_activation"},
        fields=_GEMMA2_FIELDS | {
            "qk_norm": True, "causal": lambda options: not options["use_bidirectional_attention"]},
        windowed=_gemma3_windows, prefixes=_PREFIXES, norm=plus_one("norm"),
        layers=_GEMMA2_LAYERS | {
            "query_norm": repeated_for_heads(plus_one("self_attn.q_norm")),
            "key_norm": repeated_for_heads(plus_one("self_attn.k_norm"))}),
    "granite": _llama(
        "Granite", (32000, 4096, 11008, 32, 32, None, 2048),
        keys=_BIASES | _GRANITE, scales=_GRANITE_SCALES),
    "granitemoehybrid": _llama(
        "GraniteMoeHybrid", (32000, 4096, 1024, 32, 32, None, 2048),
        keys=_GRANITE | {"attention_bias": False, "position_embedding_type": None,
                         "num_local_experts": 8, "layer_types": None},
        names={"intermediate_size": "shared_intermediate_size"},
        fields={"position": _granite_position}, scales=_GRANITE_SCALES,
        layers={"up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}),
    "olmo2": _llama(
        "Olmo2", _OLMO_SHAPE, (None, 50279),
        keys={"rms_norm_eps": 1e-5, "attention_bias": False}, **_OLMO),
    "olmo3": _llama(
        "Olmo3", _OLMO_SHAPE, (None, 50279),
        keys={"rms_norm_eps": 1e-5, "attention_bias": False, "rope_theta": 500000.0,
              "rope_local_base_freq": None, "sliding_window": 4096, "layer_types": None},
        windowed=lambda options: [i for i in _every_layer(options) if (i + 1) % 4], **_OLMO),
    "stablelm": _llama(
        "StableLm", (50304, 2560, 6912, 32, 32, 32, 4096), (0, 0),
        keys={"rms_norm_eps": 1e-5, "attention_bias": False,
              "use_parallel_residual": False, "partial_rotary_factor": 0.25},
        names={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
        fields={"norm": "layernorm", "output_bias": False},
        layers={"feed_forward_norm": f"{_MIDDLE}|{_IN}"}),
    "starcoder2": _llama(
        "Starcoder2", (49152, 3072, 12288, 30, 24, 2, 4096), (50256, 50256), without=("head_dim",),
        keys={"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, "attention_bias": True,
              "mlp_bias": True, "sliding_window": None, "tie_word_embeddings": True},
        names={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias",
               "mlp_bias": "use_bias"},
        fields={"norm": "layernorm"}, gated=False, layers={"up": "mlp.c_fc", "down": "mlp.c_proj"}),
}
# fmt: on

"""The published decoders whose tensors have Llama's names, but for those that they add.

A row of LLAMAS says how a family differs from Llama: its shape (see `Family`), its traits, and what
is its own. Those with experts are in `mixtures.py`.
"""

from __future__ import annotations

import math
from functools import partial
from operator import itemgetter

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.llamas import traits as t
from kvasir.model.importing.families.options import Options
from kvasir.model.importing.families.positions import head_dim, layers_without_rotary
from kvasir.model.importing.heads import (
    interleaved_by_head,
    pairs_of_norm,
    repeated_for_heads,
    turned_back,
)
from kvasir.model.importing.tensors import all_ones, plus_one

_PHI3: t.Trait = {
    "keys": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "sliding_window": None},
    "scalings": ("longrope",),
    "layers": {"qkv": "self_attn.qkv_proj"},
}
_GEMMA: t.Trait = {
    "keys": {"head_dim": 256, "tie_word_embeddings": True, "attention_bias": False},
    "fields": {"embedding_scale": lambda options: math.sqrt(options.whole("hidden_size"))},
    "layers": {"attention_norm": plus_one(t.IN), "feed_forward_norm": plus_one(t.MIDDLE)},
    "norm": plus_one("norm"),
}
_SOFTCAPS: t.Trait = {
    "keys": {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
             "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "names": {"hidden_act": "hidden_activation"},
    "fields": {"attention_scale": lambda options: options.number("query_pre_attn_scalar") ** -0.5},
    "layers": {"feed_forward_norm": plus_one("pre_feedforward_layernorm")},
}  # fmt: skip
_GEMMA_LAST: t.Trait = {
    "layers": {
        "attention_output_norm": plus_one(t.MIDDLE),
        "feed_forward_output_norm": plus_one(t.LAST),
    }
}
_GEMMA_GELU = ("gelu", "gelu_pytorch_tanh", None)  # in Gemma's files "gelu" means the approximation
_GLM: t.Trait = {"keys": {"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
                        "partial_rotary_factor": 0.5}}  # fmt: skip
_GLM_TOKENS: tuple[None, list[int]] = (None, [151329, 151336, 151338])
COHERE: t.Trait = {
    "keys": {"rope_theta": 500000.0, "logit_scale": 0.0625, "tie_word_embeddings": True},
    "fields": {"norm_bias": False},
    "scales": {"norm": lambda options: options.number("logit_scale", 1.0)},
}
_OLMO_SHAPE = (50304, 4096, 11008, 32, 32, None, 2048)
_7B_SHAPE = (32000, 4096, 11008, 32, 32, None, 2048)
_MISTRAL_SHAPE = (32000, 4096, 14336, 32, 32, 8, 131072)
_QWEN_SHAPE = (151936, 4096, 22016, 32, 32, 32, 32768)
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


def qwen_windows(options: Options) -> range:
    """Return the layers from max_window_layers on."""
    return range(options.whole("max_window_layers", least=0), options.whole("num_hidden_layers"))


QWEN_WINDOWS = t.windows(4096, qwen_windows, use_sliding_window=False, max_window_layers=28)


def _gemma3_windows(options: Options) -> list[int]:
    keys = ("_sliding_window_pattern", "sliding_window_pattern")
    every = next((options.whole(key) for key in keys if options[key]), 6)
    if options["use_bidirectional_attention"]:  # half of it on either side
        options["sliding_window"] = options.whole("sliding_window") // 2 + 1
    return [layer for layer in t.every_layer(options) if (layer + 1) % every]


def _clova_residual(options: Options, *, normed: bool) -> float:
    is_own = bool(options["use_post_norm"]) == normed
    return options.number("residual_multiplier") if is_own else 1.0


_CLOVA_SCALES = {"norm": lambda options: options.number("logits_scaling")} | {
    f"blocks.*.{module}": partial(_clova_residual, normed=module.endswith("norm"))
    for module in (
        *("attention_output_norm", "feed_forward_output_norm"),
        *("attention.output", "feed_forward.down"),
    )
}


# fmt: off
LLAMAS: dict[str, Family] = {
    "llama": t.llama("Llama", _7B_SHAPE, (1, 2), t.BIASES),
    "internlm3": t.llama(
        "InternLM3", (128512, 4096, 10240, 48, 32, 2, 32768), (1, 2), t.BIASES, also=t.AS_LLAMA,
        keys={"rms_norm_eps": 1e-5, "head_dim": 128},
        names={"attention_bias": "qkv_bias|attention_bias", "mlp_bias": "bias|mlp_bias"},
        scalings=("linear", "llama3", "yarn", "dynamic")),
    "iquestcoder": t.llama(
        "IQuestCoder", (76800, 5120, 27648, 80, 40, 8, 131072), (1, 2), t.BIASES, also=t.AS_LLAMA,
        keys={"rms_norm_eps": 1e-5, "head_dim": 128}),
    "emu3_text_model": t.llama(
        "Emu3", (184622, 4096, 14336, 32, 32, 8, 9216), (151849, 151850), t.BIASES, body="Emu3Text",
        keys={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0}, prefixes=t.WITHIN),
    "cwm": t.llama(
        "Cwm", (128256, 6144, 21504, 64, 48, 8, 131072), (128000, [128001, 128008, 128009]),
        t.windows(8192, t.all_but_every(4, first=0)),
        keys={"rms_norm_eps": 1e-5, "head_dim": 128, "mlp_bias": False, "rope_theta": 1000000.0,
              "rope_parameters": _LLAMA3 | {"factor": 16.0}}),
    "seed_oss": t.llama(
        "SeedOss", (155136, 4096, 27648, 64, 80, 8, 524288), (0, 2), t.BIASES,
        keys={"attention_bias": True, "attention_out_bias": False, "head_dim": 128},
        fields={"output_bias": itemgetter("attention_out_bias")}),
    "ernie4_5": t.llama(
        "Ernie4_5", (103424, 1024, 3072, 18, 16, 2, 131072), (1, 2), t.PAIRS, t.ONE_BIAS,
        keys={"rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 500000.0,
              "tie_word_embeddings": True}),
    "helium": t.llama(
        "Helium", (48000, 2560, 7040, 24, 20, 20, 4096), (1, 2), t.PAIRS, t.BIASES, t.QKV_BIAS,
        keys={"rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 100000.0}),
    "smollm3": t.llama(
        "SmolLM3", (128256, 2048, 11008, 36, 16, 4, 32768), (128000, 128001), t.BIASES,
        t.windows(None, layers_without_rotary, use_sliding_window=False),
        keys={"rope_theta": 2000000.0, "tie_word_embeddings": True, "no_rope_layers": None,
              "no_rope_layer_interval": 4},
        fields={"layers_without_rotary": layers_without_rotary}),
    "mistral": t.llama(
        "Mistral", _MISTRAL_SHAPE, keys={"sliding_window": 4096}, prefixes=t.WITHIN),
    "ministral": t.llama("Ministral", _MISTRAL_SHAPE, (1, 2), t.windows(4096, t.every_layer)),
    "ministral3": t.llama(
        "Ministral3", (131072, 4096, 14336, 34, 32, 8, 262144),
        keys={"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None,
              "llama_4_scaling_beta": None, "rope_theta": 1000000.0,
              "rope_parameters": {
                  "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
                  "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        prefixes=t.WITHIN),
    "qwen2": t.llama("Qwen2", _QWEN_SHAPE, (None, None), QWEN_WINDOWS, fields={"qkv_bias": True}),
    "qwen3": t.llama(
        "Qwen3", _QWEN_SHAPE, (None, None), QWEN_WINDOWS, t.ATTENTION_BIAS, t.HEAD_NORMS,
        keys={"head_dim": 128}),
    "phi": t.llama(
        "Phi", (51200, 2048, 8192, 24, 32, None, 2048), (1, 2), t.LAYER_NORM, t.PARALLEL, t.UNGATED,
        t.HEAD_LAYER_NORMS, without=("head_dim",),
        keys={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        fields=t.ALL_BIASES | {"head_bias": True},
        norm="final_layernorm",
        layers={"output": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}),
    "arcee": t.llama(
        "Arcee", (32000, 2560, 18432, 32, 32, None, 4096), (128000, 128001), t.BIASES, t.UNGATED,
        keys={"hidden_act": "relu2", "rms_norm_eps": 1e-5}),
    "jais2": t.llama(
        "Jais2", (150272, 3328, 26624, 32, 26, None, 8192), (0, 150024), t.LAYER_NORM, t.UNGATED,
        keys={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}),
    "nemotron": t.llama(
        "Nemotron", (256000, 6144, 24576, 32, 48, None, 4096), (2, 3), t.LAYER_NORM, t.BIASES,
        t.UNGATED, keys={"hidden_act": "relu2", "partial_rotary_factor": 0.5},
        names={"rms_norm_eps": "norm_eps"}, norm=plus_one("norm"),
        layers={"attention_norm": plus_one(t.IN), "feed_forward_norm": plus_one(t.MIDDLE)}),
    "nanochat": t.llama(
        "NanoChat", (50304, 768, 8192, 12, 6, None, 2048), (0, 1), t.ATTENTION_BIAS, t.UNGATED,
        keys={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
        # The norms' weights of 1 let a rotation pass, and no amplitude, as yarn's.
        fields={"embedding_norm": True, "qk_norm": True}, scalings=("linear", "llama3"),
        norm=all_ones(), modules={"embedding_norm": all_ones()},
        layers=dict.fromkeys(("attention_norm", "feed_forward_norm", "query_norm", "key_norm"),
                             all_ones())
        | {"qkv": turned_back(t.QKV), "up": "mlp.fc1", "down": "mlp.fc2"}),
    "apertus": t.llama(
        "Apertus", (131072, 4096, 14336, 32, 32, None, 65536), (1, 2), t.ATTENTION_BIAS, t.UNGATED,
        t.HEAD_NORMS, only={"hidden_act": ("xielu",)}, fields={"feed_forward": "xielu"},
        keys={"rms_norm_eps": 1e-5, "rope_theta": 12000000.0,
              "rope_parameters": _LLAMA3 | {"factor": 8.0}},
        layers={"attention_norm": "attention_layernorm",
                "feed_forward_norm": "feedforward_layernorm",
                "activation.alpha_p": "mlp.act_fn.alpha_p",
                "activation.alpha_n": "mlp.act_fn.alpha_n"}),
    "persimmon": t.llama(
        "Persimmon", (262144, 4096, 16384, 36, 64, None, 16384), (1, 2), t.LAYER_NORM, t.UNGATED,
        t.HEAD_LAYER_NORMS, norm="final_layernorm", prefixes=t.WITHIN,
        keys={"hidden_act": "relu2", "partial_rotary_factor": 0.5, "qk_layernorm": True},
        fields=t.ALL_BIASES,
        layers={"qkv": interleaved_by_head("self_attn.query_key_value"),
                "output": "self_attn.dense", "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h"}),
    "hunyuan_v1_dense": t.llama(
        "HunYuanDenseV1", (290943, 4096, 11008, 32, 32, None, 2048), (1, 2), t.NORMS_AFTER_ROTARY),
    "granite_swa": t.llama(
        "GraniteSWA", (100352, 2560, 8192, 24, 20, 4, 8192), (100257, 100257), t.BIASES,
        t.MULTIPLIERS, t.SINKS, t.windows(128, t.all_but_every(4, first=0)),
        t.theta_of_layers(t.all_but_every(4, first=0)),
        keys={"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "phi3": t.llama("Phi3", (32064, 3072, 8192, 32, 32, None, 4096), (1, 32000), t.FUSED_UP, _PHI3),
    "phi4_multimodal": t.llama(
        "Phi4Multimodal", (200064, 3072, 8192, 32, 32, 8, 131072), (199999, [199999, 200020]),
        t.FUSED_UP, _PHI3, keys={"original_max_position_embeddings": 4096},
        unused=("embed_tokens_extend.",)),
    "gemma": t.llama(
        "Gemma", (256000, 3072, 24576, 28, 16, 16, 8192), (2, 1), _GEMMA,
        only={"hidden_act": _GEMMA_GELU, "hidden_activation": _GEMMA_GELU},
        fields={"feed_forward": "geglu_tanh"}),
    "gemma2": t.llama(
        "Gemma2", (256000, 2304, 9216, 26, 8, 4, 8192), (2, 1), _GEMMA, _SOFTCAPS,
        t.NORMS_BEFORE_AND_AFTER, _GEMMA_LAST, t.windows(4096, t.all_but_every(2))),
    "vaultgemma": t.llama(
        "VaultGemma", (256000, 2304, 9216, 26, 8, 4, 8192), (2, 1), _GEMMA, _SOFTCAPS,
        t.windows(4096, t.all_but_every(2))),
    "gemma3_text": t.llama(
        "Gemma3", (262208, 2304, 9216, 26, 8, 4, 131072), (2, 1), _GEMMA, _SOFTCAPS,
        t.NORMS_BEFORE_AND_AFTER, _GEMMA_LAST, t.HEAD_NORMS, t.windows(4096, _gemma3_windows),
        body="Gemma3Text", prefixes=t.WITHIN, without=("attn_logit_softcapping",),
        keys={"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
              "sliding_window_pattern": None, "_sliding_window_pattern": None,
              "use_bidirectional_attention": False, "final_logit_softcapping": None},
        fields={"causal": lambda options: not options["use_bidirectional_attention"]},
        layers={"query_norm": repeated_for_heads(plus_one("self_attn.q_norm")),
                "key_norm": repeated_for_heads(plus_one("self_attn.k_norm"))}),
    "glm": t.llama(
        "Glm", (151552, 4096, 13696, 40, 32, 2, 131072), _GLM_TOKENS, t.PAIRS, t.FUSED_UP,
        t.QKV_BIAS, _GLM),
    "glm4": t.llama(
        "Glm4", (151552, 4096, 13696, 40, 32, 2, 131072), _GLM_TOKENS, t.PAIRS, t.FUSED_UP,
        t.QKV_BIAS, _GLM, t.NORMS_BEFORE_AND_AFTER,
        layers={"attention_output_norm": "post_self_attn_layernorm",
                "feed_forward_output_norm": "post_mlp_layernorm"}),
    "exaone4": t.llama(
        "Exaone4", (102400, 4096, 16384, 32, 32, 32, 2048), (0, 2), t.HEAD_NORMS, t.NORMS_AFTER,
        t.ROTARY_IN_WINDOWS,
        t.windows(4096, t.all_but_every(4, "sliding_window_pattern"), sliding_window_pattern=4),
        keys={"rms_norm_eps": 1e-5}),
    "cohere": t.llama(
        "Cohere", (256000, 8192, 22528, 40, 64, None, 8192), (5, 255001), t.PAIRS, t.PARALLEL,
        t.LAYER_NORM, t.ATTENTION_BIAS, COHERE, keys={"use_qk_norm": False},
        fields={"qk_norm": itemgetter("use_qk_norm"),
                "qk_norm_kind": lambda o: "layernorm" if o["use_qk_norm"] else "rmsnorm"},
        layers={"query_norm": pairs_of_norm("self_attn.q_norm"),
                "key_norm": pairs_of_norm("self_attn.k_norm")}),
    "cohere2": t.llama(
        "Cohere2", (256000, 8192, 22528, 40, 64, None, 8192), (5, 255001), t.PAIRS, t.PARALLEL,
        t.LAYER_NORM, t.ATTENTION_BIAS, COHERE, t.ROTARY_IN_WINDOWS,
        t.windows(4096, t.all_but_every(4, "sliding_window_pattern"), sliding_window_pattern=None),
        keys={"rope_theta": 10000.0}, only={"use_qk_norm": (False,)}),
    "cohere_compass_text": t.llama(
        "CohereCompass", (256000, 8192, 22528, 40, 64, None, 8192), (5, 255001), t.PARALLEL,
        t.LAYER_NORM, t.ATTENTION_BIAS, COHERE, t.windows(4096, lambda _: ()),
        body="CohereCompassText", prefixes=t.WITHIN,
        keys={"rope_theta": 10000.0, "rope_local_base_freq": None, "logit_scale": None,
              "mrope_section": None, "mrope_interleaved": None}),  # a text has one position
    "granite": t.llama("Granite", _7B_SHAPE, (1, 2), t.BIASES, t.MULTIPLIERS),
    "hyperclovax": t.llama(
        "HyperCLOVAX", _7B_SHAPE, (1, 2), t.BIASES, t.MULTIPLIERS,
        keys={"attention_multiplier": None, "use_post_norm": True},
        fields={"norm_placement": lambda o: "both" if o["use_post_norm"] else "pre",
                "attention_scale": lambda options: options.number(
                    "attention_multiplier", head_dim(options) ** -0.5)},
        layers={"attention_output_norm": "post_norm1", "feed_forward_output_norm": "post_norm2"},
        scales=_CLOVA_SCALES),
    "olmo": t.llama(
        "Olmo", _OLMO_SHAPE, (None, 50279), t.ATTENTION_BIAS, t.CLIP, without=("rms_norm_eps",),
        norm=all_ones(), fields={"norm": "layernorm", "norm_bias": False, "norm_eps": 1e-5},
        layers={"attention_norm": all_ones(), "feed_forward_norm": all_ones()}),
    "olmo2": t.llama(
        "Olmo2", _OLMO_SHAPE, (None, 50279), t.ATTENTION_BIAS, t.NORMS_ACROSS_HEADS, t.NORMS_AFTER,
        keys={"rms_norm_eps": 1e-5}),
    "olmo3": t.llama(
        "Olmo3", _OLMO_SHAPE, (None, 50279), t.ATTENTION_BIAS, t.NORMS_ACROSS_HEADS, t.NORMS_AFTER,
        t.windows(4096, t.all_but_every(4)),
        keys={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_local_base_freq": None}),
    "stablelm": t.llama(
        "StableLm", (50304, 2560, 6912, 32, 32, 32, 4096), (0, 0), t.LAYER_NORM, t.ATTENTION_BIAS,
        keys={"use_parallel_residual": False, "partial_rotary_factor": 0.25},
        names={"attention_bias": "use_qkv_bias"}, fields={"output_bias": False},
        layers={"feed_forward_norm": f"{t.MIDDLE}|{t.IN}"}),
    "starcoder2": t.llama(
        "Starcoder2", (49152, 3072, 12288, 30, 24, 2, 4096), (50256, 50256), t.LAYER_NORM,
        t.UNGATED, t.ONE_BIAS, without=("head_dim",),
        keys={"hidden_act": "gelu_pytorch_tanh", "attention_bias": True, "mlp_bias": True,
              "sliding_window": None, "tie_word_embeddings": True},
        names={"rms_norm_eps": "norm_epsilon"}, layers={"up": "mlp.c_fc", "down": "mlp.c_proj"}),
}
# fmt: on

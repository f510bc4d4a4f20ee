"""The published mixtures of experts whose tensors have Llama's names, but for those that they add.

As in `llamas.py`, a row of MIXTURES says how a family differs from Llama.
"""

from __future__ import annotations

import math
from operator import itemgetter

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.llamas import experts as e
from kvasir.model.importing.families.llamas import traits as t
from kvasir.model.importing.families.llamas.llamas import COHERE, qwen_windows
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.families.positions import layers_without_rotary, window_fields
from kvasir.model.importing.tensors import (
    all_ones,
    halves_transposed,
    in_halves,
    or_zeros,
    stacked,
    transposed_experts,
    without_first_axis,
)


def _ernie_dense(options: Options) -> tuple[int, ...]:
    layers, step = t.every_layer(options), options.whole("moe_layer_interval")
    first, last = (options.whole(f"moe_layer_{end}_index", least=-1) for end in ("start", "end"))
    last = layers[-1] if last == -1 else last
    return tuple(i for i in layers if (i + 1) % step or not first <= i <= last)


def _qwen2_windows(options: Options) -> list[int]:
    most = options.whole("max_window_layers", least=0)
    return [layer for layer in t.every_layer(options)[:most] if (layer + 1) % 2]


def _flint_windows(options: Options) -> list[int]:
    layers = t.every_layer(options)
    return [i for i in layers if i >= 2 and i % 4 != 1 and i != layers[-1]]


def _cohere_windows(options: Options) -> list[int]:
    layers, first = t.every_layer(options), len(e.dense_first(options))
    every = options.whole("sliding_window_pattern")
    of_dense = options.whole("prefix_dense_sliding_window_pattern")
    dense = [i for i in layers[:first] if (i + 1) % of_dense]
    return dense + [i for i in layers[first:] if (i + 1 - first) % every]


def _cohere_unturned(options: Options) -> tuple[int, ...]:
    """Return the layers without rotary positions: those without a window.

    Dense ones turn as well where their pattern gives none of them a window.
    """
    windows = window_fields(options, _cohere_windows)["sliding_window_layers"] or ()
    all_turn = options["prefix_dense_sliding_window_pattern"] == 1
    turned = {*windows, *(e.dense_by_type(options) if all_turn else ())}
    return tuple(layer for layer in t.every_layer(options) if layer not in turned)


def _cohere_share(options: Options) -> float:
    """Return what multiplies chosen and shared experts, whose average may be taken."""
    key = "shared_expert_combination_strategy"
    if options[key] not in ("average", "sum"):
        raise refuse(key, options[key], "only 'average' or 'sum'")
    return 0.5 if options[key] == "average" and options["num_shared_experts"] else 1.0


def _llama4_length(options: Options) -> int:
    """Return the positions up to which chunks and growing queries change nothing."""
    lengths = [options.whole("max_position_embeddings")]
    options.layer_kinds("layer_types", ("full_attention", "chunked_attention"))
    if options["attention_chunk_size"] is not None:
        lengths.append(options.whole("attention_chunk_size"))
    if options["attn_temperature_tuning"]:
        lengths.append(options.whole("floor_scale", least=3) - 1)
    return min(lengths)


def _llama4_dense(options: Options) -> tuple[int, ...]:
    layers, step = t.every_layer(options), options.whole("interleave_moe_layer_step")
    regular = options["moe_layers"] is None
    listed = layers[step - 1 :: step] if regular else options.layers("moe_layers")
    return tuple(layer for layer in layers if layer not in listed)


# fmt: off
MIXTURES: dict[str, Family] = {
    "mixtral": t.llama(
        "Mixtral", (32000, 4096, 14336, 32, 32, 8, 131072), (1, 2),
        e.experts(8, 2, **e.W123, normalize_expert_shares=True),
        keys={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None}),
    "phimoe": t.llama(
        "Phimoe", (32064, 4096, 6400, 32, 32, 8, 131072), (1, 2), t.ATTENTION_BIAS,
        e.experts(16, 2, **e.W123),
        keys={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
              "lm_head_bias": False, "short_mscale": None, "long_mscale": None},
        only={"router_jitter_noise": (0.01,), "num_experts_per_tok": (2,)}, scalings=("longrope",),
        fields={"norm": "layernorm", "router": "sparse_mixer",
                "head_bias": itemgetter("lm_head_bias")}),
    "qwen3_moe": t.llama(
        "Qwen3Moe", (151936, 2048, 6144, 24, 32, 4, 32768), (None, None), t.ATTENTION_BIAS,
        t.HEAD_NORMS, e.SHARES, e.STEPS, e.EITHER_COUNT, e.experts(128, 8, 768)),
    "olmoe": t.llama(
        "Olmoe", (50304, 2048, 2048, 16, 16, None, 4096), (None, 50279), t.ATTENTION_BIAS,
        t.NORMS_ACROSS_HEADS, e.SHARES, e.experts(64, 8), t.CLIP, keys={"rms_norm_eps": 1e-5}),
    "flex_olmo": t.llama(
        "FlexOlmo", (100352, 4096, 11008, 32, 32, None, 4096), (None, 100257), t.ATTENTION_BIAS,
        t.NORMS_ACROSS_HEADS, t.NORMS_AFTER, e.SHARES, e.experts(7, 5),
        keys={"rope_theta": 500000.0}),
    "granitemoe": t.llama(
        "GraniteMoe", (32000, 4096, 11008, 32, 32, None, 2048), (1, 2), t.ATTENTION_BIAS,
        t.MULTIPLIERS, e.GRANITE_EXPERTS),
    "granitemoeshared": t.llama(
        "GraniteMoeShared", (32000, 4096, 11008, 32, 32, None, 2048), (1, 2), t.ATTENTION_BIAS,
        t.MULTIPLIERS, e.GRANITE_EXPERTS, e.GRANITE_SHARED),
    "granitemoe_swa": t.llama(
        "GraniteMoeSWA", (32000, 4096, 11008, 32, 32, None, 2048), (1, 2), t.ATTENTION_BIAS,
        t.MULTIPLIERS, e.GRANITE_EXPERTS, e.GRANITE_SHARED, t.SINKS,
        t.windows(128, t.all_but_every(4, first=0)), t.theta_of_layers(t.all_but_every(4, first=0)),
        layers={"router": "block_sparse_moe.router",
                "expert_up": in_halves("block_sparse_moe.experts.gate_up_proj"),
                "expert_down": "block_sparse_moe.experts.down_proj"}),
    "afmoe": t.llama(
        "Afmoe", (200192, 2048, 6144, 32, 16, None, 16384), (None, None), t.ATTENTION_BIAS,
        t.HEAD_NORMS, t.NORMS_BEFORE_AND_AFTER, t.ROTARY_IN_WINDOWS, e.BIASED, e.FIRST_DENSE,
        t.windows(1024, t.all_but_every(4, "global_attn_every_n_layers"),
                  global_attn_every_n_layers=4),
        e.experts(64, 6, 1408, router="mlp.router.gate", normalize_expert_shares=True),
        e.shared_expert("mlp.shared_experts", "moe_intermediate_size", "num_shared_experts"),
        keys={"head_dim": 128, "rms_norm_eps": 1e-5, "num_shared_experts": 2,
              "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "mup_enabled": False},
        names={"routed_scaling_factor": "route_scale", "first_k_dense_replace": "num_dense_layers"},
        fields={"attention_gate": True, "embedding_scale": lambda o: (
                    math.sqrt(o.whole("hidden_size")) if o["mup_enabled"] else 1.0)},
        layers={"attention_output_norm": t.MIDDLE, "feed_forward_norm": "pre_mlp_layernorm",
                "feed_forward_output_norm": "post_mlp_layernorm",
                "gate": or_zeros("self_attn.gate_proj"), "choice_bias": "mlp.expert_bias"}),
    "qwen2_moe": t.llama(
        "Qwen2Moe", (151936, 2048, 5632, 24, 16, 16, 32768), (None, None), e.SHARES, e.STEPS,
        e.EITHER_COUNT, e.experts(60, 4, 1408), t.QKV_BIAS,
        e.shared_expert(
            "mlp.shared_expert", "shared_expert_intermediate_size", gate="mlp.shared_expert_gate"),
        t.windows(4096, _qwen2_windows, use_sliding_window=False, max_window_layers=28),
        keys={"attention_bias": True, "shared_expert_intermediate_size": 5632},
        names={"attention_bias": "qkv_bias"}),
    "aria_text": t.llama(
        "AriaText", (32000, 4096, 4096, 32, 32, None, 2048), (1, 2), t.ATTENTION_BIAS,
        e.experts(8, 2, normalize_expert_shares=True),
        e.shared_expert("mlp.shared_experts", "intermediate_size", "moe_num_shared_experts"),
        keys={"moe_num_shared_experts": 2}, only={"mlp_bias": (False,)},
        names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk"},
        layers={"router": "mlp.router", "expert_up": halves_transposed("mlp.experts.fc1"),
                "expert_down": transposed_experts("mlp.experts.fc2")}),
    "glm4_moe": t.llama(
        "Glm4Moe", (151552, 4096, 10944, 46, 96, 8, 131072), (None, None), t.QKV_BIAS, t.HEAD_NORMS,
        e.experts(128, 8, 1408, count="n_routed_experts"), e.BALANCED, e.SHARED, e.FIRST_DENSE,
        keys={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False,
              "n_shared_experts": 1, "first_k_dense_replace": 1},
        fields={"qk_norm": itemgetter("use_qk_norm")}),
    "dots1": t.llama(
        "Dots1", (152064, 4608, 10944, 62, 32, 32, 2048), (None, None), t.ATTENTION_BIAS,
        t.HEAD_NORMS, e.experts(None, None, 1408, count="n_routed_experts"), e.BALANCED, e.SHARED,
        e.FIRST_DENSE, t.windows(4096, qwen_windows, max_window_layers=62),
        keys={"n_shared_experts": None, "norm_topk_prob": False}),
    "solar_open": t.llama(
        "SolarOpen", (196608, 4096, 10240, 48, 64, 8, 131072), (None, None), t.ATTENTION_BIAS,
        e.experts(128, 8, 1280, count="n_routed_experts"), e.BALANCED, e.SHARED,
        keys={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "head_dim": 128, "n_shared_experts": 1,
              "partial_rotary_factor": 1.0},
        only={"use_qk_norm": (False,), "first_k_dense_replace": (0,)}),
    "hy_v3": t.llama(
        "HYV3", (120832, 4096, 13312, 80, 64, 8, 131072), (None, None), t.BIASES, t.HEAD_NORMS,
        e.experts(192, 8, 1536, router="mlp.router.gate", normalize_expert_shares=True), e.TYPES,
        e.BIASED, e.shared_expert("mlp.shared_experts", count="num_shared_experts"),
        former_names={"shared_mlp": "shared_experts"},
        keys={"rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "head_dim": 128,
              "num_shared_experts": 1, "routed_scaling_factor": 2.826, "first_k_dense_replace": 1},
        names={"routed_scaling_factor": "router_scaling_factor"},
        layers={"choice_bias": "mlp.expert_bias"}),
    "exaone_moe": t.llama(
        "ExaoneMoe", (102400, 4096, 16384, 32, 32, 32, 2048), (1, 53), t.HEAD_NORMS,
        t.ROTARY_IN_WINDOWS, e.experts(64, 8, 1024), e.BALANCED, e.TYPES,
        t.windows(4096, t.all_but_every(4, "sliding_window_pattern"), sliding_window_pattern=4),
        e.shared_expert("mlp.shared_experts", count="num_shared_experts"),
        keys={"rms_norm_eps": 1e-5, "num_shared_experts": 1, "routed_scaling_factor": 2.5,
              "first_k_dense_replace": 1}, layers={"choice_bias": "mlp.e_score_correction_bias"},
        unused=("mtp.",), also=("ExaoneMoEForCausalLM",)),
    "minimax_m2": t.llama(
        "MiniMaxM2", (200064, 3072, 1536, 62, 48, 8, 196608), (200034, 200020),
        t.NORMS_ACROSS_HEADS, e.experts(256, 8, **e.W123, normalize_expert_shares=True), e.BIASED,
        keys={"head_dim": 128, "rope_theta": 5000000.0, "rotary_dim": None,
              "partial_rotary_factor": None},
        only={"scoring_func": ("sigmoid",), "shared_intermediate_size": (0,)},
        layers={"choice_bias": "block_sparse_moe.e_score_correction_bias"}),
    "ernie4_5_moe": t.llama(
        "Ernie4_5_Moe", (103424, 2560, 12288, 28, 20, 4, 131072), (1, 2), t.PAIRS,
        e.experts(64, 6, 1536, normalize_expert_shares=True),
        e.shared_expert("mlp.shared_experts", count="moe_num_shared_experts"),
        keys={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
              "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
              "moe_layer_interval": 1},
        names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        only={"use_bias": (False,), "moe_norm_min": (1e-12,)},
        fields={"choice_bias": "scores", "dense_layers": _ernie_dense},
        layers={"choice_bias": without_first_axis("mlp.moe_statics.e_score_correction_bias")}),
    "flint": t.llama(
        "Flint", (150144, 2048, 6144, 49, 32, 4, 262144), (None, None), t.ATTENTION_BIAS,
        t.HEAD_NORMS, t.ROTARY_IN_WINDOWS, e.SHARES, e.STEPS, e.experts(256, 6, 512), t.SINKS,
        t.windows(513, _flint_windows),
        e.shared_expert("mlp.shared_expert", "shared_expert_intermediate_size"),
        keys={"head_dim": 128, "norm_topk_prob": True, "mlp_only_layers": [0, 1],
              "shared_expert_intermediate_size": 1024}, fields={"router": "sigmoid"},
        layers={"sinks": "self_attn.softmax_offset"}),
    "kolibri1": t.llama(
        "Kolibri1", (128000, 2560, 512, 50, 48, 4, 262144), (None, None), t.HEAD_NORMS,
        t.NORMS_BEFORE_AND_AFTER, t.ROTARY_IN_WINDOWS, e.SHARES, e.EITHER_COUNT,
        e.experts(384, 6, 512), t.windows(513, t.all_but_every(5)),
        e.shared_expert("mlp.shared_experts", "shared_expert_intermediate_size"),
        keys={"head_dim": 128, "shared_expert_intermediate_size": 512},
        fields={"router": "sigmoid", "choice_bias": "logits"},
        layers={"choice_bias": "moe.router.expert_bias", "attention_output_norm": "post_attn_norm",
                "feed_forward_output_norm": "post_ffn_norm"}),
    "cohere2_moe": t.llama(
        "Cohere2Moe", (256000, 8192, 22528, 40, 64, None, 8192), (5, 255001), t.PAIRS, t.PARALLEL,
        t.LAYER_NORM, t.ATTENTION_BIAS, COHERE, e.experts(8, 2), e.TYPES,
        e.shared_expert("mlp.shared_experts", "intermediate_size", "num_shared_experts"),
        t.windows(4096, _cohere_windows, sliding_window_pattern=4,
                  prefix_dense_sliding_window_pattern=1),
        keys={"rope_theta": 10000.0, "head_dim": 128, "num_shared_experts": 0,
              "expert_selection_fn": "softmax", "norm_topk_prob": True,
              "shared_expert_combination_strategy": "average", "first_k_dense_replace": None,
              "prefix_dense_intermediate_size": None}, only={"rms_norm_eps": (None,)},
        fields={"norm_eps": lambda o: o["rms_norm_eps"] or 1e-5,
                "router": itemgetter("expert_selection_fn"),
                "d_ff": lambda o: o["prefix_dense_intermediate_size"] or o["intermediate_size"],
                "normalize_expert_shares": lambda o: (
                    o["norm_topk_prob"] or o["expert_selection_fn"] == "softmax"),
                "expert_scale": _cohere_share, "layers_without_rotary": _cohere_unturned},
        scales={"blocks.*.feed_forward.shared.down": _cohere_share}),
    "hunyuan_v1_moe": t.llama(
        "HunYuanMoEV1", (290943, 4096, 11008, 32, 32, None, 2048), (1, 2), t.NORMS_AFTER_ROTARY,
        e.experts(1, 1, router="mlp.gate.wg", normalize_expert_shares=True),
        e.shared_expert("mlp.shared_mlp", "intermediate_size"),
        names={"num_experts_per_tok": "moe_topk"},
        fields={"n_experts_per_token": lambda options: options.same("num_experts_per_tok"),
                "n_experts": lambda options: options.same("num_experts")}),
    "mellum": t.llama(
        "Mellum", (98304, 2304, 7168, 28, 32, 4, 131072), (None, None), t.ATTENTION_BIAS,
        t.HEAD_NORMS, t.windows(1024, lambda _: ()), e.experts(64, 8, 896), e.EITHER_COUNT, e.TYPES,
        keys={"head_dim": 128, "norm_topk_prob": True, "rope_theta": 500000.0,
              "rope_local_base_freq": 10000.0}),
    "llama4_text": t.llama(
        "Llama4", (202048, 5120, 8192, 48, 40, 8, 131072), (1, 2), t.PAIRS, t.BIASES,
        e.experts(16, 1, count="num_local_experts", router="feed_forward.router"),
        e.shared_expert("feed_forward.shared_expert", "intermediate_size"), body="Llama4Text",
        keys={"rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 500000.0, "use_qk_norm": True,
              "intermediate_size_mlp": 16384, "moe_layers": None, "interleave_moe_layer_step": 1,
              "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
              "attn_temperature_tuning": True, "floor_scale": 8192, "layer_types": None},
        fields={"d_ff": itemgetter("intermediate_size_mlp"), "max_model_len": _llama4_length,
                "router": "sigmoid", "shares_scale_inputs": True, "dense_layers": _llama4_dense,
                "qk_norm": itemgetter("use_qk_norm"),
                "layers_without_qk_norm": lambda o: (
                    layers_without_rotary(o) if o["use_qk_norm"] else ()),
                "layers_without_rotary": layers_without_rotary},
        layers={"up": stacked("feed_forward.gate_proj", "feed_forward.up_proj"),
                "down": "feed_forward.down_proj", "query_norm": all_ones(), "key_norm": all_ones(),
                "expert_up": halves_transposed("feed_forward.experts.gate_up_proj"),
                "expert_down": transposed_experts("feed_forward.experts.down_proj")},
        # Norms of 1 come after the rotation: no amplitude, as yarn's, gets past them.
        prefixes=t.WITHIN, only={"mlp_bias": (False,)}, scalings=("linear", "llama3")),
    "gpt_oss": t.llama(
        "GptOss", (201088, 2880, 2880, 36, 64, 8, 131072), (None, None),
        t.windows(128, t.all_but_every(2)),
        e.experts(128, 4, count="num_local_experts", router="mlp.router", feed_forward_bias=True,
                  feed_forward="swiglu_clamped", normalize_expert_shares=True),
        keys={"head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True, "rope_theta": 150000.0,
              "rope_parameters": {
                  "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                  "truncate": False, "original_max_position_embeddings": 4096}},
        names={"num_local_experts": "num_experts|num_local_experts"},
        only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}, fields={"attention_sinks": True},
        layers={"sinks": "self_attn.sinks",
                "expert_down": transposed_experts("mlp.experts.down_proj"),
                "expert_up": transposed_experts("mlp.experts.gate_up_proj")}),
}
# fmt: on

"""The published decoders with latent attention, whose other tensors have Llama's names.

As in `llamas.py`, a row of LATENTS says how a family differs from Llama.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.llamas import experts as e
from kvasir.model.importing.families.llamas import traits as t
from kvasir.model.importing.families.options import Options, only, refuse
from kvasir.model.importing.families.positions import head_dim, latent_scale
from kvasir.model.importing.heads import last_pairs_apart, of_latents
from kvasir.model.importing.tensors import Source, or_zeros

_V2_ROUTING = ("greedy", "group_limited_greedy")


def _of_groups(key: str) -> Callable[[Options], Any]:
    """Return the field of groups, which the greedy router of DeepSeek-V2 leaves aside."""

    def field(options: Options) -> Any:
        if (method := options["topk_method"]) not in _V2_ROUTING:
            raise refuse("topk_method", method, only(_V2_ROUTING))
        return None if method == "greedy" else options[key]

    return field


def _latents(options: Options) -> dict[str, Any]:
    rank, width = options["q_lora_rank"], options["v_head_dim"]
    if width is None:
        width = options.whole("hidden_size") // options.whole("num_attention_heads")
    return {
        "rank": options.whole("kv_lora_rank"),
        "key_dim": options.whole("qk_nope_head_dim"),
        "value_dim": width,
        "query_rank": None if rank is None else options.whole("q_lora_rank"),
    }


def _latent_places(options: Options) -> Mapping[str, Source]:
    """Return the places of what makes queries and latents, which depend on the options."""
    of_query = "q_proj" if options["q_lora_rank"] is None else "q_b_proj"
    query, latent = (
        Source((f"layers.*.self_attn.{name}",)) for name in (of_query, "kv_a_proj_with_mqa")
    )
    if options["rope_interleave"]:
        query, latent = last_pairs_apart(query, "n_head"), last_pairs_apart(latent, "n_kv_head")
    return {"blocks.*.attention.query": query, "blocks.*.attention.latent": latent}


def _minicpm_residual(options: Options) -> float:
    depth = math.sqrt(options.whole("num_hidden_layers"))
    return options.number("scale_depth", depth) / depth


def _minicpm_logits(options: Options) -> float:
    width = options.whole("hidden_size")
    return options.number("dim_model_base", width) / width


_MINICPM_SCALES = {
    "blocks.*.attention.output": _minicpm_residual,
    "blocks.*.feed_forward.down": _minicpm_residual,
    "norm": _minicpm_logits,
}


# fmt: off
LATENT: t.Trait = {  # head_dim is here that of the turned part
    "without": ("qkv",),
    "keys": {"head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
             "v_head_dim": 128, "rope_interleave": True},
    "names": {"head_dim": "qk_rope_head_dim"},
    "only": {"attention_bias": (False,), "moe_layer_freq": (1,)},
    "variant": _latent_places,
    "fields": {
        "latents": _latents, "n_kv_head": 1, "rotary_dim": head_dim, "head_dim": lambda options:
            head_dim(options) + options.whole("kv_lora_rank"), "attention_scale": latent_scale},
    "layers": {
        "query_latent": "self_attn.q_a_proj", "query_latent_norm": "self_attn.q_a_layernorm",
        "latent_norm": "self_attn.kv_a_layernorm",
        "key_up": of_latents("self_attn.kv_b_proj", values=False),
        "value_up": of_latents("self_attn.kv_b_proj", values=True)}}
LATENTS: dict[str, Family] = {
    "minicpm3": t.llama(
        "MiniCPM3", (73448, 2560, 6400, 62, 40, 40, 32768), (1, 2), LATENT,
        keys={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "head_dim": 32,
              "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "v_head_dim": None,
              "rope_interleave": False, "embedding_multiplier": 12, "scale_depth": 1.4,
              "dim_model_base": 256},
        names={"embedding_multiplier": "scale_emb"}, only={"mlp_bias": (False,)},
        scalings=("linear", "llama3", "yarn", "longrope"), scales=_MINICPM_SCALES),
    "youtu": t.llama(
        "Youtu", (128256, 2048, 6144, 32, 16, 16, 131072), (128000, 128001), LATENT,
        keys={"tie_word_embeddings": True}),
    "deepseek_v2": t.llama(
        "DeepseekV2", (102400, 4096, 11008, 32, 32, None, 2048), (1, 2), LATENT,
        e.experts(64, None, 1407, count="n_routed_experts"), e.SHARED, e.FIRST_DENSE,
        keys={"n_shared_experts": 2, "routed_scaling_factor": 1.0, "n_group": None,
              "topk_group": None, "topk_method": "greedy"},
        only={"scoring_func": ("softmax", None), "norm_topk_prob": (False, None),
              "mlp_bias": (False,)},
        fields={"n_best_of_group": 1, "n_expert_groups": _of_groups("n_group"),
                "n_groups_per_token": _of_groups("topk_group")}),
    "deepseek_v3": t.llama(
        "DeepseekV3", (129280, 7168, 18432, 61, 128, 128, 4096), (0, 1), LATENT,
        e.experts(256, 8, 2048, count="n_routed_experts"), e.BALANCED, e.SHARED, e.FIRST_DENSE,
        keys={"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
              "first_k_dense_replace": 3}),
    "glm4_moe_lite": t.llama(
        "Glm4MoeLite", (154880, 2048, 10240, 47, 20, 20, 202752), (0, 1), LATENT,
        e.experts(64, 4, 1536, count="n_routed_experts"), e.BALANCED, e.SHARED, e.TYPES,
        keys={"rms_norm_eps": 1e-5, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
              "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
              "first_k_dense_replace": 1}),
    "axk1": t.llama(
        "AXK1", (163840, 7168, 18432, 61, 64, 64, 32768), (163691, 163691), LATENT,
        e.experts(192, 8, 2048, count="n_routed_experts"), e.BALANCED, e.SHARED, e.TYPES,
        keys={"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
              "first_k_dense_replace": 1}, fields={"mixture_norm": True},
        layers={"feed_forward_output_norm": "post_mlp_layernorm",
                "choice_bias": or_zeros("mlp.gate.e_score_correction_bias")},
        unused=("layers.*.post_mlp_layernorm.",)),
}
# fmt: on

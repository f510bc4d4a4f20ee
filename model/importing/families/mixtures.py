"""The published mixtures of experts whose tensors have Llama's names, but for those that they add.

As in `llamas.py`, a row of MIXTURES says how a family differs from Llama.
"""

from __future__ import annotations

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.families.traits import (
    ATTENTION_BIAS,
    HEAD_NORMS,
    MULTIPLIERS,
    NORMS_ACROSS_HEADS,
    NORMS_AFTER,
    Trait,
    all_but_every,
    every_layer,
    experts,
    llama,
    windows,
)
from kvasir.model.importing.tensors import in_halves, transposed_experts

_EITHER_COUNT: Trait = {"names": {"num_experts": "num_local_experts|num_experts"}}
_SHARES: Trait = {"keys": {"norm_topk_prob": False}}


def _dense_layers(options: Options) -> tuple[int, ...]:
    step, listed = options.whole("decoder_sparse_step"), options["mlp_only_layers"] or []
    layers = every_layer(options)
    if not isinstance(listed, list) or not all(layer in layers for layer in listed):
        raise refuse("mlp_only_layers", listed, f"a list of layers from 0 to {layers[-1]}")
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step)


def _dense_by_type(options: Options) -> tuple[int, ...]:
    kinds = options.layer_kinds("mlp_layer_types", ("dense", "sparse")) or []
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


_STEPS: Trait = {
    "keys": {"decoder_sparse_step": 1, "mlp_only_layers": None},
    "fields": {"dense_layers": _dense_layers},
}
_GRANITE_EXPERTS = experts(
    8, 2, count="num_local_experts", router="block_sparse_moe.router.layer",
    normalize_expert_shares=True,
) | {
    "layers": {
        "router": "block_sparse_moe.router.layer",
        "expert_up": in_halves("block_sparse_moe.input_linear"),
        "expert_down": "block_sparse_moe.output_linear",
    },
    "scales": {
        "blocks.*.feed_forward.expert_down": lambda o: o.number("residual_multiplier"),
    },
}  # fmt: skip


# fmt: off
MIXTURES: dict[str, Family] = {
    "mixtral": llama(
        "Mixtral", (32000, 4096, 14336, 32, 32, 8, 131072), (1, 2),
        experts(8, 2, count="num_local_experts", router="block_sparse_moe.gate",
                parts="block_sparse_moe.experts.#.{}", names=("w1", "w3", "w2"),
                normalize_expert_shares=True),
        keys={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None}),
    "qwen3_moe": llama(
        "Qwen3Moe", (151936, 2048, 6144, 24, 32, 4, 32768), (None, None), ATTENTION_BIAS,
        HEAD_NORMS, _SHARES, _STEPS, _EITHER_COUNT, experts(128, 8, 768)),
    "olmoe": llama(
        "Olmoe", (50304, 2048, 2048, 16, 16, None, 4096), (None, 50279), ATTENTION_BIAS,
        NORMS_ACROSS_HEADS, _SHARES, experts(64, 8), keys={"rms_norm_eps": 1e-5}),
    "flex_olmo": llama(
        "FlexOlmo", (100352, 4096, 11008, 32, 32, None, 4096), (None, 100257), ATTENTION_BIAS,
        NORMS_ACROSS_HEADS, NORMS_AFTER, _SHARES, experts(7, 5),
        keys={"rope_theta": 500000.0}, without=("attention_norm", "feed_forward_norm")),
    "granitemoe": llama(
        "GraniteMoe", (32000, 4096, 11008, 32, 32, None, 2048), (1, 2), ATTENTION_BIAS,
        MULTIPLIERS, _GRANITE_EXPERTS),
    "mellum": llama(
        "Mellum", (98304, 2304, 7168, 28, 32, 4, 131072), (None, None), ATTENTION_BIAS, HEAD_NORMS,
        windows(1024, lambda _: ()), experts(64, 8, 896), _EITHER_COUNT,
        keys={"head_dim": 128, "norm_topk_prob": True, "mlp_layer_types": None,
              "rope_theta": 500000.0, "rope_local_base_freq": 10000.0},
        fields={"dense_layers": _dense_by_type}),
    "gpt_oss": llama(
        "GptOss", (201088, 2880, 2880, 36, 64, 8, 131072), (None, None),
        windows(128, all_but_every(2)),
        experts(128, 4, count="num_local_experts", router="mlp.router", feed_forward_bias=True,
                feed_forward="swiglu_clamped", normalize_expert_shares=True),
        keys={
            "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True, "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096}},
        names={"num_local_experts": "num_experts|num_local_experts"},
        only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        fields={"attention_sinks": True},
        layers={
            "sinks": "self_attn.sinks", "expert_down": transposed_experts("mlp.experts.down_proj"),
            "expert_up": transposed_experts("mlp.experts.gate_up_proj")}),
}
# fmt: on

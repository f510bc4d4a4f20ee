"""Traits of mixtures of experts: where experts are, and which layers have them."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from kvasir.model.importing.families.llamas.traits import Trait, every_layer
from kvasir.model.importing.families.options import Options
from kvasir.model.importing.tensors import in_halves, of_experts, stacked


def experts(
    n_experts: int | None,
    n_chosen: int | None,
    d_expert: int | None = None,
    *,
    router: str = "mlp.gate",
    count: str = "num_experts",
    parts: str = "mlp.experts.#.{}_proj",
    names: tuple[str, str, str] = ("gate", "up", "down"),
    **fields: Any,
) -> Trait:
    """Return the trait of experts, each with tensors of its own, in place of one feed-forward.

    n_experts, n_chosen, d_expert: the defaults of the keys `count`, num_experts_per_tok and
    moe_intermediate_size; without the last experts are intermediate_size wide.
    """
    gate, up, down = (parts.format(name) for name in names)
    width: dict[str, Any] = {"d_expert": itemgetter("intermediate_size")}
    keys: dict[str, Any] = {count: n_experts, "num_experts_per_tok": n_chosen}
    if d_expert is not None:
        width, keys = {}, keys | {"moe_intermediate_size": d_expert}
    return {
        "keys": keys,
        "only": {"hidden_act": ("silu",)},
        "fields": {"n_experts": lambda options: options.whole(count), **width, **fields},
        "layers": {
            "router": router,
            "expert_up": of_experts(gate, up),
            "expert_down": of_experts(down),
        },
    }


def shared_expert(
    place: str,
    width: str = "moe_intermediate_size",
    count: str | None = None,
    gate: str | None = None,
) -> Trait:
    """Return the trait of an expert of every token at a place, with a gate of it at another.

    width, count: keys of its width, and of the times that it is as wide; 0 or null is none of them.
    """

    def wide(options: Options) -> int | None:
        n = 1 if count is None else options.whole(count, least=0) if options[count] else 0
        return n * options.whole(width, least=0) or None

    parts = {
        "shared.up": stacked(f"{place}.gate_proj", f"{place}.up_proj"),
        "shared.down": f"{place}.down_proj",
    }
    return {
        "fields": {"d_shared_expert": wide, "shared_expert_gate": gate is not None},
        "layers": parts if gate is None else parts | {"shared_gate": gate},
    }


def _dense_layers(options: Options) -> tuple[int, ...]:
    step, listed = options.whole("decoder_sparse_step"), options.layers("mlp_only_layers")
    return tuple(i for i in every_layer(options) if i in listed or (i + 1) % step)


def dense_by_type(options: Options) -> tuple[int, ...]:
    """Return the layers that mlp_layer_types names or, without it, the first ones."""
    if options["mlp_layer_types"] is None:
        return dense_first(options)
    return options.layers_of("dense", "sparse", key="mlp_layer_types")


def dense_first(options: Options) -> tuple[int, ...]:
    """Return as many of the first layers as first_k_dense_replace says."""
    key = "first_k_dense_replace"
    first = options.whole(key, least=0) if options.get(key) is not None else 0
    return tuple(every_layer(options)[:first])


# fmt: off
EITHER_COUNT: Trait = {"names": {"num_experts": "num_local_experts|num_experts"}}
W123: dict[str, Any] = {"count": "num_local_experts", "router": "block_sparse_moe.gate",
                         "parts": "block_sparse_moe.experts.#.{}", "names": ("w1", "w3", "w2")}
SHARES: Trait = {"keys": {"norm_topk_prob": False}}
STEPS: Trait = {"keys": {"decoder_sparse_step": 1, "mlp_only_layers": None},
                   "fields": {"dense_layers": _dense_layers}}
TYPES: Trait = {"keys": {"mlp_layer_types": None}, "fields": {"dense_layers": dense_by_type}}
FIRST_DENSE: Trait = {"keys": {"first_k_dense_replace": 0},
                         "fields": {"dense_layers": dense_first}}
# Experts with a learned bias for their choice (DeepSeek-V3, 2024).
BIASED: Trait = {"fields": {"router": "sigmoid", "choice_bias": "scores"}}
BALANCED: Trait = BIASED | {
    "keys": {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "only": {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
    "layers": {"choice_bias": "mlp.gate.e_score_correction_bias"}}
SHARED = shared_expert("mlp.shared_experts", count="n_shared_experts")
GRANITE_EXPERTS: Trait = experts(
    8, 2, count="num_local_experts", normalize_expert_shares=True,
) | {
    "layers": {"router": "block_sparse_moe.router.layer",
               "expert_up": in_halves("block_sparse_moe.input_linear"),
               "expert_down": "block_sparse_moe.output_linear"},
    "scales": {
        f"blocks.*.feed_forward.{module}": lambda options: options.number("residual_multiplier")
        for module in ("expert_down", "shared.down")}}
GRANITE_SHARED: Trait = shared_expert("shared_mlp", "shared_intermediate_size") | {
    "keys": {"shared_intermediate_size": 0},
    "layers": {"shared.up": "shared_mlp.input_linear", "shared.down": "shared_mlp.output_linear"}}
# fmt: on

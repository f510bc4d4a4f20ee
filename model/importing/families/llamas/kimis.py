"""The published decoders with Kimi's delta attention beside latent attention.

As in `llamas.py`, a row of KIMIS says how a family differs from Llama. Modules have the names of
transformers' classes, and files often have others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvasir.model.configuration.recurrences import LEAST_LOG_DECAY
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.llamas import experts as e
from kvasir.model.importing.families.llamas import traits as t
from kvasir.model.importing.families.llamas.latents import LATENT
from kvasir.model.importing.families.llamas.recurrent import (
    MOST_STEPS,
    delta_layers,
    side_by_side,
)
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.tensors import Source

_KINDS = ("full_attention", "linear_attention")
_LISTS = ("kda_layers", "full_attn_layers")


def _kimi_layers(options: Options) -> tuple[int, ...]:
    """Return the recurrent layers, which two lists may count from 1."""
    layers, lists = t.every_layer(options), {name: options[name] for name in _LISTS}
    if options["layer_types"] is None:
        recurrent = [layer for layer in layers if layer == 0 or layer % 4]
        if any(one is not None for one in lists.values()):
            are_lists = all(isinstance(one, list) for one in lists.values())
            listed = [i for one in lists.values() for i in one] if are_lists else []
            are_whole = all(type(i) is int for i in listed)
            if not are_whole or sorted(listed) != [layer + 1 for layer in layers]:
                wanted = f"layers 1 to {len(layers)}, each in one of two lists"
                raise refuse("linear_attn_config", lists, wanted)
            recurrent = [i - 1 for i in options["kda_layers"]]
        options["layer_types"] = [_KINDS[layer in recurrent] for layer in layers]
    return options.layers_of("linear_attention", "full_attention")


def _least_decay(options: Options) -> float | None:
    if not options["kda_safe_gate"]:
        return None
    least = options["kda_lower_bound"]
    if type(least) not in (int, float) or not LEAST_LOG_DECAY <= least < 0:
        raise refuse("kda_lower_bound", least, f"a number below 0, from {LEAST_LOG_DECAY:g}")
    return float(least)


def _rule(
    *, of_rank: bool, least_decay: Callable[[Options], float | None] = lambda _: None
) -> Callable[[Options], dict[str, Any] | None]:
    """Return the function that reads the recurrence.

    of_rank: decays and gates are made of as many numbers each as a head has channels.
    """

    def recurrence(options: Options) -> dict[str, Any] | None:
        n_head, width = options.whole("linear_num_heads"), options.whole("linear_head_dim")
        rule = {
            "kind": "delta_rule",
            "kernel": options.whole("linear_conv_kernel_dim", least=2, most=MOST_STEPS),
            **dict.fromkeys(("n_head", "n_key_head"), n_head),
            **dict.fromkeys(("key_dim", "value_dim"), width),
            "output_gate": "sigmoid",
            "decays_by_channel": True,
            "least_log_decay": least_decay(options),
            "rank": width if of_rank else None,
        }
        # Which recurrent_layers has filled.
        return rule if "linear_attention" in options["layer_types"] else None

    return recurrence


def _delta(gates: str, decays: str, decay_shape: Callable[[int], tuple[int, ...]]) -> t.Trait:
    """Return the trait of the recurrence, whose modules are attention's.

    gates, decays: what makes them of a token. decay_shape: of as many numbers as there are heads.
    """
    read = ("q_proj", "k_proj", "v_proj", gates, "b_proj", decays)
    return {
        "keys": {
            "layer_types": None,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        "layers": {
            "recurrence.input": side_by_side(*(f"self_attn.{part}" for part in read)),
            "recurrence.convolution": side_by_side(*(f"self_attn.{p}_conv1d" for p in "qkv")),
            "recurrence.log_decay": Source(
                ("self_attn.A_log",),
                lambda shape, _: [decay_shape(shape[0])],
                lambda tensors, _: tensors[0].flatten(),
            ),
            "recurrence.decay_bias": "self_attn.dt_bias",
            "recurrence.norm": "self_attn.o_norm",
            "recurrence.output": "self_attn.o_proj",
        },
    }


# fmt: off
_NAMES = {  # in both
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts", "num_local_experts": "num_experts"}
KIMIS: dict[str, Family] = {
    "kimi_linear": t.llama(
        "KimiLinear", (163840, 2304, 9216, 27, 32, 32, 1048576), (163584, 163586), LATENT,
        e.experts(256, 8, 1024, count="num_local_experts", parts="mlp.experts.#.{}",
                  names=("w1", "w3", "w2")),
        e.BALANCED, e.SHARED, e.TYPES, _delta("g_a_proj", "f_a_proj", lambda n: (1, 1, n, 1)),
        keys={"rms_norm_eps": 1e-5, "n_shared_experts": 1, "routed_scaling_factor": 2.446,
              "q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 1}
        | dict.fromkeys(_LISTS),
        names=_NAMES | {key: f"linear_attn_config.{name}" for key, name in (
            ("linear_head_dim", "head_dim"), ("linear_num_heads", "num_heads"),
            ("linear_conv_kernel_dim", "short_conv_kernel_size"), *((k, k) for k in _LISTS))},
        only={"rope_interleave": (False, None), "mla_use_nope": (True, None),
              "mla_use_output_gate": (False, None),
              "moe_router_activation_func": ("sigmoid", None),
              "linear_attn_config.use_full_rank_gate": (False, None),
              "linear_attn_config.gate_lower_bound": (None,)},
        former_names={"block_sparse_moe": "mlp"}, without=tuple(t.ROPE),
        fields={"position": "none", "attention_scale": None, "recurrent_layers": _kimi_layers,
                "recurrence": _rule(of_rank=True)},
        layers={"recurrence.gate": "self_attn.g_b_proj", "recurrence.decay": "self_attn.f_b_proj"}),
    "bailing_hybrid": t.llama(
        "BailingHybrid", (157184, 2560, 6144, 42, 32, 32, 262144), (None, 156895), LATENT,
        e.experts(512, 8, 768, count="num_local_experts"), e.BALANCED, e.SHARED, e.TYPES,
        _delta("g_proj", "f_proj", lambda n: (n,)), also=("BailingMoeV3ForCausalLM",),
        keys={"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
              "q_lora_rank": None, "rope_theta": 6000000.0, "first_k_dense_replace": 2,
              "full_attention_interval": 6, "kda_safe_gate": True, "kda_lower_bound": -5.0,
              "partial_rotary_factor": 1.0},  # of heads of other models: this one's turn a part
        names=_NAMES | {
            "full_attention_interval": "layer_group_size",
            "linear_num_heads": "linear_num_heads|num_attention_heads",
            "linear_head_dim": "linear_head_dim|head_dim",
            "linear_conv_kernel_dim": "linear_conv_kernel_dim|short_conv_kernel_size"},
        only={"rope_interleave": (True,), "kda_safe_gate": (True, False),
              "gated_attention_proj_granularity_type": ("head_wise", None),
              "score_function": ("sigmoid", None), "moe_router_enable_expert_bias": (True, None)}
        | dict.fromkeys(("linear_silu", "no_kda_lora"), (True, None))
        | dict.fromkeys(("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"), (None,))
        | dict.fromkeys(("use_kda_lora", "use_mla_nope", "use_bias", "use_qkv_bias", "use_nGPT",
                         "up_proj_norm", "value_norm", "scale_router_input"), (False, None)),
        former_names={"attention": "self_attn", "dense": "o_proj",
                      "word_embeddings": "embed_tokens", "expert_bias": "e_score_correction_bias"},
        fields={"recurrent_layers": delta_layers,
                "recurrence": _rule(of_rank=False, least_decay=_least_decay),
                "attention_gate": True, "attention_gate_by_head": True},
        layers={"gate": "self_attn.g_proj"}),
}
# fmt: on

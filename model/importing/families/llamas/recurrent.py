"""The published decoders with recurrent layers, whose other tensors have Llama's names.

As in `llamas.py`, a row of RECURRENT says how a family differs from Llama. Modules of a recurrent
layer are named `recurrence.…`, after those of its `Mixer`. Those with Mamba-2 are in `mambas.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import DeltaRule
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.llamas import experts as e
from kvasir.model.importing.families.llamas import traits as t
from kvasir.model.importing.families.options import Options
from kvasir.model.importing.heads import repeated_for_heads
from kvasir.model.importing.tensors import Source, or_zeros, plus_one, stacked
from kvasir.model.tensor_files import Shape

MOST_STEPS = 4096  # of a convolution, and of a width


def _lfm2_layers(options: Options) -> tuple[int, ...]:
    """Return the layers of convolutions, which layer_types or full_attn_idxs say."""
    if options["layer_types"] is None and options["full_attn_idxs"] is not None:
        listed, kinds = options.layers("full_attn_idxs"), ("conv", "full_attention")
        options["layer_types"] = [kinds[i in listed] for i in t.every_layer(options)]
    return options.layers_of("conv", "full_attention")


def _short_convolution(options: Options) -> dict[str, Any] | None:
    if "conv" not in (options["layer_types"] or ()):  # which recurrent_layers has filled
        return None
    kernel = options.whole("conv_L_cache", least=2, most=MOST_STEPS)
    return {"kind": "short_convolution", "kernel": kernel, "bias": options["conv_bias"]}


def _lfm2_width(options: Options) -> int:
    """Return the width of feed-forwards, which may be given before it is rounded (LFM2)."""
    width = options.whole("intermediate_size")
    if not options["block_auto_adjust_ff_dim"]:
        return width
    width, multiple = int(2 * width / 3), options.whole("block_multiple_of", most=MOST_STEPS)
    if options["block_ffn_dim_multiplier"] is None:
        return width
    return -(-int(options.number("block_ffn_dim_multiplier") * width) // multiple) * multiple


def delta_layers(options: Options) -> tuple[int, ...]:
    """Return the recurrent layers in layer_types, which are set if absent."""
    kinds = ("full_attention", "linear_attention")
    if options["layer_types"] is None:
        every = options.whole("full_attention_interval")
        layers = t.every_layer(options)
        options["layer_types"] = [kinds[(layer + 1) % every > 0] for layer in layers]
    return options.layers_of("linear_attention", "full_attention")


def _delta_rule(options: Options) -> dict[str, Any] | None:
    if not delta_layers(options):
        return None
    return {
        "kind": "delta_rule",
        "kernel": options.whole("linear_conv_kernel_dim", least=2, most=MOST_STEPS),
        "n_head": options.whole("linear_num_value_heads"),
        "n_key_head": options.whole("linear_num_key_heads"),
        "key_dim": options.whole("linear_key_head_dim"),
        "value_dim": options.whole("linear_value_head_dim"),
    }


def _olmo_layers(options: Options) -> tuple[int, ...]:
    """Return the recurrent layers, and set the sizes of the delta rule that are absent."""
    heads, width = options.whole("num_attention_heads"), options.whole("hidden_size")
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        options[key] = heads if options[key] is None else options[key]
    if options["linear_key_head_dim"] is None:
        options["linear_key_head_dim"] = int(0.75 * width / options.whole("linear_num_key_heads"))
    if options["linear_value_head_dim"] is None:
        options["linear_value_head_dim"] = 2 * options.whole("linear_key_head_dim")
    options["full_attention_interval"] = min(4, len(t.every_layer(options)))
    return delta_layers(options)


def _olmo_rule(options: Options) -> dict[str, Any] | None:
    rule, doubled = _delta_rule(options), options["linear_allow_neg_eigval"]
    return rule and {**rule, "doubled_rates": doubled, "norm_eps": 1e-5}


def _olmo_position(options: Options) -> str:
    given = options["rope_parameters"]
    without = isinstance(given, dict) and given.get("rope_theta", 0) is None
    return "none" if without else "rotary"


def _rule_of(config: TransformerConfig) -> DeltaRule:
    assert isinstance(config.recurrence, DeltaRule)
    return config.recurrence


def side_by_side(*modules: str) -> Source:
    """Return the source of what reads a token: each part of the delta rule has a matrix.

    Queries, keys and values have one together, or three; three modules are those alone.
    """

    def shapes(shape: Shape, config: TransformerConfig) -> list[Shape]:
        rule = _rule_of(config)
        every = rule.widths, rule.parts, (*rule.widths, *rule.parts[1:])
        return [(n, *shape[1:]) for rows in every if len(rows) == len(modules) for n in rows]

    return Source(modules, shapes, lambda tensors, _: torch.cat(tensors))


def _by_key_head(*modules: str) -> Source:
    """Return the same where rows of two matrices are grouped by the heads of keys."""

    def shapes(shape: Shape, config: TransformerConfig) -> list[Shape]:
        parts = _rule_of(config).parts
        return [(sum(some), *shape[1:]) for some in (parts[:2], parts[2:])]

    def join(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        rule = _rule_of(config)
        widths = [width // rule.n_key_head for width in (*rule.widths, *rule.parts[1:])]
        groups = [tensor.unflatten(0, (rule.n_key_head, -1)) for tensor in tensors]
        split = [*groups[0].split(widths[:4], dim=1), *groups[1].split(widths[4:], dim=1)]
        return torch.cat([part.flatten(0, 1) for part in split])

    return Source(modules, shapes, join)


def _with_gates(*, gates: bool) -> Source:
    """Return the source of attention's gate, or of queries, keys and values.

    In the file a head's queries are followed by its gates.
    """

    def shapes(shape: Shape, config: TransformerConfig) -> list[Shape]:
        rows = [2 * config.n_head, config.n_kv_head, config.n_kv_head][: 1 if gates else 3]
        return [(n * config.head_dim, *shape[1:]) for n in rows]

    def join(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        heads = tensors[0].unflatten(0, (config.n_head, 2, config.head_dim))
        queries, of_gates = (part.flatten(0, 1) for part in heads.unbind(1))
        return of_gates if gates else torch.cat((queries, *tensors[1:]))

    modules = [f"self_attn.{part}_proj" for part in "qkv"]
    return Source(tuple(modules[: 1 if gates else 3]), shapes, join)


def _lfm3_layers(kind: str) -> Callable[[Options], tuple[int, ...]]:
    """Return the function that returns the layers of a kind."""

    def layers(options: Options) -> tuple[int, ...]:
        if options["layer_types"] is None:
            order = ("sliding_attention", "conv", "full_attention", "conv")
            options["layer_types"] = [order[i % 4] if i else "conv" for i in t.every_layer(options)]
        return options.layers_of(kind, "conv", "sliding_attention", "full_attention")

    return layers


_lfm3_windows = _lfm3_layers("sliding_attention")
# fmt: off
_LFM2: t.Trait = {
    "keys": {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": True,
             "layer_types": None, "full_attn_idxs": None, "conv_L_cache": 3, "conv_bias": False},
    "names": {"rms_norm_eps": "norm_eps",
              "tie_word_embeddings": "tie_embedding|tie_word_embeddings"},
    "norm": "embedding_norm",
    "fields": {"recurrent_layers": _lfm2_layers, "recurrence": _short_convolution,
               "qk_norm": True},
    "layers": {
        "attention_norm": "operator_norm", "feed_forward_norm": "ffn_norm",
        "output": "self_attn.out_proj",
        "query_norm": repeated_for_heads("self_attn.q_layernorm"),
        "key_norm": repeated_for_heads("self_attn.k_layernorm"),
        "up": stacked("feed_forward.w1", "feed_forward.w3"), "down": "feed_forward.w2",
        "recurrence.input": "conv.in_proj", "recurrence.output": "conv.out_proj",
        "recurrence.convolution": "conv.conv"}}
_DELTA: t.Trait = {
    "keys": {"layer_types": None, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
             "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
             "linear_num_value_heads": 32},
    "fields": {"recurrent_layers": delta_layers, "recurrence": _delta_rule},
    "only": {"hidden_act": ("silu",)},
    "layers": {
        "recurrence.input": side_by_side(
            *(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))),
        "recurrence.convolution": "linear_attn.conv1d", "recurrence.norm": "linear_attn.norm",
        "recurrence.log_decay": "linear_attn.A_log", "recurrence.decay_bias": "linear_attn.dt_bias",
        "recurrence.output": "linear_attn.out_proj"}}
_QWEN: t.Trait = {  # of 2025 and later: norms multiply by 1 + weight, and attention has a gate
    "keys": {"attention_bias": False, "head_dim": 256, "partial_rotary_factor": 0.25,
             "mrope_section": None, "mrope_interleaved": None},
    "norm": plus_one("norm"), "prefixes": t.WITHIN, "unused": ("mtp.",),
    "fields": {"qk_norm": True, "attention_gate": True},
    "layers": {
        "attention_norm": plus_one(t.IN), "feed_forward_norm": plus_one(t.MIDDLE),
        "query_norm": repeated_for_heads(plus_one("self_attn.q_norm")),
        "key_norm": repeated_for_heads(plus_one("self_attn.k_norm")),
        "qkv": _with_gates(gates=False), "gate": _with_gates(gates=True)}}
_QWEN_SHARED = e.shared_expert(
    "mlp.shared_expert", "shared_expert_intermediate_size", gate="mlp.shared_expert_gate")
RECURRENT: dict[str, Family] = {
    "lfm2": t.llama(
        "Lfm2", (65536, 2560, 12288, 32, 32, 8, 128000), (1, 2), _LFM2,
        keys={"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
              "block_auto_adjust_ff_dim": True},
        names={"intermediate_size": "block_ff_dim|intermediate_size"},
        fields={"d_ff": _lfm2_width}),
    "lfm2_moe": t.llama(
        "Lfm2Moe", (65536, 2048, 7168, 32, 32, 8, 128000), (1, 2), _LFM2,
        e.experts(32, 4, 1792, router="feed_forward.gate", parts="feed_forward.experts.#.{}",
                  names=("w1", "w3", "w2")),
        keys={"num_dense_layers": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
              "use_expert_bias": True},
        fields={"router": "sigmoid",
                "choice_bias": lambda o: "scores" if o["use_expert_bias"] else None,
                "dense_layers": lambda o: tuple(range(o.whole("num_dense_layers", least=0)))},
        layers={"choice_bias": "feed_forward.expert_bias"}),
    "lfm3": t.llama(
        "Lfm3", (128000, 2048, 7680, 24, 16, 4, 128000), (124894, 124900), _LFM2, t.ATTENTION_BIAS,
        keys={"conv_L_cache": 7, "head_dim": 128, "sliding_window": 256, "use_sandwich_norm": True,
              "use_attention_gate": True, "rope_local_base_freq": 10000.0,
              "partial_rotary_factor": 1.0, "rope_parameters": {
                  "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                  "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
                                     "partial_rotary_factor": 0.5}}},
        scalings=("proportional",), former_names={"gate_proj": "g_proj"},
        fields={"recurrent_layers": _lfm3_layers("conv"), "sliding_window_layers": _lfm3_windows,
                "attention_gate": itemgetter("use_attention_gate"),
                "attention_gate_by_head": itemgetter("use_attention_gate"),
                "norm_placement": lambda o: "both" if o["use_sandwich_norm"] else "pre"},
        layers={"query_norm": repeated_for_heads("self_attn.q_norm"),
                "key_norm": repeated_for_heads("self_attn.k_norm"),
                "gate": or_zeros("self_attn.g_proj"),
                "output": "self_attn.o_proj",
                "attention_output_norm": "post_operator_norm",
                "feed_forward_output_norm": "post_ffn_norm"}),
    "qwen3_5_text": t.llama(
        "Qwen3_5", (248320, 4096, 12288, 32, 16, 4, 32768), (None, None), _DELTA, _QWEN,
        body="Qwen3_5Text"),
    "qwen3_5_moe_text": t.llama(
        "Qwen3_5Moe", (248320, 2048, None, 40, 16, 2, 32768), (None, None), _DELTA, _QWEN,
        e.experts(256, 8, 512, normalize_expert_shares=True), _QWEN_SHARED,
        body="Qwen3_5MoeText", keys={"shared_expert_intermediate_size": 512},
        fields={"d_ff": lambda options: options.whole("moe_intermediate_size")}),
    "qwen3_next": t.llama(
        "Qwen3Next", (151936, 2048, 5632, 48, 16, 2, 32768), (None, None), _DELTA, _QWEN,
        e.experts(512, 10, 512), e.STEPS, _QWEN_SHARED,
        keys={"shared_expert_intermediate_size": 512, "norm_topk_prob": True},
        layers={"recurrence.input": _by_key_head(
            "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")}),
    "olmo_hybrid": t.llama(
        "OlmoHybrid", (100352, 3840, 11008, 32, 30, None, 65536), (None, 100257), t.ATTENTION_BIAS,
        t.NORMS_ACROSS_HEADS, _DELTA,
        former_names={"attention_layer_norm": t.IN, "feedforward_layer_norm": t.MIDDLE},
        keys=dict.fromkeys(f"linear_{key}" for key in (
            "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
        | {"linear_allow_neg_eigval": True},
        fields={"position": _olmo_position, "recurrent_layers": _olmo_layers,
                "recurrence": _olmo_rule, "norm_placement": "output_of_attention"},
        layers={"attention_output_norm": t.MIDDLE, "feed_forward_output_norm": t.LAST,
                "recurrence.input": side_by_side(
                    *(f"linear_attn.{part}_proj" for part in "qkvgba")),
                "recurrence.convolution": side_by_side(
                    *(f"linear_attn.{part}_conv1d" for part in "qkv")),
                "recurrence.norm": "linear_attn.o_norm",
                "recurrence.output": "linear_attn.o_proj"}),
}
# fmt: on

"""The published decoders with Mamba-2, as those in `recurrent.py` are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import Mamba2
from kvasir.model.importing.families.family import MOST_LAYERS, Family
from kvasir.model.importing.families.llamas import experts as e
from kvasir.model.importing.families.llamas import traits as t
from kvasir.model.importing.families.llamas.recurrent import MOST_STEPS
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.families.positions import head_dim
from kvasir.model.importing.tensors import Source, stacked

# Of the steps of Mamba-2: transformers limits them in prompts, and not in tokens after these.
_UNLIMITED = [None, *([0.0, infinity] for infinity in (math.inf, {"__float__": "Infinity"}))]
_MAMBA2 = {"input": "in_proj", "convolution": "conv1d", "norm": "norm", "output": "out_proj"}
_MAMBA2 |= {"log_decay": "A_log", "step_bias": "dt_bias", "skip": "D"}
_MAMBA2_NAMES = {
    "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_d_state": "state_size",
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand",
    "mamba_proj_bias": "use_bias", "mamba_conv_bias": "use_conv_bias",
    "rms_norm_eps": "layer_norm_epsilon",
}  # fmt: skip

_MULTIPLIED = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")


def _bamba_layers(options: Options) -> tuple[int, ...]:
    """Return the recurrent layers: those that attn_layer_indices do not list."""
    listed = options.layers("attn_layer_indices")
    return tuple(layer for layer in t.every_layer(options) if layer not in listed)


def _granite_layers(options: Options) -> tuple[int, ...]:
    recurrent, others = ("mamba", "linear_attention"), ("attention", "full_attention")
    kinds = options.layer_kinds("layer_types", (*recurrent, *others))
    every = enumerate([recurrent[0]] * len(t.every_layer(options)) if kinds is None else kinds)
    return tuple(layer for layer, kind in every if kind in recurrent)


def _granite_position(options: Options) -> str:
    position = options["position_embedding_type"]
    if position not in ("rope", "nope", None):
        raise refuse("position_embedding_type", position, "only 'rope'")
    return "rotary" if position == "rope" else "none"


def _of_experts(key: str) -> Callable[[Options], int | None]:
    """Return the function that reads a number of models with experts, and gives others none."""
    return lambda o: o.whole(key) if o.whole("num_local_experts", least=0) else None


def _mamba2(
    layers: Callable[[Options], tuple[int, ...]], place: str = "mamba", *, expands: bool = True
) -> t.Trait:
    """Return the trait of Mamba-2 in some layers, with its modules at a place of them.

    expands: mamba_expand says how many channels the heads have together.
    """

    def recurrence(options: Options) -> dict[str, Any] | None:
        if not layers(options):
            return None
        n_head = options.whole("mamba_n_heads")
        width = options.whole("mamba_expand") * options.whole("hidden_size")
        if options.get("mamba_d_ssm") is not None:
            width = options.whole("mamba_d_ssm")
        normed, before = options.get("mamba_rms_norm", True), "mamba_norm_before_gate"
        if normed and options.get(before):
            raise refuse(before, options[before], "only False with mamba_rms_norm")
        head_dim = width // n_head if expands else options.whole("mamba_d_head")
        if options["mamba_d_head"] not in ("auto", head_dim) or (
            expands and head_dim * n_head != width
        ):
            wanted = f"{n_head} of them in {width} channels (mamba_expand)"
            raise refuse("mamba_d_head", options["mamba_d_head"], wanted)
        return {
            "kind": "mamba2",
            "kernel": options.whole("mamba_d_conv", least=2, most=MOST_STEPS),
            "n_head": n_head,
            "head_dim": head_dim,
            "d_state": options.whole("mamba_d_state"),
            "n_group": options.whole("mamba_n_groups"),
            "bias": options["mamba_proj_bias"],
            "convolution_bias": options["mamba_conv_bias"],
            "least_step": options.number("time_step_min") if "time_step_min" in options else None,
            "normed": normed,
        }

    keys = {"n_heads": 128, "d_head": "auto", "d_state": 256, "n_groups": 1, "d_conv": 4}
    keys |= {"expand": 2, "proj_bias": False, "conv_bias": True}
    return {
        "keys": {f"mamba_{key}": value for key, value in keys.items()},
        "only": {"hidden_act": ("silu",), "time_step_limit": tuple(_UNLIMITED)},
        "fields": {"recurrence": recurrence, "recurrent_layers": layers},
        "layers": {f"recurrence.{ours}": f"{place}.{name}" for ours, name in _MAMBA2.items()},
    }


_RECURRENT = ("M", "mamba", "linear_attention")


def _nemotron_blocks(options: Options) -> list[tuple[bool, int, int | None]]:
    """Return the blocks: whether a mixer is recurrent, its layer, and its feed-forward's."""
    key, kinds = "hybrid_override_pattern", options["hybrid_override_pattern"]
    if options["layer_types"] is not None:
        key, kinds = "layers_block_type", options["layer_types"]
    blocks = list[tuple[bool, int, int | None]]()
    for i, kind in enumerate(kinds if isinstance(kinds, list | str) else ()):
        if kind in (*_RECURRENT, "*", "attention", "full_attention"):
            blocks.append((kind in _RECURRENT, i, None))
        elif kind in ("-", "mlp") and blocks and blocks[-1][2] is None:
            blocks[-1] = (*blocks[-1][:2], i)
        else:
            raise refuse(key, kinds, "mamba, attention, and mlp after these, without experts")
    if not 0 < len(blocks) <= MOST_LAYERS:
        raise refuse(key, kinds, f"a list of 1 to {MOST_LAYERS} mixers")
    return blocks


def _nemotron_layers(*, recurrent: bool) -> Callable[[Options], tuple[int, ...]]:
    """Return the function that returns the recurrent layers, or those without a feed-forward."""
    return lambda options: tuple(
        layer
        for layer, (is_recurrent, _, feed_forward) in enumerate(_nemotron_blocks(options))
        if (is_recurrent if recurrent else feed_forward is None)
    )


def _nemotron_places(options: Options) -> dict[str, Source]:
    """Return the place of each module: a block of ours is one layer of the file, or two."""
    places = dict[str, str | Source]()
    for layer, (is_recurrent, mixer, feed_forward) in enumerate(_nemotron_blocks(options)):
        ours, theirs = f"blocks.{layer}", f"layers.{mixer}"
        places[f"{ours}.attention_norm"] = f"{theirs}.norm"
        if is_recurrent:
            places |= {f"{ours}.recurrence.{k}": f"{theirs}.mixer.{v}" for k, v in _MAMBA2.items()}
        else:
            places[f"{ours}.attention.qkv"] = stacked(*(f"{theirs}.mixer.{p}_proj" for p in "qkv"))
            places[f"{ours}.attention.output"] = f"{theirs}.mixer.o_proj"
        if feed_forward is not None:
            places[f"{ours}.feed_forward_norm"] = f"layers.{feed_forward}.norm"
            for part in ("up", "down"):
                name = f"layers.{feed_forward}.mixer.{part}_proj"
                places[f"{ours}.feed_forward.{part}"] = name
    return {ours: Source((p,)) if isinstance(p, str) else p for ours, p in places.items()}


def _multipliers(options: Options, key: str, count: int) -> list[float]:
    """Return the positive numbers that a key lists; null is ones."""
    given = [1.0] * count if options[key] is None else options[key]
    if not isinstance(given, list) or len(given) != count:
        raise refuse(key, given, f"{count} positive numbers")
    return [Options({key: one}, {}).number(key) for one in given]


def _falcon_places(options: Options) -> dict[str, Source]:
    """Return the places of matrices of which only some rows are multiplied, or not all alike."""
    parts = _multipliers(options, "ssm_multipliers", 5)
    of_input, layer = options.number("ssm_in_multiplier"), "layers.*."
    of_gate, _ = _multipliers(options, "mlp_multipliers", 2)

    def join_input(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        rule = config.recurrence
        assert isinstance(rule, Mamba2)
        widths = (rule.widths[0], *rule.widths, rule.n_head)
        factors = [torch.full((n, 1), of_input * by) for n, by in zip(widths, parts, strict=True)]
        return tensors[0].float() * torch.cat(factors)

    def join_up(tensors: list[Tensor], _: TransformerConfig) -> Tensor:
        return torch.cat((tensors[0].float() * of_gate, tensors[1].float()))

    whole = Source((f"{layer}mamba.in_proj",))
    up = stacked(f"{layer}feed_forward.gate_proj", f"{layer}feed_forward.up_proj")
    return {
        "blocks.*.recurrence.input": replace(whole, join=join_input, in_float32=True),
        "blocks.*.feed_forward.up": replace(up, join=join_up, in_float32=True),
    }


def every(options: Options) -> tuple[int, ...]:
    """Return all layers, as a field has them."""
    return tuple(t.every_layer(options))


# fmt: off
ALONE: t.Trait = {  # a recurrence is all that layers have
    "prefixes": ("backbone.",), "former_names": {"embedding": "embeddings"},
    "norm": "norm_f", "modules": {"embedding": "embeddings"},
    "without": (*t.ROPE, "head_dim", "qkv", "output", "feed_forward_norm", "up", "down"),
    "keys": {"rms_norm_eps": 1e-5},
    # Attention and feed-forwards have sizes although no layer has one.
    "fields": {"position": "none", "n_head": 1, "n_kv_head": 1, "head_dim": 8,
               "d_ff": lambda options: options.whole("hidden_size"),
               "layers_without_feed_forward": every},
    "layers": {"attention_norm": "norm"}}
MAMBAS: dict[str, Family] = {
    "bamba": t.llama(
        "Bamba", (128000, 4096, 14336, 32, 32, 8, 262144), (1, 2), t.BIASES, _mamba2(_bamba_layers),
        norm="final_layernorm",
        keys={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attn_layer_indices": None},
        only={"partial_rotary_factor": (0.5,)},  # transformers reads no other
        layers={"feed_forward_norm": "pre_ff_layernorm", "down": "feed_forward.down_proj",
                "up": stacked("feed_forward.gate_proj", "feed_forward.up_proj")}),
    "falcon_h1": t.llama(
        "FalconH1", (128000, 4096, 14336, 32, 32, 8, 8192), (1, 2), t.BIASES,
        _mamba2(every), norm="final_layernorm", variant=_falcon_places,
        keys={f"{part}_multiplier": 1.0 for part in _MULTIPLIED}
        | {"rms_norm_eps": 1e-5, "ssm_multipliers": None, "mlp_multipliers": None,
           "mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True},
        only=dict.fromkeys(("attention_bias", "mamba_proj_bias", "projectors_bias"), (False,)),
        fields={"recurrence_beside_attention": True,
                "attention_scale": lambda o: o.number("attention_in_multiplier") ** 2
                * o.number("key_multiplier") / math.sqrt(head_dim(o))},
        layers={"feed_forward_norm": "pre_ff_layernorm", "down": "feed_forward.down_proj",
                "up": stacked("feed_forward.gate_proj", "feed_forward.up_proj")},
        scales={
            "blocks.*.attention.output": lambda o: o.number("attention_in_multiplier")
            * o.number("attention_out_multiplier"),
            "blocks.*.recurrence.output": lambda o: o.number("ssm_out_multiplier"),
            "blocks.*.feed_forward.down": lambda o: _multipliers(o, "mlp_multipliers", 2)[1],
            "norm": lambda o: o.number("lm_head_multiplier")}),
    "granitemoehybrid": t.llama(
        "GraniteMoeHybrid", (32000, 4096, 11008, 32, 32, None, 2048), (1, 2), t.ATTENTION_BIAS,
        t.MULTIPLIERS, e.GRANITE_EXPERTS, e.GRANITE_SHARED, _mamba2(_granite_layers),
        keys={"position_embedding_type": None, "layer_types": None,
              "shared_intermediate_size": 1024},
        fields={"position": _granite_position,
                "d_ff": lambda options: options.whole("shared_intermediate_size"),
                "n_experts": _of_experts("num_local_experts"),
                "n_experts_per_token": _of_experts("num_experts_per_tok"),
                "d_expert": _of_experts("intermediate_size"),
                "d_shared_expert": _of_experts("shared_intermediate_size"),
                "normalize_expert_shares": lambda options: options["num_local_experts"] != 0},
        layers={"up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
        scales={"blocks.*.recurrence.output": lambda o: o.number("residual_multiplier")}),
    "mamba2": t.llama(
        "Mamba2", (32768, 4096, None, 64, 1, None, 32768), (0, 2), ALONE,
        _mamba2(every, "mixer"), names=_MAMBA2_NAMES,
        keys={"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 8}),
    "nemotron_h": t.llama(
        "NemotronH", (131072, 4096, 21504, 52, 32, 8, 4096), (1, 2), t.UNGATED,
        _mamba2(_nemotron_layers(recurrent=True), "mixer", expands=False),
        names=_MAMBA2_NAMES | {
            "mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size", "hidden_act": "mlp_hidden_act",
            "layer_types": "layers_block_type"},
        prefixes=("backbone.", "model."), former_names={"embedding": "embeddings"},
        norm="norm_f", modules={"embedding": "embeddings"}, variant=_nemotron_places,
        without=tuple(t.ROPE),
        keys={"hidden_act": "relu2", "head_dim": 128, "mlp_bias": False, "rms_norm_eps": 1e-5,
              "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 8,
              "layer_types": None, "hybrid_override_pattern": "ME*-", "time_step_min": 0.001},
        only={"mamba_hidden_act": ("silu",), "hidden_act": ("silu", "relu2")},
        fields={"position": "none", "n_layer": lambda options: len(_nemotron_blocks(options)),
                "layers_without_feed_forward": _nemotron_layers(recurrent=False)}),
}
# fmt: on

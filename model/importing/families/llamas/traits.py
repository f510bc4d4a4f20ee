"""What published decoders whose tensors have Llama's names do differently, each said once.

A trait is a part of a `Family` (the arguments of `llama`): the keys of config.json that it reads,
the fields of TransformerConfig that it sets, and the modules of a layer that it adds or moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.families.positions import LAYER_TYPES
from kvasir.model.importing.heads import pairs_apart, repeated_for_heads, split_by_head
from kvasir.model.importing.tensors import Source, all_ones, in_layers, stacked

Trait = dict[str, Any]
_MERGED = ("keys", "layers")
Windows = Callable[[Options], Iterable[int]]
ROPE: dict[str, Any] = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None}
ROPE |= {"original_max_position_embeddings": None}
QKV = stacked(*(f"self_attn.{part}_proj" for part in "qkv"))
ALL_BIASES = dict.fromkeys(("qkv_bias", "output_bias", "feed_forward_bias"), True)
IN, MIDDLE, LAST = "input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
# Of tensors, alone or within a model that also sees images.
WITHIN = (
    *("language_model.model.", "model.language_model.", "language_model."),
    *("text_model.model.", "model.text_model.", "text_model.", "model."),
)
AS_LLAMA = ("LlamaForCausalLM", "LlamaModel")  # classes that some types share
_MODULES: dict[str, Any] = {"embedding": "embed_tokens", "head": "lm_head"}
# fmt: off
_LLAMA: Trait = {
    "norm": "norm",
    "keys": ROPE | {"hidden_act": "silu", "head_dim": None, "rms_norm_eps": 1e-6,
                    "tie_word_embeddings": False},
    "layers": {
        "attention_norm": IN, "qkv": QKV, "output": "self_attn.o_proj", "feed_forward_norm": MIDDLE,
        "up": stacked("mlp.gate_proj", "mlp.up_proj"), "down": "mlp.down_proj"}}
# fmt: on


def llama(
    name: str,
    shape: tuple[int | None, ...],
    tokens: tuple[int | None, int | list[int] | None] = (1, 2),
    *traits: Trait,
    body: str | None = None,
    also: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    **own: Any,
) -> Family:
    """Return a family with Llama's modules and keys, changed by `traits` and then by `own`.

    body: the name without a head, if it differs. also: further architectures. without: keys, and
    modules of a layer, that it has not. Of traits and `own`: keys, of config.json with their
    defaults; layers, places of modules of a layer by the last part of our name; norm, that of the
    last one; modules, further ones outside of layers; others as `Family` has them.
    """
    given: dict[str, Any] = {}
    for trait in (_LLAMA, *traits, own):
        for part, value in trait.items():
            merges = isinstance(value, Mapping)
            given[part] = {**given.get(part, {}), **value} if merges else value
    without += given.pop("without", ())
    keys, layers = ({k: v for k, v in given.pop(p).items() if k not in without} for p in _MERGED)
    outside = _MODULES | given.pop("modules", {}) | {"norm": given.pop("norm")}
    return Family(
        architectures=(f"{name}ForCausalLM", f"{body or name}Model", *also),
        shape=shape,
        tokens=tokens,
        defaults=keys,
        modules=outside | in_layers("layers.*.", **layers),
        **given,
    )


# fmt: off
BIASES: Trait = {"keys": {"attention_bias": False, "mlp_bias": False}}
ATTENTION_BIAS: Trait = {"keys": {"attention_bias": False}}
QKV_BIAS: Trait = ATTENTION_BIAS | {"fields": {"output_bias": False}}  # attention_bias is of these
ONE_BIAS: Trait = BIASES | {"names": {"attention_bias": "use_bias", "mlp_bias": "use_bias"}}
LAYER_NORM: Trait = {"keys": {"rms_norm_eps": 1e-5}, "names": {"rms_norm_eps": "layer_norm_eps"},
                     "fields": {"norm": "layernorm"}}
NORMS_BEFORE_AND_AFTER: Trait = {"fields": {"norm_placement": "both"}}
NORMS_AFTER: Trait = {
    "without": ("attention_norm", "feed_forward_norm"), "fields": {"norm_placement": "output"},
    "layers": {"attention_output_norm": MIDDLE, "feed_forward_output_norm": LAST}}
HEAD_NORMS: Trait = {"fields": {"qk_norm": True}, "layers": {
    "query_norm": repeated_for_heads("self_attn.q_norm"),
    "key_norm": repeated_for_heads("self_attn.k_norm")}}
NORMS_ACROSS_HEADS: Trait = {
    "fields": {"qk_norm": True, "qk_norm_across_heads": True},
    "layers": {"query_norm": split_by_head("self_attn.q_norm"),
               "key_norm": split_by_head("self_attn.k_norm")}}
# LayerNorms over each head, with a bias, of which all heads share the weights.
HEAD_LAYER_NORMS: Trait = {
    "keys": {"qk_layernorm": False},
    "fields": {"qk_norm": itemgetter("qk_layernorm"),
               "qk_norm_kind": lambda o: "layernorm" if o["qk_layernorm"] else "rmsnorm"},
    "layers": {"query_norm": repeated_for_heads("self_attn.q_layernorm"),
               "key_norm": repeated_for_heads("self_attn.k_layernorm")}}
NORMS_AFTER_ROTARY: Trait = {  # Hunyuan's
    "keys": {"alpha": None, "rms_norm_eps": 1e-5, "attention_bias": False},
    "only": {"use_qk_norm": (True, None), "use_cla": (False, None)},
    "scalings": ("linear", "dynamic"),
    "fields": {"qk_norm": True, "qk_norm_after_rotary": True},
    "layers": {"query_norm": repeated_for_heads("self_attn.query_layernorm"),
               "key_norm": repeated_for_heads("self_attn.key_layernorm")}}
SINKS: Trait = {"fields": {"attention_sinks": True}, "layers": {"sinks": "self_attn.sinks"}}
CLIP: Trait = {"keys": {"clip_qkv": None}, "layers": {"clip": all_ones()}}
PAIRS: Trait = {"layers": {"qkv": pairs_apart(QKV)}}  # rotary pairs are (2i, 2i + 1)
FUSED_UP: Trait = {"layers": {"up": "mlp.gate_up_proj"}}
UNGATED: Trait = {"gated": False, "layers": {"up": "mlp.up_proj"}}
PARALLEL: Trait = {  # one norm for both sublayers
    "fields": {"parallel_residual": True}, "layers": {"feed_forward_norm": IN}}
ROTARY_IN_WINDOWS: Trait = {"rotary_in_windows": True}
MULTIPLIERS: Trait = {  # Granite's
    "keys": {"embedding_multiplier": 1.0, "attention_multiplier": 1.0,
             "residual_multiplier": 1.0, "logits_scaling": 1.0},
    "scales": {
        "blocks.*.attention.output": lambda options: options.number("residual_multiplier"),
        "blocks.*.feed_forward.down": lambda options: options.number("residual_multiplier"),
        "norm": lambda options: 1.0 / options.number("logits_scaling")}}
# fmt: on


def every_layer(options: Options) -> range:
    """Return all layers."""
    return range(options.whole("num_hidden_layers"))


def scaled_embedding(options: Options) -> float:
    """Return the factor of embeddings: √d_model where scale_embedding says so (fairseq's)."""
    return math.sqrt(options.whole("hidden_size")) if options["scale_embedding"] else 1.0


def fairseq(prefix: str) -> dict[str, str | Source]:
    """Return the places of a layer's modules with fairseq's names; prefix: of these."""
    return in_layers(
        prefix,
        attention_norm="self_attn_layer_norm",
        feed_forward_norm="final_layer_norm",
        qkv=QKV,
        output="self_attn.out_proj",
        up="fc1",
        down="fc2",
    )


def all_but_every(n: int, key: str | None = None, first: int = 1) -> Windows:
    """Return the rule that every n-th layer has no window: those that `first` is added to.

    key: that of config.json which may hold another n.
    """

    def windowed(options: Options) -> list[int]:
        if options["layer_types"] is not None:  # which say it
            return []
        every = n if key is None or options[key] is None else options.whole(key)
        return [layer for layer in every_layer(options) if (layer + first) % every]

    return windowed


def windows(size: int | None, windowed: Windows, **keys: Any) -> Trait:
    """Return the trait of windows of `size` in the layers of a rule, or of layer_types."""
    return {"keys": {"sliding_window": size, "layer_types": None, **keys}, "windowed": windowed}


def theta_of_layers(windowed: Windows) -> Trait:
    """Return the trait of layer_rope_theta: one for layers with a window, and one for others."""

    def thetas(options: Options) -> tuple[list[Any], Any, Any]:
        """Return those of all layers, of those with a window, and of others."""
        n_layers, in_windows = options.whole("num_hidden_layers"), set(windowed(options))
        kinds = options.layer_kinds("layer_types", LAYER_TYPES)
        if kinds is not None:
            in_windows = {layer for layer, kind in enumerate(kinds) if kind != "full_attention"}
        every = options["layer_rope_theta"] or [options["rope_theta"]] * n_layers
        wanted = f"two numbers, of layers with a window and of others, in {n_layers}"
        is_list = isinstance(every, list) and len(every) == n_layers
        if not is_list or {*map(type, every)} - {int, float, type(None)}:
            raise refuse("layer_rope_theta", every, wanted)
        parts = [
            {theta for i, theta in enumerate(every) if theta and (i in in_windows) == is_windowed}
            for is_windowed in (True, False)
        ]
        if max(map(len, parts)) > 1:
            raise refuse("layer_rope_theta", every, wanted)
        mine, others = (next(iter(part), None) for part in parts)
        return every, mine, others or mine or options["rope_theta"]

    def of_windows(options: Options) -> Any:
        _, mine, others = thetas(options)
        return None if mine == others else mine

    return {
        "keys": {"layer_rope_theta": None},
        "scalings": (),
        "fields": {
            "rope_theta": lambda options: thetas(options)[2],
            "sliding_window_rope_theta": of_windows,
            "layers_without_rotary": lambda options: tuple(
                layer for layer, theta in enumerate(thetas(options)[0]) if not theta
            ),
        },
    }

"""The keys of a published config.json about positions: rotary angles, and sliding windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from kvasir.model.importing.families.options import Options, refuse

LAYER_TYPES = ("full_attention", "sliding_attention")
# fmt: off
_ROPE_KEYS = {
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "truncate",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "short_factor", "long_factor",
    "finetuned",  # a note on how a yarn model was made; nothing computes with it
}
_MOST_ALPHA = 1e9
_STILL = 1e30  # divides the angles of pairs that do not turn
_NEUTRAL_ROPE_KEYS = ("attn_factor", "extrapolation_factor")  # where their value is 1
# fmt: on


def head_dim(options: Options) -> int:
    """Return the channels of a head."""
    if options.get("head_dim") is not None:
        return options.whole("head_dim")
    return options.whole("hidden_size") // options.whole("num_attention_heads")


def rotary_fields(options: Options, scalings: tuple[str, ...]) -> dict[str, Any]:
    """Return the rotary fields from either style: one object, or rope_theta beside rope_scaling."""
    key = "rope_scaling" if options["rope_scaling"] else "rope_parameters"
    given: Any = options[key] or {}
    in_windows: Any = {}
    if not isinstance(given, dict):
        raise refuse(key, given, "an object")
    by_layer_type, of_kinds = "rope_local_base_freq" in options, given
    if by_layer_type and given.keys() & set(LAYER_TYPES):
        given, in_windows = (given.get(kind) or {} for kind in LAYER_TYPES)
    for of_some in (given, in_windows):
        if not isinstance(of_some, dict):
            raise refuse(key, of_some, "objects")
        neutral = {name for name in _NEUTRAL_ROPE_KEYS if of_some.get(name) in (None, 1)}
        if unknown := of_some.keys() - _ROPE_KEYS - neutral - options.keys():
            raise refuse(key, of_some, "no " + ", ".join(sorted(unknown)))
    rope = Options({**options, **given}, {})
    width, of_all = head_dim(options), 1.0
    if options.get("rotary_dim") is not None:
        of_all = options.whole("rotary_dim") / width
    fraction = rope.number("partial_rotary_factor", of_all)
    kind = rope.get("rope_type") or rope.get("type")
    of_pairs = kind == "proportional"  # which has factors of those that do not turn, too
    is_read = "partial_rotary_factor" in options and (of_pairs or "proportional" not in scalings)
    if not is_read and fraction != 1:
        raise refuse("partial_rotary_factor", fraction, "this family only with 1.0")
    if fraction > 1:
        raise refuse("partial_rotary_factor", fraction, "at most 1.0")
    turned = width if of_pairs else int(width * fraction)
    fields: dict[str, Any] = {
        "rope_theta": rope.number("rope_theta") * _ntk_factor(rope, turned),
        "rope_scaling": _rope_scaling(options, rope, scalings),
        "rotary_dim": None if turned == width else turned,
    }
    if by_layer_type:
        types = options["layer_types"]  # which others check
        still = [kind for kind in LAYER_TYPES if of_kinds.get(kind, 0) is None]
        every = enumerate(types if isinstance(types, list) else ())
        unturned = tuple(layer for layer, own in every if own in still)
        fields |= {"layers_without_rotary": unturned} if unturned else {}
        if (kind := in_windows.get("rope_type") or "default") != "default":
            raise refuse(f"{key} of sliding_attention", kind, "only 'default'")
        theta = Options({"rope_local_base_freq": in_windows.get("rope_theta")}, {})
        if theta["rope_local_base_freq"] is None:
            theta["rope_local_base_freq"] = options["rope_local_base_freq"]
        own = theta.number("rope_local_base_freq", fields["rope_theta"])
        if fields["rope_scaling"] is not None or own != fields["rope_theta"]:
            fields["sliding_window_rope_theta"] = own
    return fields


def _ntk_factor(rope: Options, rotary_dim: int) -> float:
    """Return what multiplies theta in place of a scaling: Hunyuan's `alpha`."""
    if rope.get("alpha") is None or (rope.get("rope_type") or rope.get("type")) != "dynamic":
        return 1.0
    if (alpha := rope.number("alpha")) > _MOST_ALPHA:
        raise refuse("alpha", alpha, f"at most {_MOST_ALPHA:g}")
    return float(alpha ** (rotary_dim / max(rotary_dim - 2, 1)))


def _rope_scaling(
    options: Options, rope: Options, scalings: tuple[str, ...]
) -> dict[str, Any] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its former name
    if kind in ("default", "dynamic") and kind in ("default", *scalings):
        return None  # dynamic ones (NTK) stretch beyond max_position_embeddings alone
    if kind not in scalings:
        raise refuse("rope_scaling", kind, f"only {', '.join(('default', *scalings))}")
    if kind == "proportional":
        n_pairs = head_dim(options) // 2
        n_turned = int(rope.number("partial_rotary_factor", 1.0) * n_pairs)
        factors = (rope.number("factor", 1.0),) * n_turned + (_STILL,) * (n_pairs - n_turned)
        both = dict.fromkeys(("short_factors", "long_factors"), factors)
        length = options.whole("max_position_embeddings")
        scaling = {"kind": "longrope", "factor": 1.0, "original_max_model_len": length, **both}
        return scaling | {"attention_factor": 1.0}
    if kind == "linear":
        return {"kind": kind, "factor": rope.number("factor")}
    key = "original_max_position_embeddings"
    rope[key] = options[key] or rope.get(key)
    length = rope.whole(key) if rope[key] else options.whole("max_position_embeddings")
    scaling = {"kind": kind, "original_max_model_len": length}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return scaling | {name: rope.number(name) for name in names}
    factor = rope.number("factor", options.whole("max_position_embeddings") / length)
    if kind == "longrope":
        if length == 1:
            raise refuse(key, length, "at least 2 with longrope")
        stretched = math.log(max(factor, 1.0)) / math.log(length)
        if (own := rope.get("long_mscale")) != rope.get("short_mscale"):  # Phi-3.5-MoE's are equal
            raise refuse("long_mscale", own, f"only short_mscale, {rope.get('short_mscale')!r}")
        rope["attention_factor"] = own or rope.get("attention_factor")
        return scaling | {
            "factor": factor,
            "attention_factor": rope.number("attention_factor", math.sqrt(1.0 + stretched)),
            "short_factors": rope.get("short_factor"),
            "long_factors": rope.get("long_factor"),
        }
    # cos and sin are multiplied by 0.1 m ln(factor) + 1 for one or both of two weights m
    # (DeepSeek-V2), unless the factor is given.
    logarithm = 0.1 * math.log(max(factor, 1.0))
    attention_factor = logarithm + 1.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = rope.number("mscale") * logarithm + 1.0
        attention_factor /= rope.number("mscale_all_dim") * logarithm + 1.0
    return scaling | {
        "factor": factor,
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "attention_factor": rope.number("attention_factor", attention_factor),
        "truncate": bool(rope.get("truncate", True)),
        "query_growth": rope.get("llama_4_scaling_beta") or None,
    }


def latent_scale(options: Options) -> float:
    """Return attention's scale for keys that are made of latents, but for the turned part.

    yarn multiplies it by the square of its weight m, 0.1 m ln(factor) + 1 (DeepSeek-V2).
    """
    given = options["rope_scaling"] or options["rope_parameters"] or {}
    scale = 1.0 / math.sqrt(head_dim(options) + options.whole("qk_nope_head_dim"))
    if (given.get("rope_type") or given.get("type")) != "yarn" or not given.get("mscale_all_dim"):
        return scale
    rope = Options(given, {})
    logarithm = math.log(max(rope.number("factor"), 1.0))
    factor = 0.1 * rope.number("mscale_all_dim") * logarithm + 1.0
    return scale * factor * factor


def window_fields(
    options: Options,
    windowed: Callable[[Options], Iterable[int]],
    *,
    rotary_in_windows: bool = False,
) -> dict[str, Any]:
    """Return the window and the layers that have it; a window in no layer is no window.

    rotary_in_windows: other layers turn nothing, in a model that has windows.
    """
    layers: tuple[int, ...] = ()
    fields: dict[str, Any] = {}
    if options["sliding_window"] is not None and options.get("use_sliding_window", True):
        layers = tuple(windowed(options))
        if (types := options.layer_kinds("layer_types", LAYER_TYPES)) is not None:
            layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
        if rotary_in_windows:
            others = set(range(options.whole("num_hidden_layers"))) - set(layers)
            fields["layers_without_rotary"] = tuple(sorted(others))
    window = options["sliding_window"] if layers else None
    return fields | {"sliding_window": window, "sliding_window_layers": layers or None}


def layers_without_rotary(options: Options) -> tuple[int, ...]:
    """Return the layers whose queries and keys are not rotated: those with 0 in no_rope_layers."""
    layers = range(options.whole("num_hidden_layers"))
    rotated = options["no_rope_layers"]
    if rotated in (None, []):
        interval = options.whole("no_rope_layer_interval")
        rotated = [(layer + 1) % interval != 0 for layer in layers]
    if not isinstance(rotated, list) or len(rotated) < len(layers):
        raise refuse("no_rope_layers", rotated, f"1 or 0 for each of {len(layers)} layers")
    return tuple(layer for layer in layers if not rotated[layer])

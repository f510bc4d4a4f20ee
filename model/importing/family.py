"""How one kind of published decoder becomes ours: the table that describes it, and fields that take more than one key.

What the decoder does not compute is refused by the key of config.json and its value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.config import DecoderConfig
from model.importing.tensors import Source

Options = dict[str, Any]  # config.json, over the family's defaults

_PLAIN = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "relu": "relu"}
_TANH = dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"
)
_ACTIVATIONS = _PLAIN | _TANH
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
_LARGEST = 2**31 - 1
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_KEYS = {
    *(
        "type",
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
    ),
    *(
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    *("truncate", "short_factor", "long_factor"),
    "finetuned",  # a note of how yarn was made, which nothing computes with
}
# Keys that change what is computed, with the values that do not; a family that reads one decides for itself.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "layer_types": (),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1, 1.0),
    "pruned_heads": ({},),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
    "use_sliding_window": (False,),
}


class UnsupportedError(ValueError):
    """A checkpoint that asks for what the decoder does not compute, or makes no sense; names the key and its value."""


def refuse(key: str, value: object, wanted: str) -> UnsupportedError:
    return UnsupportedError(f"config.json's {key} is {value!r}, and the decoder computes {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one kind of published decoder becomes ours.

    defaults: every key of config.json that is read, with what a file without it means. fields: our field: their key.
    fixed: our field: its value. derived: our field: what makes it of the options. only: key: the values that the
    decoder computes. modules: our module: where its weight and bias are; * is the layer. prefixes: of tensors' names,
    of which a file has one or none. former_names: what modules were once called.
    """

    title: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    fields: Mapping[str, str]
    modules: Mapping[str, Source]
    prefixes: tuple[str, ...] = ("model.",)
    former_names: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Options], Any]] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def config(self, values: Mapping[str, Any], **tokens: Any) -> DecoderConfig:
        """Our configuration for a config.json. tokens: bos_token_id and eos_token_ids.

        Raises UnsupportedError, and ConfigError for a decoder that cannot be built.
        """
        options: Options = {**self.defaults, **values}
        neutral = {
            key: (None, *allowed) for key, allowed in NEUTRAL.items() if key not in self.defaults
        }
        if options.get("use_sliding_window") is False:
            neutral.pop("sliding_window", None)  # of a window that is off
        for key, allowed in {**neutral, **self.only}.items():
            if options.get(key) not in allowed:
                raise refuse(
                    key,
                    options[key],
                    f"{self.title} without it" if key in neutral else _listed(allowed),
                )
        fields = {name: options[key] for name, key in self.fields.items()}
        fields |= {name: derive(options) for name, derive in self.derived.items()}
        return DecoderConfig(**{**fields, **self.fixed, **tokens})

    def plain_name(self, tensor: str) -> str:
        """A tensor's name without the prefix it may have, as `modules` have it."""
        plain = next(
            (tensor.removeprefix(prefix) for prefix in self.prefixes if tensor.startswith(prefix)),
            tensor,
        )
        module, _, kind = plain.rpartition(".")
        return f"{self.former_names.get(module, module)}.{kind}"


def _listed(values: tuple[Any, ...]) -> str:
    return "only " + " or ".join(repr(value) for value in values)


def whole(options: Options, key: str, least: int = 1) -> int:
    value = options[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise UnsupportedError(
            f"config.json's {key} must be a whole number from {least} to {_LARGEST}, not {value!r}"
        )
    return value


def number(options: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = default if options.get(key) is None else options[key]
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value <= sys.float_info.max
    ):
        raise UnsupportedError(f"config.json's {key} must be a positive number, not {value!r}")
    return value


def key_value_heads(options: Options) -> int:
    return whole(
        options,
        "num_attention_heads" if options["num_key_value_heads"] is None else "num_key_value_heads",
    )


def head_dim(options: Options) -> int:
    if options.get("head_dim") is not None:
        return whole(options, "head_dim")
    return whole(options, "hidden_size") // whole(options, "num_attention_heads")


def activation(key: str, *, gated: bool) -> Callable[[Options], str]:
    def derive(options: Options) -> str:
        ours = _ACTIVATIONS.get(options[key]) if isinstance(options[key], str) else None
        if gated:
            ours = _GATED.get(ours or "")
        elif ours == "silu":
            ours = None
        if ours is None:
            known = [
                name
                for name, kind in _ACTIVATIONS.items()
                if (kind in _GATED if gated else kind != "silu")
            ]
            raise refuse(key, options[key], _listed(tuple(known)))
        return ours

    return derive


def _rope(options: Options) -> dict[str, Any]:
    """Rotary parameters of either style: one object, or rope_theta beside rope_scaling."""
    given = options.get("rope_scaling") or options.get("rope_parameters") or {}
    key = "rope_scaling" if options.get("rope_scaling") else "rope_parameters"
    if not isinstance(given, dict) or (unknown := given.keys() - _ROPE_KEYS):
        raise refuse(
            key,
            given,
            "no " + ", ".join(sorted(unknown)) if isinstance(given, dict) else "an object",
        )
    theta, fraction = options["rope_theta"], options.get("partial_rotary_factor")
    return {
        "rope_theta": theta,
        "partial_rotary_factor": 1.0 if fraction is None else fraction,
        **given,
    }


def with_usual_names(options: Options) -> Options:
    """GPT-NeoX has names of its own for two of the rotary parameters."""
    return {
        **options,
        "rope_theta": options["rotary_emb_base"],
        "partial_rotary_factor": options["rotary_pct"],
    }


def rope_theta(options: Options) -> float:
    return number(_rope(options), "rope_theta")


def _rope_kind(options: Options) -> str:
    rope = _rope(options)
    kind: str = rope.get("rope_type") or rope.get("type") or "default"
    return kind


def rope_scaling(options: Options) -> dict[str, Any] | None:
    kind, rope = _rope_kind(options), _rope(options)
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise refuse("rope_scaling", kind, "default, linear, llama3 and yarn")
    if kind == "linear":
        return {"kind": kind, "factor": number(rope, "factor")}
    key = "original_max_position_embeddings"
    own = options.get(key) or rope.get(key)
    length = whole({key: own}, key) if own else whole(options, "max_position_embeddings")
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {"kind": kind, "original_max_model_len": length} | {
            name: number(rope, name) for name in names
        }
    factor = number(rope, "factor", whole(options, "max_position_embeddings") / length)
    return {
        "kind": kind,
        "factor": factor,
        "original_max_model_len": length,
        "beta_fast": number(rope, "beta_fast", 32.0),
        "beta_slow": number(rope, "beta_slow", 1.0),
        "attention_factor": _yarn_amplitude(rope, factor),
        "truncate": bool(rope.get("truncate", True)),
    }


def _yarn_amplitude(rope: Mapping[str, Any], factor: float) -> float:
    """What multiplies cos and sin: given, or 0.1 m ln(factor) + 1 for one or both of two weights m (DeepSeek-V2)."""
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")

    def amplitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return amplitude(number(rope, "mscale")) / amplitude(number(rope, "mscale_all_dim"))
    return amplitude(1.0)


def unscaled_rope(options: Options) -> None:
    if (kind := _rope_kind(options)) != "default":
        raise refuse("rope_scaling", kind, "this family only with default")


def rotary_dim(options: Options) -> int | None:
    channels = head_dim(options)
    turned = int(channels * number(_rope(options), "partial_rotary_factor"))
    return None if turned == channels else turned


def whole_heads(options: Options) -> None:
    if (fraction := _rope(options)["partial_rotary_factor"]) != 1:
        raise refuse("partial_rotary_factor", fraction, "this family only with 1.0")


def _layers_of_type(options: Options, default: Callable[[int], bool]) -> tuple[int, ...]:
    """The layers whose attention slides: as layer_types lists them, or as an older config.json means."""
    layers = range(whole(options, "num_hidden_layers"))
    if (types := options["layer_types"]) is None:
        return tuple(layer for layer in layers if default(layer))
    if (
        not isinstance(types, list)
        or len(types) != len(layers)
        or any(kind not in _LAYER_TYPES for kind in types)
    ):
        raise refuse("layer_types", types, f"{len(layers)} layers of {' or '.join(_LAYER_TYPES)}")
    return tuple(layer for layer in layers if types[layer] == "sliding_attention")


def qwen_window_layers(options: Options) -> tuple[int, ...]:
    if not options["use_sliding_window"] or options["sliding_window"] is None:
        return ()
    first = whole(options, "max_window_layers", least=0)
    return _layers_of_type(options, lambda layer: layer >= first)


def smollm3_window_layers(options: Options) -> tuple[int, ...]:
    if not options["use_sliding_window"] or options["sliding_window"] is None:
        return ()
    still = layers_without_rotary(options)
    return _layers_of_type(options, lambda layer: layer in still)


def gemma2_window_layers(options: Options) -> tuple[int, ...]:
    return (
        ()
        if options["sliding_window"] is None
        else _layers_of_type(options, lambda layer: layer % 2 == 0)
    )


def windows(layers: Callable[[Options], tuple[int, ...]]) -> dict[str, Callable[[Options], Any]]:
    """Both fields of a window in some layers; a window in none of them is no window."""
    return {
        "sliding_window": lambda options: options["sliding_window"] if layers(options) else None,
        "sliding_window_layers": lambda options: layers(options) or None,
    }


def layers_without_rotary(options: Options) -> tuple[int, ...]:
    layers = range(whole(options, "num_hidden_layers"))
    turns = options["no_rope_layers"]  # 1 for a layer that turns
    if turns is None:
        interval = whole(options, "no_rope_layer_interval")
        turns = [(layer + 1) % interval != 0 for layer in layers]
    if not isinstance(turns, list) or len(turns) < len(layers):
        raise refuse("no_rope_layers", turns, f"a list of 1 and 0 for each of {len(layers)} layers")
    return tuple(layer for layer in layers if not turns[layer])


def unprojected_width(options: Options) -> int:
    width = whole(options, "hidden_size")
    if options["word_embed_proj_dim"] not in (None, width):
        raise refuse(
            "word_embed_proj_dim",
            options["word_embed_proj_dim"],
            f"only hidden_size, {width} (opt-350m)",
        )
    return width

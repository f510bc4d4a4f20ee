"""The conversion of a published config.json into a TransformerConfig.

A value that the network does not compute is refused, with its key.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir.model.config import Activation, TransformerConfig
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.tensors import Source, scaled

_LARGEST, _MOST_LAYERS = 2**31 - 1, 10_000
_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh")
_PLAIN = {"gelu": "gelu", "gelu_python": "gelu", **dict.fromkeys(_GELU_TANH, "gelu_tanh")}
_PLAIN |= {"relu": "relu", "silu": "silu", "swish": "silu"}
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_python": "geglu"}
_GATED |= dict.fromkeys(_GELU_TANH, "geglu_tanh")
# Names of tensors for all experts, which lack the ending of a linear layer's.
_OF_ALL_EXPERTS = re.compile(r"(\.experts\.\w+_proj)(?:_(bias))?$")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# fmt: off
_ROPE_KEYS = {
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "truncate",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "short_factor", "long_factor",
    "finetuned",  # a note on how a yarn model was made; nothing computes with it
}
_NEUTRAL_ROPE_KEYS = ("attn_factor", "extrapolation_factor")  # where their value is 1
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    "bos_token_id", "eos_token_id",
)
# Field of TransformerConfig: the usual key of config.json whose value it takes unchanged.
_FIELDS = {
    "vocab_size": "vocab_size", "d_model": "hidden_size", "d_ff": "intermediate_size",
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "max_model_len": "max_position_embeddings", "sliding_window": "sliding_window",
    "norm_eps": "rms_norm_eps", "tied_embeddings": "tie_word_embeddings",
    "qkv_bias": "attention_bias", "output_bias": "attention_bias",
    "feed_forward_bias": "mlp_bias", "parallel_residual": "use_parallel_residual",
    "attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping",
}
# Keys that change what is computed, and the values, beside null, that do not. A family that reads a
# key decides about its values itself.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,), "alibi": (False,), "is_encoder_decoder": (False,),
    "qk_layernorm": (False,), "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,), "sliding_window": (), "use_sliding_window": (False,),
    "num_experts": (0,), "num_local_experts": (0,), "partial_rotary_factor": (1,),
    "pruned_heads": ({},), "quantization_config": (), "clip_qkv": (), "layer_types": (),
    "is_causal": (True,), "no_rope_layers": (), "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}
# fmt: on


def refuse(key: str, value: object, wanted: str) -> UnsupportedError:
    """Return the error for a value of config.json that the decoder does not compute."""
    return UnsupportedError(f"config.json's {key} is {value!r}, and Kvasir computes {wanted}")


class Options(dict[str, Any]):
    """The keys of config.json that a family reads, under their usual names, which are Llama's."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
        super().__init__(values)
        self.names = names  # the family's own names, which error messages use

    def whole(self, key: str, least: int = 1, most: int = _LARGEST) -> int:
        """Return a whole number. Raises UnsupportedError for another value."""
        value: Any = self[key]
        if type(value) is int and least <= value <= most:
            return value
        raise self._wrong(key, f"a whole number from {least} to {most}", value)

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a positive number; null is the default. Raises UnsupportedError for another."""
        value: Any = default if self.get(key) is None else self[key]
        if type(value) in (int, float) and 0 < value <= sys.float_info.max:
            return value
        raise self._wrong(key, "a positive number", value)

    def _wrong(self, key: str, wanted: str, value: object) -> UnsupportedError:
        name = self.names.get(key, key)
        return UnsupportedError(f"config.json's {name} must be {wanted}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer after a pooling: the modules of a file that hold it and its norm.

    d_out: None is d_model, or the number of labels at the end.
    """

    module: str
    activation: Activation = "identity"
    bias: bool = True
    norm: str | None = None
    d_out: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of published model: the keys of its config.json, and the names of its tensors.

    Keys have Llama's names throughout, except in `only`, which has the family's own.
    """

    title: str  # in messages
    architectures: tuple[str, ...]  # accepted values of "architectures"
    # From our module to the one that holds its weight and bias in the checkpoint, or to a Source
    # if they are stored differently. `*` stands for a layer.
    modules: Mapping[str, str | Source]
    shape: tuple[int | None, ...]  # defaults of vocab_size to max_position_embeddings in _SHAPE
    tokens: tuple[int | None, int | None]  # defaults of bos_token_id and eos_token_id
    defaults: dict[str, Any]  # every other key that is read
    names: Mapping[str, str] = field(default_factory=dict)  # the family's own names of keys
    # By field of TransformerConfig: its value, or a function of the options.
    fields: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values that are computed
    gated: bool = True  # the feed-forward has a gate
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn")  # of rotary positions
    # Returns the layers with a sliding window, where layer_types does not list them.
    windowed: Callable[[Options], Iterable[int]] | None = None
    # By our module: a factor of its weight and bias, which are then float32.
    scales: Mapping[str, Callable[[Options], float]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.",)  # of tensor names; a file has one or none
    former_names: Mapping[str, str] = field(default_factory=dict)  # of modules: the present name
    classifier: tuple[Dense, ...] = (Dense("score", bias=False),)  # of ...ForSequenceClassification
    unused: tuple[str, ...] = ()  # beginnings of names of tensors that are left out
    # Returns modules whose places the options decide.
    variant: Callable[[Options], Mapping[str, Source]] | None = None
    encoder: Family | None = None  # of a decoder that has one; it reads the same config.json
    same_embeddings: tuple[str, ...] = ()  # modules whose weight must be the embedding's
    start_token: int | None = None  # the default of decoder_start_token_id, with an encoder

    def options(self, values: Mapping[str, Any]) -> Options:
        """Return the keys that the family reads from a config.json."""
        defaults = dict(zip(_SHAPE, self.shape + self.tokens, strict=True)) | self.defaults
        read = {}
        for key, default in defaults.items():
            names = (*self.names.get(key, key).split("|"), key)  # "a|b" is b where there is no a
            read[key] = next((values[name] for name in names if name in values), default)
        return Options(read, self.names)

    def adapted(self, values: Mapping[str, Any]) -> Family:
        """Return the family with the places and factors of its modules that values decide.

        Those of its encoder are among them.
        """
        options, modules = self.options(values), dict(self.modules)
        if self.variant is not None:
            modules |= self.variant(options)
        for module, factor in self.scales.items():
            if (by := factor(options)) != 1.0:
                modules[module] = scaled(self.source(module), by)
        if self.encoder is not None:
            inner = self.encoder.adapted(values).modules
            modules |= {f"encoder.{module}": source for module, source in inner.items()}
        return replace(self, modules=modules)

    def config(self, values: Mapping[str, Any], **tokens: Any) -> TransformerConfig:
        """Return the TransformerConfig for a config.json, with bos_token_id and eos_token_ids.

        Raises UnsupportedError for what the decoder does not compute, and ConfigError.
        """
        options = self.options(values)
        options.whole("num_hidden_layers", most=_MOST_LAYERS)
        read = {name for key in options for name in self.names.get(key, key).split("|")}
        # Beside the family's own name the usual one may say the same.
        neutral = {
            key: (None, *allowed, *([options[key]] if key in options else ()))
            for key, allowed in NEUTRAL.items()
            if key not in read
        }
        if values.get("use_sliding_window") is False:
            neutral.pop("sliding_window", None)
        for key, allowed in {**neutral, **self.only}.items():
            if key in values and values[key] not in allowed:
                wanted = f"{self.title} without it" if key in neutral else _only(allowed)
                raise refuse(key, values[key], wanted)
        fields = {name: options[key] for name, key in _FIELDS.items() if key in options}
        if "rope_theta" in options:
            fields |= _rotary(options, self.scalings)
        if self.windowed is not None:
            fields |= _windows(options, self.windowed)
            if fields["sliding_window"] is None:
                fields.pop("sliding_window_rope_theta", None)
        grouped = options["num_key_value_heads"] is not None
        fields["n_kv_head"] = options.whole(f"num_{'key_value' if grouped else 'attention'}_heads")
        fields["head_dim"] = _head_dim(options)
        if "feed_forward" not in self.fields:
            known, name = _GATED if self.gated else _PLAIN, options["hidden_act"]
            if not isinstance(name, str) or name not in known:
                raise refuse(self.names.get("hidden_act", "hidden_act"), name, _only(known))
            fields["feed_forward"] = known[name]
        for name, value in self.fields.items():
            fields[name] = value(options) if callable(value) else value
        if self.encoder is not None:
            fields["encoder"] = self.encoder.config(values)
        return TransformerConfig(**{**fields, **tokens})

    def source(self, module: str) -> Source:
        """Return the place of a module of ours."""
        place = self.modules[module]
        return Source((place,)) if isinstance(place, str) else place

    def plain_name(self, tensor: str) -> str:
        """Return a tensor's name without its prefix, as `modules` has it."""
        tensor = _OF_ALL_EXPERTS.sub(lambda found: f"{found[1]}.{found[2] or 'weight'}", tensor)
        prefix = next((prefix for prefix in self.prefixes if tensor.startswith(prefix)), "")
        module, _, kind = tensor.removeprefix(prefix).rpartition(".")
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)  # as TensorFlow named norms'
        if not module:  # final_logits_bias
            module, kind = kind, "bias"
        return f"{self.former_names.get(module, module)}.{kind}"


def _only(values: Iterable[Any]) -> str:
    return "only " + " or ".join(map(repr, values))


def _head_dim(options: Options) -> int:
    if options.get("head_dim") is not None:
        return options.whole("head_dim")
    return options.whole("hidden_size") // options.whole("num_attention_heads")


def _rotary(options: Options, scalings: tuple[str, ...]) -> dict[str, Any]:
    """Return the rotary fields from either style: one object, or rope_theta beside rope_scaling."""
    key = "rope_scaling" if options["rope_scaling"] else "rope_parameters"
    given: Any = options[key] or {}
    in_windows: Any = {}
    if not isinstance(given, dict):
        raise refuse(key, given, "an object")
    by_layer_type = "rope_local_base_freq" in options
    if by_layer_type and given.keys() & set(_LAYER_TYPES):
        given, in_windows = (given.get(kind) or {} for kind in _LAYER_TYPES)
    for of_some in (given, in_windows):
        if not isinstance(of_some, dict):
            raise refuse(key, of_some, "objects")
        neutral = {name for name in _NEUTRAL_ROPE_KEYS if of_some.get(name) in (None, 1)}
        if unknown := of_some.keys() - _ROPE_KEYS - neutral - options.keys():
            raise refuse(key, of_some, "no " + ", ".join(sorted(unknown)))
    rope = Options({**options, **given}, {})
    head_dim, fraction = _head_dim(options), rope.number("partial_rotary_factor", 1.0)
    if "partial_rotary_factor" not in options and fraction != 1:
        raise refuse("partial_rotary_factor", fraction, "this family only with 1.0")
    if fraction > 1:
        raise refuse("partial_rotary_factor", fraction, "at most 1.0")
    turned = int(head_dim * fraction)
    fields = {
        "rope_theta": rope.number("rope_theta"),
        "rope_scaling": _rope_scaling(options, rope, scalings),
        "rotary_dim": None if turned == head_dim else turned,
    }
    if by_layer_type:
        if (kind := in_windows.get("rope_type") or "default") != "default":
            raise refuse(f"{key} of sliding_attention", kind, "only 'default'")
        theta = Options({"rope_local_base_freq": in_windows.get("rope_theta")}, {})
        if theta["rope_local_base_freq"] is None:
            theta["rope_local_base_freq"] = options["rope_local_base_freq"]
        own = theta.number("rope_local_base_freq", fields["rope_theta"])
        if fields["rope_scaling"] is not None or own != fields["rope_theta"]:
            fields["sliding_window_rope_theta"] = own
    return fields


def _rope_scaling(
    options: Options, rope: Options, scalings: tuple[str, ...]
) -> dict[str, Any] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its former name
    if kind == "default":
        return None
    if kind not in scalings:
        raise refuse("rope_scaling", kind, f"only {', '.join(('default', *scalings))}")
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


def _windows(options: Options, windowed: Callable[[Options], Iterable[int]]) -> dict[str, Any]:
    """Return the window and the layers that have it; a window in no layer is no window."""
    layers: tuple[int, ...] = ()
    n_layers, types = options.whole("num_hidden_layers"), options["layer_types"]
    if options["sliding_window"] is not None and options.get("use_sliding_window", True):
        layers = tuple(windowed(options))
        if types is not None:
            listed = isinstance(types, list) and len(types) == n_layers
            if not listed or any(kind not in _LAYER_TYPES for kind in types):
                wanted = f"{n_layers} layers of {' or '.join(_LAYER_TYPES)}"
                raise refuse("layer_types", types, wanted)
            layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    window = options["sliding_window"] if layers else None
    return {"sliding_window": window, "sliding_window_layers": layers or None}


def layers_without_rotary(options: Options) -> tuple[int, ...]:
    """Return the layers whose queries and keys are not rotated: those with 0 in no_rope_layers."""
    layers = range(options.whole("num_hidden_layers"))
    rotated = options["no_rope_layers"]
    if rotated is None:
        interval = options.whole("no_rope_layer_interval")
        rotated = [(layer + 1) % interval != 0 for layer in layers]
    if not isinstance(rotated, list) or len(rotated) < len(layers):
        raise refuse("no_rope_layers", rotated, f"1 or 0 for each of {len(layers)} layers")
    return tuple(layer for layer in layers if not rotated[layer])

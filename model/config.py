"""DecoderConfig: everything that decides a decoder's shape and arithmetic, and the presets by name."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

Position = Literal["rotary", "learned", "sinusoidal", "alibi", "relative", "none"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post", "both"]
FeedForward = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"]
_CHOICES = {
    "position": Position,
    "norm": Norm,
    "norm_placement": NormPlacement,
    "feed_forward": FeedForward,
}
_POSITIVE = (
    "rope_theta",
    "norm_eps",
    "embedding_scale",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
)


class ConfigError(ValueError):
    """A configuration that no decoder can be built from; the message names the field and its value."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to more positions than a model was first trained on.

    kind: "linear" divides positions by `factor` (Chen et al. 2023); "llama3" divides low frequencies, and blends
    between two wavelengths (Llama 3.1); "yarn" divides the pairs that turn less than `beta_slow` times in
    `original_max_model_len` positions, keeps those that turn more than `beta_fast` times, and blends between (Peng et
    al. 2023). yarn multiplies cos and sin by `attention_factor`, 0.1 ln(factor) + 1 where that is None. truncate: yarn
    rounds the pairs between which it blends outwards to whole ones.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_model_len: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ConfigError(
                f"rope_scaling's kind must be linear, llama3 or yarn, not {self.kind!r}"
            )
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        ):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0) and not (
                name == "attention_factor" and value is None
            ):
                raise ConfigError(f"rope_scaling's {name} must be a positive number, not {value!r}")
        original = self.original_max_model_len
        if (
            not (_is_whole(original) and original is not None and original > 0)
            and self.kind != "linear"
        ):
            raise ConfigError(
                f"rope_scaling {self.kind} needs original_max_model_len, a positive whole number, not {original!r}"
            )
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                "rope_scaling's low_freq_factor must be less than its high_freq_factor"
            )

    @classmethod
    def from_dict(cls, values: Any) -> RopeScaling:
        """Raises ConfigError for what is not an object of these fields."""
        if not isinstance(values, dict):
            raise ConfigError(f"rope_scaling must be an object, not {values!r}")
        _check_fields(cls, values, "rope_scaling")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer (Vaswani et al. 2017).

    n_kv_head: equal to n_head is multi-head attention, 1 is multi-query (Shazeer 2019), between is grouped-query
    (Ainslie et al. 2023). qk_norm: RMSNorm over each head of queries and keys (Henry et al. 2020). attention_scale: of
    query · key; None is 1 / sqrt(head_dim). attention_softcap, logit_softcap: c in c · tanh(x / c), on scores and on
    logits (Gemma 2, 2024). sliding_window: how many positions, its own among them, a token sees in the layers of
    `sliding_window_layers` (None: in all; Beltagy et al. 2020).

    position: "rotary" (Su et al. 2021), on `rotary_dim` channels of a head (None: all), except in the layers of
    `layers_without_rotary`; "learned" or "sinusoidal" embeddings; a bias on scores, by distance: "alibi" (Press et al.
    2022) or "relative", learned for `relative_buckets` of distances up to `relative_max_distance` (Raffel et al. 2020);
    or "none".

    norm_placement: "pre" normalises each sublayer's input (and the final output), "post" the sum of its input and
    output, as the original did, "both" its input and its output (and the final one). parallel_residual: both sublayers
    read the block's input (Wang & Komatsuzaki 2021). feed_forward: an activation, or a gated one (Shazeer 2020); _tanh
    is GELU's approximation. qkv_bias, output_bias, feed_forward_bias: on the linear layers of that name.
    embedding_scale multiplies token embeddings. dropout (residual and embedding) and attention_dropout act in training
    only.
    """

    vocab_size: int
    max_model_len: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    d_model: int
    d_ff: int
    position: Position = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    layers_without_rotary: tuple[int, ...] = ()
    relative_buckets: int = 32
    relative_max_distance: int = 128
    sliding_window: int | None = None
    sliding_window_layers: tuple[int, ...] | None = None
    qk_norm: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = "pre"
    parallel_residual: bool = False
    feed_forward: FeedForward = "swiglu"
    qkv_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    tied_embeddings: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "max_model_len",
            "n_layer",
            "n_head",
            "n_kv_head",
            "head_dim",
            "d_model",
            "d_ff",
        ):
            self._require(name, self._is_positive(name), "a positive whole number")
        self._require(
            "max_model_len", self.max_model_len >= 2, "at least 2: a token of prompt and a new one"
        )
        for name in _POSITIVE:
            value = getattr(self, name)
            given = value is not None or name in {"rope_theta", "norm_eps", "embedding_scale"}
            self._require(name, not given or (_is_number(value) and value > 0), "a positive number")
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            self._require(
                name, _is_number(rate) and 0.0 <= rate < 1.0, "at least 0 and less than 1"
            )
        for field in fields(self):
            if field.type == "bool":
                self._require(
                    field.name, isinstance(getattr(self, field.name), bool), "true or false"
                )
        for name, kind in _CHOICES.items():
            self._require(
                name, getattr(self, name) in get_args(kind), f"one of {', '.join(get_args(kind))}"
            )
        if self.n_head % self.n_kv_head:
            raise ConfigError(
                f"n_head ({self.n_head}) must be a multiple of n_kv_head ({self.n_kv_head})"
            )
        multiple = (
            16 if self.position == "rotary" else 8
        )  # what ONNX Runtime's GroupQueryAttention takes
        wanted = f"a multiple of {multiple} with {self.position} positions"
        self._require("head_dim", self.head_dim % multiple == 0, wanted)
        self._check_positions()
        if self.parallel_residual and self.norm_placement != "pre":
            raise ConfigError(
                f"parallel_residual needs norm_placement pre, not {self.norm_placement!r}"
            )
        wanted = f"in the vocabulary of {self.vocab_size}"
        self._require(
            "bos_token_id", self.bos_token_id is None or self._is_token(self.bos_token_id), wanted
        )
        self._require("eos_token_ids", all(map(self._is_token, self.eos_token_ids)), wanted)

    def _check_positions(self) -> None:
        rotary_dim = self.rotary_dim
        even = rotary_dim is None or (
            _is_whole(rotary_dim) and rotary_dim % 2 == 0 and 0 < rotary_dim <= self.head_dim
        )
        self._require("rotary_dim", even, f"an even number up to head_dim, {self.head_dim}")
        if self.position != "rotary":
            for name in ("rope_scaling", "rotary_dim", "layers_without_rotary"):
                self._require(
                    name, not getattr(self, name), f"left out with {self.position} positions"
                )
        whole = "a positive whole number"
        self._require(
            "sliding_window",
            self.sliding_window is None or self._is_positive("sliding_window"),
            whole,
        )
        if self.sliding_window is None:
            self._require(
                "sliding_window_layers",
                self.sliding_window_layers is None,
                "left out without a window",
            )
        for name in ("layers_without_rotary", "sliding_window_layers"):
            layers = getattr(self, name) or ()
            valid = all(_is_whole(layer) and layer in range(self.n_layer) for layer in layers)
            self._require(name, valid, f"layers below {self.n_layer}")
        self._require("relative_max_distance", self._is_positive("relative_max_distance"), whole)
        at_least = _is_whole(self.relative_buckets) and self.relative_buckets >= 2
        self._require("relative_buckets", at_least, "a whole number of at least 2")
        if self.position == "relative" and self.relative_max_distance <= self.relative_buckets // 2:
            raise ConfigError(
                f"relative_max_distance ({self.relative_max_distance}) must be more than half of relative_buckets "
                f"({self.relative_buckets}): the first half of them are single distances"
            )

    def _is_positive(self, name: str) -> bool:
        return _is_whole(getattr(self, name)) and getattr(self, name) > 0

    def _require(self, name: str, valid: bool, wanted: str) -> None:
        if not valid:
            raise ConfigError(f"{name} must be {wanted}, not {getattr(self, name)!r}")

    def _is_token(self, token_id: object) -> bool:
        return _is_whole(token_id) and token_id in range(self.vocab_size)

    @property
    def n_groups(self) -> int:
        """Query heads that share one key-value head."""
        return self.n_head // self.n_kv_head

    @property
    def query_scale(self) -> float:
        """What multiplies query · key."""
        return (
            1.0 / math.sqrt(self.head_dim) if self.attention_scale is None else self.attention_scale
        )

    def rotates(self, layer: int) -> bool:
        """Whether a layer turns its queries and keys by their positions."""
        return self.position == "rotary" and layer not in self.layers_without_rotary

    def window_of(self, layer: int) -> int | None:
        """How many positions a token sees in a layer, its own among them; None is all before it."""
        everywhere = self.sliding_window_layers is None
        return (
            self.sliding_window
            if everywhere or layer in (self.sliding_window_layers or ())
            else None
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecoderConfig:
        """Raises ConfigError naming an unknown or missing field."""
        _check_fields(cls, values, "the decoder's configuration")
        changed = dict(values)
        for name in ("eos_token_ids", "layers_without_rotary", "sliding_window_layers"):
            if name in values and not (name == "sliding_window_layers" and values[name] is None):
                if not isinstance(values[name], list | tuple):
                    raise ConfigError(f"{name} must be a list, not {values[name]!r}")
                changed[name] = tuple(values[name])
        if values.get("rope_scaling") is not None:
            changed["rope_scaling"] = RopeScaling.from_dict(values["rope_scaling"])
        return cls(**changed)

    @classmethod
    def load(cls, path: Path) -> DecoderConfig:
        """Read config.json. Raises ConfigError for bad contents, OSError for an unreadable file."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a JSON object")
        return cls.from_dict(values)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def _check_fields(kind: type[Any], values: dict[str, Any], what: str) -> None:
    known = {field.name for field in fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"unknown field {unknown[0]!r} in {what}")
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if missing := sorted(required - values.keys()):
        raise ConfigError(f"{what} lacks the field {missing[0]!r}")


PRESETS = {
    "tiny": DecoderConfig(
        vocab_size=2048,
        max_model_len=1024,
        n_layer=4,
        n_head=6,
        n_kv_head=2,
        head_dim=32,
        d_model=192,
        d_ff=480,
    ),
    "gpt2-124m": DecoderConfig(
        vocab_size=50257,
        max_model_len=1024,
        n_layer=12,
        n_head=12,
        n_kv_head=12,
        head_dim=64,
        d_model=768,
        d_ff=3072,
        position="learned",
        norm="layernorm",
        feed_forward="gelu_tanh",
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152,
        max_model_len=2048,
        n_layer=30,
        n_head=9,
        n_kv_head=3,
        head_dim=64,
        d_model=576,
        d_ff=1536,
        rope_theta=1e5,
    ),
    "qwen2.5-0.5b": DecoderConfig(
        vocab_size=151936,
        max_model_len=2048,
        n_layer=24,
        n_head=14,
        n_kv_head=2,
        head_dim=64,
        d_model=896,
        d_ff=4864,
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
    ),
    "llama3.2-1b": DecoderConfig(
        vocab_size=128256,
        max_model_len=2048,
        n_layer=16,
        n_head=32,
        n_kv_head=8,
        head_dim=64,
        d_model=2048,
        d_ff=8192,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0, original_max_model_len=8192),
    ),
}


def preset(name: str, **changes: Any) -> DecoderConfig:
    """A preset with fields replaced. Raises ConfigError listing the names when there is none of this name, and naming
    a field that does not exist or a value that it cannot have.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return DecoderConfig.from_dict({**asdict(PRESETS[name]), **changes})

"""DecoderConfig: everything that decides a decoder's shape and arithmetic, and the presets by name."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

Position = Literal["rotary", "learned", "sinusoidal"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post"]
FeedForward = Literal["swiglu", "gelu", "relu"]
_CHOICES = {"position": Position, "norm": Norm, "norm_placement": NormPlacement, "feed_forward": FeedForward}


class ConfigError(ValueError):
    """A configuration that no decoder can be built from; the message names the field and its value."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer (Vaswani et al. 2017).

    n_kv_head: equal to n_head is multi-head attention, 1 is multi-query (Shazeer 2019), between is grouped-query
    (Ainslie et al. 2023). norm_placement: "pre" normalises each sublayer's input (and the final output), "post" the sum
    of its input and output, as the original did. qkv_bias, output_bias, feed_forward_bias: on the linear layers of that
    name. dropout (residual and embedding) and attention_dropout act in training only.
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
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = "pre"
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
        for name in ("vocab_size", "max_model_len", "n_layer", "n_head", "n_kv_head", "head_dim", "d_model", "d_ff"):
            self._require(name, _is_whole(getattr(self, name)) and getattr(self, name) > 0, "a positive whole number")
        self._require("max_model_len", self.max_model_len >= 2, "at least 2: a token of prompt and a new one")
        for name in ("rope_theta", "norm_eps"):
            self._require(name, _is_number(getattr(self, name)) and getattr(self, name) > 0, "a positive number")
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            self._require(name, _is_number(rate) and 0.0 <= rate < 1.0, "at least 0 and less than 1")
        for name in ("qkv_bias", "output_bias", "feed_forward_bias", "tied_embeddings"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        for name, kind in _CHOICES.items():
            self._require(name, getattr(self, name) in get_args(kind), f"one of {', '.join(get_args(kind))}")
        if self.n_head % self.n_kv_head:
            raise ConfigError(f"n_head ({self.n_head}) must be a multiple of n_kv_head ({self.n_kv_head})")
        multiple = 16 if self.position == "rotary" else 8  # what ONNX Runtime's GroupQueryAttention takes
        wanted = f"a multiple of {multiple} with {self.position} positions"
        self._require("head_dim", self.head_dim % multiple == 0, wanted)
        wanted = f"in the vocabulary of {self.vocab_size}"
        self._require("bos_token_id", self.bos_token_id is None or self._is_token(self.bos_token_id), wanted)
        self._require("eos_token_ids", all(map(self._is_token, self.eos_token_ids)), wanted)

    def _require(self, name: str, valid: bool, wanted: str) -> None:
        if not valid:
            raise ConfigError(f"{name} must be {wanted}, not {getattr(self, name)!r}")

    def _is_token(self, token_id: object) -> bool:
        return _is_whole(token_id) and token_id in range(self.vocab_size)

    @property
    def n_groups(self) -> int:
        """Query heads that share one key-value head."""
        return self.n_head // self.n_kv_head

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecoderConfig:
        """Raises ConfigError naming an unknown or missing field."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ConfigError(f"unknown field {unknown[0]!r} in the decoder's configuration")
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if missing := sorted(required - values.keys()):
            raise ConfigError(f"the decoder's configuration lacks the field {missing[0]!r}")
        endings = values.get("eos_token_ids", ())
        if not isinstance(endings, list | tuple):
            raise ConfigError(f"eos_token_ids must be a list, not {endings!r}")
        return cls(**{**values, "eos_token_ids": tuple(endings)})

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


PRESETS = {
    "tiny": DecoderConfig(
        vocab_size=2048, max_model_len=1024, n_layer=4, n_head=6, n_kv_head=2, head_dim=32, d_model=192, d_ff=480
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
        feed_forward="gelu",
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
    ),
}


def preset(name: str, **changes: Any) -> DecoderConfig:
    """A preset with fields replaced. Raises ConfigError listing the names when there is none of this name, and naming
    a field that does not exist or a value that it cannot have.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return DecoderConfig.from_dict({**asdict(PRESETS[name]), **changes})

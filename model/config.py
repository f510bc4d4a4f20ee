"""DecoderConfig: everything that decides a decoder's shape and arithmetic, and the presets by name."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

Position = Literal["rotary", "learned", "sinusoidal"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post"]
FeedForward = Literal["swiglu", "gelu", "relu"]


class ConfigError(ValueError):
    """A configuration that no decoder can be built from; the message names the field and its value."""


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
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive whole number, not {value!r}")
        for name, kind in (
            ("position", Position),
            ("norm", Norm),
            ("norm_placement", NormPlacement),
            ("feed_forward", FeedForward),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        if self.n_head % self.n_kv_head:
            raise ConfigError(f"n_head ({self.n_head}) must be a multiple of n_kv_head ({self.n_kv_head})")
        multiple = 16 if self.position == "rotary" else 8  # what ONNX Runtime's GroupQueryAttention takes
        if self.head_dim % multiple:
            raise ConfigError(
                f"head_dim must be a multiple of {multiple} with {self.position} positions, not {self.head_dim}"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be at least 0 and less than 1, not {getattr(self, name)!r}")
        specials = self.eos_token_ids if self.bos_token_id is None else (*self.eos_token_ids, self.bos_token_id)
        if any(not 0 <= token < self.vocab_size for token in specials):
            raise ConfigError(f"special token ids {specials} must lie in the vocabulary of {self.vocab_size}")

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
        values = {**values, "eos_token_ids": tuple(values.get("eos_token_ids", ()))}
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"incomplete decoder configuration: {error}") from None

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
        vocab_size=49152, max_model_len=2048, n_layer=30, n_head=9, n_kv_head=3, head_dim=64, d_model=576, d_ff=1536
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
    """A preset with fields replaced. Raises ConfigError listing the names when there is none of this name."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)

"""Shapes of models by name."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from kvasir.model.config import Pooling, TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.configuration.parts import RopeScaling
from kvasir.model.configuration.recurrences import Lstm, Mamba2
from kvasir.model.platform.suggestions import did_you_mean


def _shape(*sizes: int) -> dict[str, Any]:
    """Name the sizes after the first fields, vocab_size to d_ff."""
    return {field.name: size for field, size in zip(fields(TransformerConfig), sizes, strict=False)}


def _with_encoder(sizes: tuple[int, ...], **fields: Any) -> TransformerConfig:
    """Return a decoder with an encoder of the same shape."""
    encoder = TransformerConfig(**_shape(*sizes), **fields, causal=False)
    # Token 0 ends the texts of a tokenizer that is trained here, and starts targets.
    return TransformerConfig(**_shape(*sizes), **fields, encoder=encoder, target_prefix=(0,))


def _with_lstm(cross_attention: str, *, both_ways: bool) -> TransformerConfig:
    """Return a decoder of two layers of LSTM with an encoder of as many numbers."""
    shape = _shape(2048, 1024, 2, 1, 1, 192, 192, 192)
    shape |= {"position": "none", "recurrent_layers": (0, 1), "layers_without_feed_forward": (0, 1)}
    read = Lstm(width=192 // (1 + both_ways), both_ways=both_ways)
    encoder = TransformerConfig(**shape, recurrence=read, causal=False)
    own: dict[str, Any] = {"cross_attention": cross_attention, "recurrence": Lstm(width=192)}
    return TransformerConfig(**shape, **own, encoder=encoder, target_prefix=(0,))


PRESETS = {
    "tiny": TransformerConfig(**_shape(2048, 1024, 4, 6, 2, 32, 192, 480)),
    "gpt2-124m": TransformerConfig(
        **_shape(50257, 1024, 12, 12, 12, 64, 768, 3072),
        position="learned",
        norm="layernorm",
        feed_forward="gelu_tanh",
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
    ),
    "smollm2-135m": TransformerConfig(
        **_shape(49152, 2048, 30, 9, 3, 64, 576, 1536), rope_theta=1e5
    ),
    "qwen2.5-0.5b": TransformerConfig(
        **_shape(151936, 2048, 24, 14, 2, 64, 896, 4864),
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
    ),
    "llama3.2-1b": TransformerConfig(
        **_shape(128256, 2048, 16, 32, 8, 64, 2048, 8192),
        rope_theta=5e5,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0, original_max_model_len=8192),
    ),
    "tiny-hybrid": TransformerConfig(
        **_shape(2048, 1024, 4, 6, 2, 32, 192, 480),
        recurrence=Mamba2(kernel=4, n_head=6, head_dim=32, d_state=64),
        recurrent_layers=(0, 1, 2),
    ),
    "tiny-encoder": TransformerConfig(
        **_shape(2048, 1024, 4, 6, 2, 32, 192, 480),
        causal=False,
        pooling=Pooling(kind="mean", normalize=True),
    ),
    "tiny-seq2seq": _with_encoder(
        (2048, 1024, 3, 6, 2, 32, 192, 480),
        position="sinusoidal",
        norm="layernorm",
        norm_placement="post",
    ),
    "tiny-lstm": _with_lstm("none", both_ways=False),  # after Sutskever et al. 2014
    "tiny-lstm-attention": _with_lstm("additive", both_ways=True),  # after Bahdanau et al. 2015
    "transformer-base": _with_encoder(
        (37000, 1024, 6, 8, 8, 64, 512, 2048),
        position="sinusoidal",
        norm="layernorm",
        norm_placement="post",
        feed_forward="relu",
        feed_forward_bias=True,
        dropout=0.1,
    ),  # Vaswani et al. 2017
}
_OF_DECODER = {"encoder", "shared_embedding", "target_prefix", "tied_embeddings", "head_bias"}
_OF_DECODER |= {"cross_attention"}


def preset(name: str, **changes: Any) -> TransformerConfig:
    """Return a preset with fields replaced. Raises ConfigError for a bad name, field or value.

    Changes of a decoder are also its encoder's; `encoder` has changes of that alone.
    """
    if name not in PRESETS:
        advice = did_you_mean(name, PRESETS, f"there are {', '.join(PRESETS)}")
        raise ConfigError(f"no preset {name!r}; {advice}")
    values = asdict(PRESETS[name])
    if values["encoder"] is not None:
        own = changes.pop("encoder", {})
        if not isinstance(own, dict):
            raise ConfigError(f"encoder must be an object of its fields, not {own!r}")
        shared = {key: value for key, value in changes.items() if key not in _OF_DECODER}
        values["encoder"] |= shared | own
    return TransformerConfig(**{**values, **changes})

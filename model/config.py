"""TransformerConfig: a Transformer's shape and arithmetic, and config.json."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, StrictBool, StrictInt, ValidationError
from pydantic.dataclasses import dataclass

from kvasir.model.files import read_object
from kvasir.model.suggestions import nearest

Position = Literal[
    "rotary", "learned", "sinusoidal", "alibi", "relative", "learned_relative", "none"
]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post", "both", "output"]
FeedForward = Literal[
    "swiglu", "geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped"
]
Activation = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh"]
LabelActivation = Literal["identity", "sigmoid", "softmax"]
Size = Annotated[int, Field(strict=True, gt=0, le=2**31 - 1)]
Positive = Annotated[float, Field(strict=True, gt=0.0, allow_inf_nan=False)]
DropoutRate = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]
T = TypeVar("T")
_TITLE = "the model's configuration"
_LONGEST_ERROR = 300  # characters: a value may be a list of millions
_EXPERT_MULTIPLE = 32  # of experts' sizes: ONNX Runtime rounds their weights in blocks of as many


class ConfigError(ValueError):
    """A configuration that no decoder can be built from; its message names the field and value."""


def first_problem(error: ValueError, known: Collection[str] = ()) -> str:
    """Return an error as one line: pydantic's first field, what it may be, and its value.

    known: names of fields, the nearest of which is suggested for an unknown one.
    """
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    *outer, name = map(str, first["loc"] or [error.title])
    where, path = ".".join(outer) or error.title, ".".join([*outer, name])
    if first["type"] == "missing":
        return f"{where} lacks the field {name!r}"
    if first["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        near = nearest(name, known)
        hint = "" if near is None else f"; did you mean {near!r}?"
        return f"unknown field {name!r} in {where}{hint}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])[:_LONGEST_ERROR]
    allowed = first["msg"].removeprefix("Input should be ")
    if allowed == first["msg"]:
        return f"{path}: {allowed}"
    return f"{path} must be {allowed}, not {first['input']!r:.{_LONGEST_ERROR}}"


def _raising_config_error(kind: type[T]) -> type[T]:
    """Make a pydantic dataclass's constructor raise ConfigError."""
    construct = kind.__init__

    @functools.wraps(construct)
    def init(self: T, **values: Any) -> None:
        try:
            construct(self, **values)
        except ValidationError as error:
            known = {*TransformerConfig.__dataclass_fields__, *Pooling.__dataclass_fields__}
            raise ConfigError(first_problem(error, known)) from None

    kind.__init__ = init  # type: ignore[assignment]
    return kind


@_raising_config_error
@dataclass(
    config=ConfigDict(extra="forbid", title="rope_scaling"), frozen=True, slots=True, kw_only=True
)
class RopeScaling:
    """A way to stretch rotary frequencies to more positions than a model was first trained on.

    kind: "linear" divides positions by `factor` (Chen et al. 2023); "llama3" divides low
    frequencies, and blends between two wavelengths (Llama 3.1); "yarn" divides the pairs that turn
    less than `beta_slow` times in `original_max_model_len` positions, keeps those that turn more
    than `beta_fast` times, and blends between (Peng et al. 2023). truncate: yarn rounds the pairs
    between which it blends outwards to whole ones. "longrope" divides each pair by its own number,
    of `short_factors` while max_model_len is at most `original_max_model_len` and of `long_factors`
    beyond (Ding et al. 2024). yarn and longrope multiply cos and sin by `attention_factor`; None is
    0.1 ln(factor) + 1 for yarn, and 1 for longrope.

    query_growth: queries at position p are multiplied by
    1 + query_growth · ln(1 + ⌊p / original_max_model_len⌋) (Llama 4, 2025).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: Positive
    original_max_model_len: Size | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    truncate: StrictBool = True
    short_factors: tuple[Positive, ...] = ()
    long_factors: tuple[Positive, ...] = ()
    query_growth: Positive | None = None

    def __post_init__(self) -> None:
        if self.kind != "linear" and self.original_max_model_len is None:
            raise ConfigError(
                f"rope_scaling {self.kind} needs original_max_model_len, a positive whole number"
            )
        if self.query_growth is not None and self.original_max_model_len is None:
            raise ConfigError("rope_scaling.query_growth needs original_max_model_len")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling.low_freq_factor ({self.low_freq_factor}) must be less than its "
                f"high_freq_factor ({self.high_freq_factor})"
            )


@_raising_config_error
@dataclass(
    config=ConfigDict(extra="forbid", title="projections"), frozen=True, slots=True, kw_only=True
)
class Projection:
    """A linear layer to `d_out` numbers, then an activation, and with `norm` a norm."""

    d_out: Size
    activation: Activation = "identity"
    bias: StrictBool = True
    norm: StrictBool = False


@_raising_config_error
@dataclass(
    config=ConfigDict(extra="forbid", title="pooling"), frozen=True, slots=True, kw_only=True
)
class Pooling:
    """One vector of a text from its tokens' (Reimers & Gurevych 2019).

    kind: that of the first token or of the last, or the mean of all. It goes through `projections`
    one after the other; `normalize` then makes its length 1. labels: the classes whose scores the
    vector holds, before label_activation; a reranker has one. Without labels it is an embedding.
    """

    kind: Literal["cls", "mean", "last"]
    projections: tuple[Projection, ...] = ()
    normalize: StrictBool = False
    labels: tuple[str, ...] = ()
    label_activation: LabelActivation = "identity"

    def __post_init__(self) -> None:
        if self.labels and (not self.projections or self.projections[-1].d_out != len(self.labels)):
            raise ConfigError(f"pooling.projections must end in {len(self.labels)} labels' scores")


@_raising_config_error
@dataclass(config=ConfigDict(extra="forbid", title=_TITLE), frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A Transformer: a decoder, an encoder, or a decoder with an encoder (Vaswani et al. 2017).

    causal: a token sees those before it alone, as in a decoder; in an encoder it sees all. pooling
    makes one vector of a text; a model with it computes no next tokens.
    encoder: a source goes through it, and each block attends to its vectors between attention and
    feed-forward. With shared_embedding both have one table of tokens. A target begins with
    target_prefix, which no source decides: a token that starts it, and perhaps one of its language.
    n_kv_head: n_head of them is multi-head attention, 1 is multi-query (Shazeer 2019), a number
    between is grouped-query (Ainslie et al. 2023). qk_norm: RMSNorm over each head of queries and
    keys (Henry et al. 2020), or, with `qk_norm_across_heads`, over all of a token's heads together
    (OLMo 2, 2025). attention_scale multiplies query · key; None is 1 / sqrt(head_dim).
    attention_softcap, logit_softcap: c in c · tanh(x / c), on scores and on logits (Gemma 2, 2024).
    sliding_window: in the layers of `sliding_window_layers` (None: in all) a token sees those that
    are less than so many positions away (Beltagy et al. 2020). attention_sinks: each head has a
    learned score beside those of the keys, which takes its share of the softmax and has no value
    (gpt-oss, 2025).

    position: "rotary" (Su et al. 2021), on `rotary_dim` channels of a head (None: all), except in
    the layers of `layers_without_rotary`; layers with a sliding window turn by
    `sliding_window_rope_theta`, unscaled, if there is one (Gemma 3, 2025); "learned" or
    "sinusoidal" embeddings; a bias on scores by distance: "alibi" (Press et al. 2022) or
    "relative", learned for `relative_buckets` of distances up to `relative_max_distance` (Raffel
    et al. 2020), of which an encoder has half for each direction; "learned_relative", both (Song
    et al. 2020); or "none". n_token_types: embeddings of token types, as of the texts of a pair
    (Devlin et al. 2019); a token is of type 0 unless told otherwise.

    norm_placement: "pre" normalises each sublayer's input (and the final output); "post" the sum of
    its input and output, as the original did; "both" its input and its output, "output" its output
    alone (and the final one); layers_without_attention_norm normalise no input of attention.
    embedding_norm: the sum of a token's embeddings is normalised too. norm_bias is a LayerNorm's.
    parallel_residual: both sublayers read the block's input (Wang & Komatsuzaki 2021).
    feed_forward: an activation, or a gated one (Shazeer 2020); _tanh is GELU's approximation.
    "swiglu_clamped" is gpt-oss's, for experts only: (up + 1) · gate · sigmoid(1.702 gate), with the
    gate at most 7 and up between -7 and 7.
    n_experts: the feed-forward of a layer is a mixture of so many, each `d_expert` wide, of which a
    router chooses `n_experts_per_token` for each token (Shazeer et al. 2017), except in the layers
    of `dense_layers`, whose feed-forward is `d_ff` wide. The experts' shares are their softmax over
    all experts or, with `normalize_expert_shares`, over those that were chosen.
    qkv_bias, output_bias, feed_forward_bias, head_bias: a bias on the linear layers of that name.
    embedding_scale multiplies token embeddings. dropout (of residuals and embeddings) and
    attention_dropout act in training only. The constructor raises ConfigError.
    """

    vocab_size: Size
    max_model_len: Annotated[Size, Field(ge=2)]  # a token of prompt and a new one
    n_layer: Size
    n_head: Size
    n_kv_head: Size
    head_dim: Size
    d_model: Size
    d_ff: Size
    causal: StrictBool = True
    encoder: TransformerConfig | None = None
    shared_embedding: StrictBool = True
    target_prefix: tuple[StrictInt, ...] = ()
    pooling: Pooling | None = None
    n_token_types: Size | None = None
    position: Position = "rotary"
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: Annotated[int | None, Field(strict=True, gt=0, multiple_of=2)] = None
    layers_without_rotary: tuple[StrictInt, ...] = ()
    relative_buckets: Annotated[Size, Field(ge=2)] = 32
    relative_max_distance: Size = 128
    sliding_window: Size | None = None
    sliding_window_layers: tuple[StrictInt, ...] | None = None
    sliding_window_rope_theta: Positive | None = None
    qk_norm: StrictBool = False
    qk_norm_across_heads: StrictBool = False
    attention_sinks: StrictBool = False
    attention_scale: Positive | None = None
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    embedding_scale: Positive = 1.0
    norm: Norm = "rmsnorm"
    norm_eps: Positive = 1e-5
    norm_bias: StrictBool = True
    norm_placement: NormPlacement = "pre"
    layers_without_attention_norm: tuple[StrictInt, ...] = ()
    embedding_norm: StrictBool = False
    parallel_residual: StrictBool = False
    feed_forward: FeedForward = "swiglu"
    n_experts: Size | None = None
    n_experts_per_token: Size | None = None
    d_expert: Size | None = None
    normalize_expert_shares: StrictBool = False
    dense_layers: tuple[StrictInt, ...] = ()
    qkv_bias: StrictBool = False
    output_bias: StrictBool = False
    feed_forward_bias: StrictBool = False
    head_bias: StrictBool = False
    tied_embeddings: StrictBool = True
    dropout: DropoutRate = 0.0
    attention_dropout: DropoutRate = 0.0
    bos_token_id: StrictInt | None = None
    eos_token_ids: tuple[StrictInt, ...] = ()

    def __post_init__(self) -> None:
        """Check what depends on more than one field."""
        require = self._require
        allowed = f"a multiple of n_kv_head, {self.n_kv_head}"
        require("n_head", self.n_head % self.n_kv_head == 0, allowed)
        multiple = 16 if self.position == "rotary" else 8  # GroupQueryAttention takes no other
        allowed = f"a multiple of {multiple} with {self.position} positions"
        require("head_dim", self.head_dim % multiple == 0, allowed)
        allowed = f"at most head_dim, {self.head_dim}"
        require("rotary_dim", (self.rotary_dim or 0) <= self.head_dim, allowed)
        if self.position != "rotary":
            of_rotary = ("rope_scaling", "rotary_dim", "layers_without_rotary")
            for name in (*of_rotary, "sliding_window_rope_theta"):
                require(name, not getattr(self, name), f"left out with {self.position} positions")
        if self.sliding_window is None:
            for name in ("sliding_window_layers", "sliding_window_rope_theta"):
                without = getattr(self, name) is None
                require(name, without, "left out without a sliding_window")
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            n_pairs = (self.rotary_dim or self.head_dim) // 2
            for name in ("short_factors", "long_factors"):
                if (given := len(getattr(self.rope_scaling, name))) != n_pairs:
                    raise ConfigError(
                        f"rope_scaling.{name} must have a number for each of {n_pairs} rotary "
                        f"pairs, not {given}"
                    )
        if self.rope_scaling is not None and self.rope_scaling.query_growth is not None:
            require("qk_norm", not self.qk_norm, "left out with a query_growth")
        across = self.qk_norm or not self.qk_norm_across_heads
        require("qk_norm_across_heads", across, "left out without qk_norm")
        of_layers = ("layers_without_rotary", "sliding_window_layers", "dense_layers")
        for name in (*of_layers, "layers_without_attention_norm"):
            exist = all(layer in range(self.n_layer) for layer in getattr(self, name) or ())
            require(name, exist, f"layers from 0 to {self.n_layer - 1}")
        if self.has_relative_bias:  # the first half of a direction's buckets are single distances
            single = self.relative_buckets // (2 if self.causal else 4)
            require("relative_buckets", single > 0, "at least 4 for two directions")
            allowed = f"more than {single}, which relative_buckets hold singly"
            require("relative_max_distance", self.relative_max_distance > single, allowed)
        self._check_experts()
        headless = self.pooling is None or (self.tied_embeddings and not self.head_bias)
        require("tied_embeddings", headless, "true with a pooling, which leaves no head")
        pre = not self.parallel_residual or self.norm_placement == "pre"
        require("norm_placement", pre, "pre with parallel_residual")
        allowed = f"in the vocabulary of {self.vocab_size}"
        bos = self.bos_token_id is None or self.bos_token_id in range(self.vocab_size)
        require("bos_token_id", bos, allowed)
        untied = not (self.head_bias and self.tied_embeddings) or self.encoder is not None
        require("head_bias", untied, "left out with tied_embeddings")
        for name in ("eos_token_ids", "target_prefix"):
            known = all(token_id in range(self.vocab_size) for token_id in getattr(self, name))
            require(name, known, allowed)
        self._check_encoder()

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            raise ConfigError(f"{name} must be {allowed}, not {getattr(self, name)!r}")

    def _check_encoder(self) -> None:
        require, encoder = self._require, self.encoder
        prefixed = bool(self.target_prefix) == (encoder is not None)
        require("target_prefix", prefixed, "given with an encoder, and only then")
        if encoder is None:
            require("shared_embedding", self.shared_embedding, "true without an encoder")
            return
        require("causal", self.causal, "true with an encoder")
        require("pooling", self.pooling is None, "left out with an encoder")
        allowed = "pre or post with an encoder"
        require("norm_placement", self.norm_placement in ("pre", "post"), allowed)
        require("parallel_residual", not self.parallel_residual, "false with an encoder")
        plain = encoder.encoder is None and encoder.pooling is None and encoder.tied_embeddings
        if encoder.causal or not plain:
            raise ConfigError(
                "encoder must be one that is not causal, without encoder, pooling and head"
            )
        if self.shared_embedding:
            for name in ("vocab_size", "d_model"):
                if (its := getattr(encoder, name)) != getattr(self, name):
                    allowed = f"the encoder's, {its}, with shared_embedding"
                    require(name, False, allowed)

    def _check_experts(self) -> None:
        require = self._require
        of_mixtures = ("n_experts_per_token", "d_expert", "normalize_expert_shares", "dense_layers")
        if self.n_experts is None:
            for name in of_mixtures:
                require(name, not getattr(self, name), "left out without n_experts")
            dense = self.feed_forward != "swiglu_clamped"
            require("feed_forward", dense, "another one without n_experts")
        else:
            chosen = (self.n_experts_per_token or 0) in range(1, self.n_experts + 1)
            require("n_experts_per_token", chosen, f"from 1 to n_experts, {self.n_experts}")
            allowed = f"a multiple of {_EXPERT_MULTIPLE} with experts"
            for name in ("d_expert", "d_model"):
                size = getattr(self, name)
                require(name, size is not None and size % _EXPERT_MULTIPLE == 0, allowed)
            gated = ("swiglu",) if self.dense_layers else ("swiglu", "swiglu_clamped")
            allowed = f"{' or '.join(gated)} with these experts"
            require("feed_forward", self.feed_forward in gated, allowed)

    def check_size(self, n_numbers: int) -> None:
        """Raise ConfigError if `n_numbers` are too few for the weights, before memory is taken."""
        if (least := self.least_weights) > n_numbers:
            raise ConfigError(
                f"a model of this shape has at least {least:,} weights, and there are "
                f"{n_numbers:,}; copy the files again"
            )

    @property
    def least_weights(self) -> int:
        """A lower bound on the number of weights."""
        n_mixtures = sum(map(self.has_experts, range(self.n_layer)))
        widths = self.d_ff * (self.n_layer - n_mixtures)
        widths += (self.n_experts or 0) * (self.d_expert or 0) * n_mixtures
        matrices = 2 * (widths + self.n_head * self.head_dim * self.n_layer)
        rows = self.vocab_size + self.max_model_len * self.has_learned_positions
        least = (matrices + rows) * self.d_model
        if self.has_relative_bias:
            least += self.relative_buckets * self.n_head
        if self.encoder is None:
            return least
        shared = self.vocab_size * self.d_model * self.shared_embedding
        return least + self.encoder.least_weights - shared

    @property
    def n_groups(self) -> int:
        """The number of query heads that share one key-value head."""
        return self.n_head // self.n_kv_head

    @property
    def query_scale(self) -> float:
        """The factor of query · key."""
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def has_learned_positions(self) -> bool:
        """Tell whether positions have learned embeddings."""
        return self.position in ("learned", "learned_relative")

    @property
    def has_relative_bias(self) -> bool:
        """Tell whether distances have learned biases."""
        return self.position in ("relative", "learned_relative")

    def rotates(self, layer: int) -> bool:
        """Tell whether a layer turns its queries and keys by their positions."""
        return self.position == "rotary" and layer not in self.layers_without_rotary

    def window_of(self, layer: int) -> int | None:
        """Return how many positions away the nearest unseen token of a layer is; None is none."""
        layers = self.sliding_window_layers
        return self.sliding_window if layers is None or layer in layers else None

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer's feed-forward is a mixture of experts."""
        return self.n_experts is not None and layer not in self.dense_layers

    @classmethod
    def load(cls, path: Path) -> TransformerConfig:
        """Read config.json. Raises ConfigError for bad contents, OSError for an unreadable file."""
        return cls(**read_object(path, ConfigError))

    def save(self, path: Path) -> None:
        """Write config.json."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

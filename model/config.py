"""TransformerConfig: a Transformer's shape and arithmetic, and config.json."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt

from kvasir.model.configuration.fields import ConfigError, DropoutRate, Positive, Size, checked
from kvasir.model.configuration.parts import FeedForward, Latents, Position, Projection, RopeScaling
from kvasir.model.configuration.recurrences import Recurrence, states_of
from kvasir.model.configuration.rules import rules
from kvasir.model.platform.files import read_object


@checked("pooling")
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
    label_activation: Literal["identity", "sigmoid", "softmax"] = "identity"

    def __post_init__(self) -> None:
        if self.labels and (not self.projections or self.projections[-1].d_out != len(self.labels)):
            raise ConfigError(f"pooling.projections must end in {len(self.labels)} labels' scores")


@checked("the model's configuration")
class TransformerConfig:
    """A Transformer: a decoder, an encoder, or a decoder with an encoder (Vaswani et al. 2017).

    causal: a token sees those before it alone, as in a decoder; in an encoder it sees all. pooling
    makes one vector of a text; a model with it computes no next tokens.
    encoder: a source goes through it, and each block attends to its vectors between attention and
    feed-forward. With shared_embedding both have one table of tokens. A target begins with
    target_prefix, which no source decides: a token that starts it, and perhaps one of its language.
    cross_attention: in a decoder of LSTMs it may be "additive", of scores v · tanh(W s + U h)
    (Bahdanau et al. 2015), or "none", which leaves them their first state (Sutskever et al. 2014).
    n_kv_head: n_head of them is multi-head attention, 1 is multi-query (Shazeer 2019), a number
    between is grouped-query (Ainslie et al. 2023). qk_norm: RMSNorm over each head of queries and
    keys (Henry et al. 2020), or, with `qk_norm_across_heads`, over all of a token's heads together
    (OLMo 2, 2025), or a LayerNorm over each, as `qk_norm_kind` says; `qk_norm_after_rotary`: once
    these are turned; not in layers_without_qk_norm. qkv_clip: queries, keys and values lie between
    -qkv_clip and qkv_clip (DBRX, 2024). attention_scale: of query · key; None: 1 / sqrt(head_dim).
    latents: keys and values are latents: attention has one key-value head, whose key is a token's
    latent and rotary_dim channels, together head_dim, and whose value is the latent. These channels
    are turned, unless position is "none". attention_scale: None is 1 / sqrt(key_dim + rotary_dim).
    recurrence: of the layers of recurrent_layers, in the place of attention. Such a layer keeps a
    state of fixed size for each row, and no keys and values, or with recurrence_beside_attention
    both, and adds what they make of its input (Falcon-H1, 2025).
    attention_gate: what is attended is multiplied by the sigmoid of a linear layer of attention's
    input (Qwen3-Next, 2025), which has a number for each channel or, with attention_gate_by_head,
    for each head (LFM3, 2026).
    attention_softcap, logit_softcap: c in c · tanh(x / c), on scores and on logits (Gemma 2, 2024).
    sliding_window: in the layers of `sliding_window_layers` (None: in all) a token sees those that
    are less than so many positions away (Beltagy et al. 2020). attention_sinks: each head has a
    learned score beside those of keys, with a share of the softmax and no value (gpt-oss, 2025).

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
    alone (and the final one); "output_of_attention" is that in layers of attention, and "pre" in
    recurrent ones (OLMo Hybrid, 2026); layers_without_attention_norm have none before attention.
    embedding_norm: the sum of a token's embeddings is normalised too. norm_bias is a LayerNorm's.
    parallel_residual: both sublayers read the block's input (Wang & Komatsuzaki 2021).
    feed_forward: an activation, or a gated one (Shazeer 2020); _tanh is GELU's approximation;
    relu2 is max(x, 0)² (So et al. 2021), xielu has two learned numbers (Huang & Schlag 2024).
    "swiglu_clamped" is gpt-oss's, for experts only: (up + 1) · gate · sigmoid(1.702 gate), with the
    gate at most 7 and up between -7 and 7.
    n_experts: the feed-forward of a layer is a mixture of so many, each `d_expert` wide, of which a
    router chooses `n_experts_per_token` for each token (Shazeer et al. 2017), except in the layers
    of `dense_layers`, whose feed-forward is `d_ff` wide. The experts' shares are `router` of their
    logits, where "sparse_mixer" is a softmax over those near the best that is left, for one chosen
    after the other (Liu et al. 2024); with `normalize_expert_shares` those of the chosen sum to 1.
    expert_scale multiplies them. shares_scale_inputs: they multiply what experts read instead
    (Llama 4, 2025). choice_bias: for the choice alone a bias is added to these (DeepSeek-V3, 2024).
    n_expert_groups: experts are chosen from as many groups of these as `n_groups_per_token` says,
    those whose `n_best_of_group` best sum to most. d_shared_expert: the width of one more expert,
    of every token; with `shared_expert_gate` it is multiplied by the sigmoid of a number of the
    token's. mixture_norm: what a mixture makes is normalised.
    layers_without_feed_forward: attention or a recurrence is all that these layers have.
    head_projection: a layer of d_model numbers between the last norm and the head.
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
    cross_attention: Literal["dot", "additive", "none"] = "dot"
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
    qk_norm_kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    qk_norm_after_rotary: StrictBool = False
    layers_without_qk_norm: tuple[StrictInt, ...] = ()
    qkv_clip: Positive | None = None
    latents: Latents | None = None
    recurrence: Recurrence | None = None
    recurrent_layers: tuple[StrictInt, ...] = ()
    recurrence_beside_attention: StrictBool = False
    attention_gate: StrictBool = False
    attention_gate_by_head: StrictBool = False
    attention_sinks: StrictBool = False
    attention_scale: Positive | None = None
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    embedding_scale: Positive = 1.0
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Positive = 1e-5
    norm_bias: StrictBool = True
    norm_placement: Literal["pre", "post", "both", "output", "output_of_attention"] = "pre"
    layers_without_attention_norm: tuple[StrictInt, ...] = ()
    embedding_norm: StrictBool = False
    parallel_residual: StrictBool = False
    feed_forward: FeedForward = "swiglu"
    n_experts: Size | None = None
    n_experts_per_token: Size | None = None
    d_expert: Size | None = None
    router: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    normalize_expert_shares: StrictBool = False
    expert_scale: Positive = 1.0
    shares_scale_inputs: StrictBool = False
    choice_bias: Literal["scores", "logits"] | None = None
    n_expert_groups: Size | None = None
    n_groups_per_token: Size | None = None
    n_best_of_group: Size = 2
    d_shared_expert: Size | None = None
    shared_expert_gate: StrictBool = False
    mixture_norm: StrictBool = False
    dense_layers: tuple[StrictInt, ...] = ()
    layers_without_feed_forward: tuple[StrictInt, ...] = ()
    head_projection: Projection | None = None
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
        for name, valid, allowed in rules(self):
            if not valid:
                raise ConfigError(f"{name} must be {allowed}, not {getattr(self, name)!r}")

    @property
    def n_groups(self) -> int:
        """The number of query heads that share one key-value head."""
        return self.n_head // self.n_kv_head

    @property
    def query_scale(self) -> float:
        """The factor of query · key."""
        if self.cross_attention == "additive":  # the only attention there is
            return 1.0
        own = self.latents and self.latents.key_dim + (self.rotary_dim or 0)
        return self.attention_scale or 1.0 / math.sqrt(own or self.head_dim)

    @property
    def n_attention_layer(self) -> int:
        """The number of layers that keep keys and values."""
        return self.n_layer - len(() if self.recurrence_beside_attention else self.recurrent_layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values."""
        return tuple(layer for layer in range(self.n_layer) if self.attends(layer))

    def attends(self, layer: int) -> bool:
        """Tell whether a layer keeps keys and values."""
        return self.recurrence_beside_attention or layer not in self.recurrent_layers

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part of a recurrent layer's state, by name."""
        return {} if self.recurrence is None else states_of(self.recurrence, self.d_model)

    def heads_of(self, layer: int) -> int:
        """Return the number of a layer's heads, of attention if it has it; some have none."""
        if self.attends(layer) or self.cross_attention == "additive":
            return self.n_head
        return self.states.get("values", (0,))[0]

    @property
    def n_source_layer(self) -> int:
        """The number of layers that attend to a source."""
        return 0 if self.encoder is None or self.cross_attention == "none" else self.n_layer

    @property
    def cache_shape(self) -> tuple[int, int, int, bool, tuple[tuple[int, ...], ...]]:
        """The sizes of a row's memory.

        Layers of attention, key-value heads, channels of each, whether values are keys, and states.
        """
        states = tuple(self.states.values()) * len(self.recurrent_layers)
        heads = self.n_attention_layer, self.n_kv_head, self.head_dim
        return *heads, self.latents is not None, states

    @property
    def turns_outside(self) -> bool:
        """True if heads are turned before attention's operator gets them."""
        return self.qk_norm_after_rotary or self.latents is not None

    @property
    def has_plain_head_norms(self) -> bool:
        """True if RMSNorms over each head of queries and keys are last before attention."""
        other = self.qk_norm_across_heads or self.qk_norm_after_rotary or self.qkv_clip
        return self.qk_norm and self.qk_norm_kind == "rmsnorm" and not other

    @property
    def has_head_norm_bias(self) -> bool:
        """True if norms of queries and keys add a bias."""
        return self.qk_norm_kind == "layernorm" and self.norm_bias

    @property
    def has_learned_positions(self) -> bool:
        """True if positions have learned embeddings."""
        return self.position in ("learned", "learned_relative")

    @property
    def has_relative_bias(self) -> bool:
        """True if distances have learned biases."""
        return self.position in ("relative", "learned_relative")

    def rotates(self, layer: int) -> bool:
        """Tell whether a layer turns its queries and keys by their positions."""
        return self.position == "rotary" and layer not in self.layers_without_rotary

    def norms_heads(self, layer: int) -> bool:
        """Tell whether a layer normalises queries and keys."""
        return self.qk_norm and layer not in self.layers_without_qk_norm

    def placement_of(self, layer: int) -> str:
        """Return where a layer's norms are: `norm_placement`, or what it means in the layer."""
        if self.norm_placement != "output_of_attention":
            return self.norm_placement
        return "pre" if layer in self.recurrent_layers else "output"

    def window_of(self, layer: int) -> int | None:
        """Return how many positions away the nearest unseen token of a layer is; None is none."""
        layers = self.sliding_window_layers
        return self.sliding_window if layers is None or layer in layers else None

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer's feed-forward is a mixture of experts."""
        others = (*self.dense_layers, *self.layers_without_feed_forward)
        return self.n_experts is not None and layer not in others

    @classmethod
    def load(cls, path: Path) -> TransformerConfig:
        """Read config.json. Raises ConfigError for bad contents, OSError for an unreadable file."""
        return cls(**read_object(path, ConfigError))

    def save(self, path: Path) -> None:
        """Write config.json."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

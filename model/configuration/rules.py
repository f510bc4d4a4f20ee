"""The rules of a configuration's fields that depend on one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_EXPERT_MULTIPLE = 32  # of experts' sizes: ONNX Runtime rounds their weights in blocks of as many
_LAYERS = (
    *("layers_without_rotary", "sliding_window_layers"),
    *("dense_layers", "layers_without_attention_norm", "layers_without_qk_norm"),
    *("recurrent_layers", "layers_without_feed_forward"),
)
_OF_EXPERTS = (
    *("n_experts_per_token", "d_expert", "normalize_expert_shares", "dense_layers"),
    *("choice_bias", "n_expert_groups", "n_groups_per_token"),
    *("d_shared_expert", "shared_expert_gate", "mixture_norm", "shares_scale_inputs"),
)
Rule = tuple[str, bool, str]  # a field, whether its value is valid, and what it must be


def rules(config: Any) -> Iterator[Rule]:
    """Yield the rules of a TransformerConfig, which itself asks for them.

    Later ones are for configurations that the earlier ones allow.
    """
    yield from _heads(config)
    yield from _positions(config)
    layers = range(config.n_layer)
    for name in _LAYERS:
        exist = all(layer in layers for layer in getattr(config, name) or ())
        yield name, exist, f"layers from 0 to {config.n_layer - 1}"
    yield from _recurrence(config)
    yield from _experts(config)
    headless = config.pooling is None or (config.tied_embeddings and not config.head_bias)
    yield "tied_embeddings", headless, "true with a pooling, which leaves no head"
    pre = not config.parallel_residual or config.norm_placement == "pre"
    yield "norm_placement", pre, "pre with parallel_residual"
    plain = config.norm_placement == "pre" and not config.parallel_residual
    allowed = "left out with parallel_residual, or norms after sublayers"
    yield "layers_without_feed_forward", plain or not config.layers_without_feed_forward, allowed
    if (projection := config.head_projection) is not None:
        plain = config.pooling is None and config.encoder is None
        yield "head_projection", plain, "left out with a pooling or an encoder"
        fits = projection.d_out == config.d_model and not projection.bias
        allowed = f"one with d_out of d_model, {config.d_model}, and without bias"
        yield "head_projection", fits, allowed
    for name in ("bos_token_id", "eos_token_ids", "target_prefix"):
        ids = getattr(config, name)
        ids = ids if isinstance(ids, tuple) else () if ids is None else (ids,)
        within = all(token_id in range(config.vocab_size) for token_id in ids)
        yield name, within, f"in the vocabulary of {config.vocab_size}"
    yield from _encoder(config)


def _heads(config: Any) -> Iterator[Rule]:
    divides = config.n_head % config.n_kv_head == 0
    yield "n_head", divides, f"a multiple of n_kv_head, {config.n_kv_head}"
    multiple = 16 if config.position == "rotary" else 8  # GroupQueryAttention takes no other
    allowed = f"a multiple of {multiple} with {config.position} positions"
    yield "head_dim", config.head_dim % multiple == 0, allowed
    fits = (config.rotary_dim or 0) <= config.head_dim
    yield "rotary_dim", fits, f"at most head_dim, {config.head_dim}"
    for name in ("qk_norm_across_heads", "qk_norm_after_rotary", "layers_without_qk_norm"):
        yield name, config.qk_norm or not getattr(config, name), "left out without qk_norm"
    gated = config.attention_gate or not config.attention_gate_by_head
    yield "attention_gate_by_head", gated, "left out without an attention_gate"
    by_head = config.qk_norm and not config.qk_norm_across_heads
    yield "qk_norm_kind", by_head or config.qk_norm_kind == "rmsnorm", "rmsnorm here"
    if config.latents is not None:
        yield from _latents(config)
    encoded = config.encoder is not None or not config.causal
    for name in ("qkv_clip", "qk_norm_after_rotary"):
        yield name, not (encoded and getattr(config, name)), "left out in and with an encoder"


def _latents(config: Any) -> Iterator[Rule]:
    has_shared = config.position in ("rotary", "none") and config.rotary_dim is not None
    yield "latents", has_shared, "left out without rotary_dim, or with positions of other kinds"
    width = config.latents.rank + config.rotary_dim
    yield "head_dim", config.head_dim == width, f"its rank and rotary_dim, {width}, with latents"
    yield "n_kv_head", config.n_kv_head == 1, "1 with latents"
    growing = config.rope_scaling is not None and config.rope_scaling.query_growth is not None
    yield "rope_scaling", not growing, "one without query_growth with latents"
    others = ("qk_norm", "qkv_clip", "qkv_bias", "encoder", "pooling", "sliding_window_rope_theta")
    for name in others:
        yield name, not getattr(config, name), "left out with latents"
    by_head = config.attention_gate_by_head or not config.attention_gate
    yield "attention_gate_by_head", by_head, "true with an attention_gate and latents"


def _recurrence(config: Any) -> Iterator[Rule]:
    is_recurrent = config.recurrence is not None
    given = bool(config.recurrent_layers) == is_recurrent
    yield "recurrent_layers", given, "given with a recurrence, and only then"
    once = len({*config.recurrent_layers}) == len(config.recurrent_layers)
    yield "recurrent_layers", once, "layers that are listed once"
    biased = config.position == "alibi" or config.has_relative_bias
    allowed = "one without biases on scores where all layers are recurrent"
    yield "position", config.n_attention_layer > 0 or not biased, allowed
    is_lstm = is_recurrent and config.recurrence.kind == "lstm"
    in_pairs = config.encoder is not None or not config.causal
    yield "recurrence", config.pooling is None or not is_recurrent, "left out with a pooling"
    allowed = "an lstm in and with an encoder, and only there"
    yield "recurrence", in_pairs == is_lstm or not is_recurrent, allowed
    every = len(config.recurrent_layers) == config.n_layer
    yield "recurrent_layers", every or not is_lstm, "all layers with an lstm"
    beside = not config.recurrence_beside_attention or (is_recurrent and not is_lstm)
    yield "recurrence_beside_attention", beside, "false without recurrent layers, or with an lstm"
    backwards = is_lstm and not config.causal
    allowed = "an lstm without both_ways outside an encoder"
    yield "recurrence", backwards or not getattr(config.recurrence, "both_ways", False), allowed
    allowed = "additive or none with an encoder and recurrent layers of lstm, and dot without"
    own = is_lstm and config.encoder is not None
    yield "cross_attention", own != (config.cross_attention == "dot"), allowed
    alone = config.cross_attention != "additive" or config.n_head == config.n_kv_head
    yield "n_kv_head", alone, "n_head with additive cross_attention"


def _positions(config: Any) -> Iterator[Rule]:
    own_theta = "sliding_window_rope_theta"
    if config.position != "rotary":
        for name in ("rope_scaling", "rotary_dim", "layers_without_rotary", own_theta):
            is_width = name == "rotary_dim" and config.latents is not None
            unset = is_width or not getattr(config, name)
            yield name, unset, f"left out with {config.position} positions"
    if config.sliding_window is None:
        for name in ("sliding_window_layers", own_theta):
            yield name, getattr(config, name) is None, "left out without a sliding_window"
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        n_pairs = (config.rotary_dim or config.head_dim) // 2
        for name in ("short_factors", "long_factors"):
            n_given = len(getattr(scaling, name))
            allowed = f"one with {n_pairs} {name}, for as many rotary pairs (it has {n_given})"
            yield "rope_scaling", n_given == n_pairs, allowed
    if scaling is not None and scaling.kind == "yarn":
        yield "rope_theta", config.rope_theta > 1.0, "more than 1 with yarn"
    if scaling is not None and scaling.query_growth is not None:
        for name in ("qk_norm", "qkv_clip"):
            yield name, not getattr(config, name), "left out with a query_growth"
    if config.qk_norm_after_rotary:
        unset = config.sliding_window_rope_theta is None
        yield own_theta, unset, "left out with qk_norm_after_rotary"
    if config.has_relative_bias:  # the first half of a direction's buckets are single distances
        single = config.relative_buckets // (2 if config.causal else 4)
        yield "relative_buckets", single > 0, "at least 4 for two directions"
        allowed = f"more than {single}, which relative_buckets hold singly"
        yield "relative_max_distance", config.relative_max_distance > single, allowed


def _experts(config: Any) -> Iterator[Rule]:
    if config.n_experts is None:
        for name in _OF_EXPERTS:
            yield name, not getattr(config, name), "left out without n_experts"
        yield "router", config.router == "softmax", "left out without n_experts"
        yield "expert_scale", config.expert_scale == 1.0, "left out without n_experts"
        yield "n_best_of_group", config.n_best_of_group == 2, "left out without n_experts"
        dense = config.feed_forward != "swiglu_clamped"
        yield "feed_forward", dense, "another one without n_experts"
        return
    chosen = (config.n_experts_per_token or 0) in range(1, config.n_experts + 1)
    yield "n_experts_per_token", chosen, f"from 1 to n_experts, {config.n_experts}"
    for name in ("d_expert", "d_model"):
        fits = bool(getattr(config, name)) and getattr(config, name) % _EXPERT_MULTIPLE == 0
        yield name, fits, f"a multiple of {_EXPERT_MULTIPLE} with experts"
    n_groups, n_kept = config.n_expert_groups or 1, config.n_groups_per_token or 1
    n_best = config.n_best_of_group
    of_some = config.n_experts % n_groups == 0 and (
        n_groups == 1 or config.n_experts >= n_best * n_groups
    )
    allowed = f"a part of {config.n_experts} experts, in groups of {n_best} or more"
    yield "n_expert_groups", of_some, allowed
    yield "n_groups_per_token", n_kept <= n_groups, f"at most n_expert_groups, {n_groups}"
    enough = (config.n_experts_per_token or 0) <= n_kept * config.n_experts // n_groups
    yield "n_experts_per_token", enough, "at most the experts of n_groups_per_token groups"
    gated = bool(config.d_shared_expert) or not config.shared_expert_gate
    yield "shared_expert_gate", gated, "left out without d_shared_expert"
    if config.router == "sparse_mixer":
        for name in ("choice_bias", "n_expert_groups", "normalize_expert_shares"):
            yield name, not getattr(config, name), "left out with a sparse_mixer"
    simple = not config.dense_layers and not config.d_shared_expert
    kinds = ("swiglu", "swiglu_clamped") if simple else ("swiglu",)
    allowed = f"{' or '.join(kinds)} with these experts"
    yield "feed_forward", config.feed_forward in kinds, allowed


def _encoder(config: Any) -> Iterator[Rule]:
    encoder = config.encoder
    prefixed = bool(config.target_prefix) == (encoder is not None)
    yield "target_prefix", prefixed, "given with an encoder, and only then"
    if encoder is None:
        yield "shared_embedding", config.shared_embedding, "true without an encoder"
        return
    yield "causal", config.causal, "true with an encoder"
    yield "pooling", config.pooling is None, "left out with an encoder"
    allowed = "pre or post with an encoder"
    yield "norm_placement", config.norm_placement in ("pre", "post"), allowed
    yield "parallel_residual", not config.parallel_residual, "false with an encoder"
    faults = [name for name in ("causal", "encoder", "pooling") if getattr(encoder, name)]
    faults += [] if encoder.tied_embeddings else ["head"]
    allowed = f"one without causal, encoder, pooling and head (it has {' and '.join(faults)})"
    yield "encoder", not faults, allowed
    if config.shared_embedding:
        for name in ("vocab_size", "d_model"):
            its = getattr(encoder, name)
            same = its == getattr(config, name)
            yield name, same, f"the encoder's, {its}, with shared_embedding"

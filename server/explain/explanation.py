"""An explanation's parts, labels of heads by what they attend to, and the limits of questions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.model.config import TransformerConfig
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.errors import ContextLengthError, InvalidRequestError
from kvasir.server.explain.memory import Memory
from kvasir.server.explain.next_tokens import Effect, NextToken

MAX_TOKENS = 512  # a head has n² weights for n tokens
# Of labels of heads.
_LEAST_SHARE = 0.3  # of attention that a label stands for
_LEAST_LIFT = 2.0  # of that share over even attention's
_LEAST_ROWS = 4  # that see a key of a kind; fewer say little
_FIRST_ROW = 2  # before it, the first token is also the previous one or the token itself


class Head(NamedTuple):
    """One head of the decoder's, or of the encoder's, own attention, or of a recurrent layer."""

    layer: int
    head: int


@dataclass(frozen=True, slots=True)
class Questions:
    """Parts of an explanation beside attention weights, each left out unless it is asked for.

    top_k: of the likeliest next tokens. position: of the token after which they come, the last by
    default. without: heads whose output is 0. lens: number of likeliest tokens after each layer.
    entropies: of every head's row at the position. values_of: a head's queries, keys and values.
    """

    top_k: int = 10
    position: int | None = None
    without: tuple[Head, ...] = ()
    lens: int = 0
    entropies: bool = False
    values_of: Head | None = None

    def check(self, n_tokens: int, config: TransformerConfig) -> None:
        """Raise InvalidRequestError for what a text of so many tokens, or the model, has not."""
        named = [(head, "without") for head in self.without]
        named += [] if self.values_of is None else [(self.values_of, "head_values")]
        for (layer, head), param in named:
            check_index("layer", layer, config.n_layer, param)
            check_head(head, layer, config, param)
        if self.values_of is not None and not config.attends(self.values_of.layer):
            message = f"head_values are of attention, and layer {self.values_of.layer} is recurrent"
            raise InvalidRequestError(message, param="head_values")
        if self.without and config.cross_attention == "additive":
            message = "heads that attend to a source alone are not switched off; leave without out"
            raise InvalidRequestError(message, param="without")
        if self.position is not None and self.position not in range(n_tokens):
            message = f"there is no position {self.position}; the text has 0 to {n_tokens - 1}"
            raise InvalidRequestError(message, param="position")
        if config.pooling is not None:
            for name in ("position", "lens", "entropies"):
                if getattr(self, name) != getattr(Questions(), name):
                    message = f"{name} is for models that predict tokens, and this is an encoder"
                    raise InvalidRequestError(message, param=name)


@dataclass(frozen=True, slots=True)
class HeadValues:
    """The parts of a head's weights; `scale` and the model's soft cap are not yet applied.

    queries, keys, values: float [n_tokens, head_dim], after norms and rotation. scores: Q Kᵀ,
    [n_tokens, n_tokens]. bias: [n_tokens, n_tokens], added to scores when they are scaled. sink: a
    further score in the softmax of each row, which collects nothing.
    """

    layer: int
    head: int
    scale: float
    queries: Floats
    keys: Floats
    values: Floats
    scores: Floats
    bias: Floats | None
    sink: float | None


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One head's shares of attention by kind, and the kind that stands out, if one does."""

    label: str | None
    shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The attention weights of one text, and the candidates for its next token, likeliest first.

    weights: by layer, float [n_head, n_tokens, n_tokens]. A row is a query, whose weights over the
    keys sum to 1. In a decoder those of later keys are exactly 0; an encoder has no next tokens.
    source_…: of an encoder-decoder's source, whose text is the target; the source's weights are
    [n_head, n_tokens, n_source]. lens: the candidates after each layer. entropies: of rows in bits,
    by layer and head, none in recurrent layers. memories: of recurrent layers, which have no
    weights.
    """

    token_ids: list[int]
    tokens: list[str]
    weights: dict[int, Floats]
    next_tokens: list[NextToken]
    source_ids: list[int] = field(default_factory=list)
    source_tokens: list[str] = field(default_factory=list)
    source_weights: dict[int, Floats] = field(default_factory=dict)
    effect: Effect | None = None
    lens: list[list[NextToken]] = field(default_factory=list)
    entropies: list[list[float]] | None = None
    head_values: HeadValues | None = None
    memories: dict[int, Memory] = field(default_factory=dict)

    def behaviours(
        self, layer: int, heads: list[int], config: TransformerConfig
    ) -> list[Behaviour]:
        """Return what heads of a layer do in this text."""
        visible = visible_keys(len(self.token_ids), layer, config)
        return measure_behaviours(self.token_ids, self.weights[layer][heads], visible)

    def as_json(self, layer: int, heads: list[int]) -> dict[str, Any]:
        """Return the weights of some heads of a layer, and the next tokens, as JSON values."""
        of_layer = self.weights.get(layer)
        shown = {
            "tokens": self.tokens,
            "token_ids": self.token_ids,
            "layer": layer,
            "heads": {str(head): of_layer[head].tolist() for head in heads if of_layer is not None},
            "next_tokens": [asdict(token) for token in self.next_tokens],
        }
        if layer in self.memories:
            parts = asdict(self.memories[layer]).items()
            shown["memory"] = {str(i): {name: of[i].tolist() for name, of in parts} for i in heads}
        if self.effect is not None:
            shown["effect"] = asdict(self.effect)
        if self.source_ids:
            of_source = {str(head): self.source_weights[layer][head].tolist() for head in heads}
            shown |= {"source_tokens": self.source_tokens, "source_heads": of_source}
        return shown


def visible_keys(n: int, layer: int, config: TransformerConfig) -> NDArray[np.bool_]:
    """Return bool [n, n]: the keys that each query of a layer sees."""
    apart = np.subtract.outer(np.arange(n), np.arange(n))
    visible = abs(apart) < (config.window_of(layer) or n)
    return visible & (apart >= 0) if config.causal else visible


def measure_behaviours(
    token_ids: list[int], weights: Floats, visible: NDArray[np.bool_]
) -> list[Behaviour]:
    """Measure how much of their attention heads give to keys of each kind, and label them.

    A share is the mean over the rows from the third on that see a key of the kind, four at least:
    "previous token", "first token", "same token" (the token itself, or others equal to it) and
    "induction": a token after an earlier one that equals the query (Olsson et al. 2022). A label
    needs a share of 0.3, and twice that of even attention. weights: [n_head, n, n]. visible: [n,
    n].
    """
    ids, position = np.array(token_ids), np.arange(len(token_ids))
    same = ids[:, None] == ids
    follows = np.zeros_like(same)
    follows[:, 1:] = same[:, :-1] & (position[:-1] < position[:, None])
    kinds = {
        "previous token": position[:, None] - 1 == position,
        "first token": np.broadcast_to(position == 0, same.shape),
        "induction": follows,
        "same token": same,
    }
    even = visible / visible.sum(axis=-1, keepdims=True)
    shares: list[dict[str, float]] = [{} for _ in weights]
    lifts: list[dict[str, float]] = [{} for _ in weights]
    for kind, keys in kinds.items():
        seen = keys & visible
        rows = seen.any(axis=-1) & (position >= _FIRST_ROW)
        if rows.sum() < _LEAST_ROWS:
            continue
        expected = float((even * seen)[rows].sum(axis=-1).mean())
        for head, of_head in enumerate(weights):
            share = float((of_head * seen)[rows].sum(axis=-1).mean())
            shares[head][kind], lifts[head][kind] = share, share / expected
    behaviours = []
    for of_head, lift in zip(shares, lifts, strict=True):
        likely = [k for k in of_head if of_head[k] >= _LEAST_SHARE and lift[k] >= _LEAST_LIFT]
        label = max(likely, key=of_head.__getitem__, default=None)
        behaviours.append(Behaviour(label, of_head))
    return behaviours


def entropies_of(rows: Floats | None, config: TransformerConfig) -> list[list[float]]:
    """Return bits by layer and head, none in recurrent layers.

    rows: [layers of attention, n_head, 1, n_tokens], None if there are no such layers.
    """
    if rows is None:
        return [[]] * config.n_layer
    bits = np.log2(rows, where=rows > 0, out=np.zeros_like(rows))
    sums = np.maximum(0, -(rows * bits).sum(axis=-1))[:, :, 0].tolist()
    of_layers = dict(zip(config.attention_layers, sums, strict=True))
    return [of_layers.get(layer, []) for layer in range(config.n_layer)]


def most_tokens(config: TransformerConfig) -> int:
    """Return the maximum number of tokens of a text that can be explained."""
    return min(MAX_TOKENS, config.max_model_len)


def check_length(n_tokens: int, config: TransformerConfig, param: str = "text") -> None:
    """Raise InvalidRequestError for no tokens, ContextLengthError for too many."""
    longest = most_tokens(config)
    if not n_tokens:
        message = f"there is no token in the {param}; give at least one"
        raise InvalidRequestError(message, param=param)
    if n_tokens > longest:
        message = f"the {param} has {n_tokens} tokens; at most {longest} can be explained"
        raise ContextLengthError(message, param=param)


def check_head(head: int, layer: int, config: TransformerConfig, param: str | None = None) -> None:
    """Raise InvalidRequestError for a head that a layer has not."""
    if not config.heads_of(layer):
        message = f"layer {layer} has no heads; leave heads out"
        raise InvalidRequestError(message, param=param or "heads")
    check_index("head", head, config.heads_of(layer), param, of=f"layer {layer}")


def check_index(
    name: str, index: int, count: int, param: str | None = None, of: str = "the model"
) -> None:
    """Raise InvalidRequestError for a layer or a head that does not exist."""
    if index not in range(count):
        message = f"there is no {name} {index}; {of} has {name}s 0 to {count - 1}"
        raise InvalidRequestError(message, param=param or f"{name}s")

"""The JSON of an explanation: its types, for the OpenAPI document and tests, and its writing."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from kvasir.model.config import TransformerConfig
from kvasir.server.api import schemas
from kvasir.server.api.http.pieces import LazyList, Pieces
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.explain import explanation as explained
from kvasir.server.explain.next_tokens import Effect, NextToken


class HeadWeights(schemas.ResponseBody):
    """The weights of one attention head."""

    layer: schemas.Size
    head: schemas.Size
    behaviour: str | None = Field(
        None,
        description='"previous token", "first token", "same token" or "induction", if one has 30 % '
        "of the head's attention in this text, and twice what even attention would give.",
    )
    shares: dict[str, schemas.Share] | None = Field(
        None, description="The share of each behaviour that the text allows."
    )
    weights: list[list[Annotated[float, Field(ge=0, le=1.001)]]] = Field(
        description="A row for each token, which sums to 1: how much it attends to each token."
    )


_Rows = list[list[float]]


class HeadMemory(schemas.ResponseBody):
    """A head of a recurrent layer: a row for each token, of what it reads of each token before."""

    layer: schemas.Size
    head: schemas.Size
    decays: list[list[Annotated[float, Field(ge=0, le=1)]]] = Field(
        description="The share that is left of what each token wrote, by decay alone; a head's "
        "mean, where each channel of its keys decays by itself."
    )
    weights: _Rows = Field(
        description="The head's output is the sum of what tokens wrote, times these, of any sign."
    )


class HeadValues(schemas.ResponseBody):
    """The numbers that a head's weights are made of, a row for each token."""

    layer: schemas.Size
    head: schemas.Size
    scale: float = Field(description="What scores are multiplied by, before they are capped.")
    queries: _Rows = Field(description="After norms and rotation, as keys are.")
    keys: _Rows
    values: _Rows
    scores: _Rows = Field(description="Q Kᵀ, neither scaled nor masked.")
    sink: float | None = Field(None, description="A further score of each row, if heads have one.")
    bias: _Rows | None = Field(None, description="Added to capped scores, if the model has one.")


class LayerTokens(schemas.ResponseBody):
    """The likeliest next tokens after a layer."""

    layer: schemas.Size
    next_tokens: list[NextToken]


class Explanation(schemas.ResponseBody):
    """The attention in a text, or in a target and to its source, and the likeliest next tokens."""

    tokens: list[str] = Field(description="Of an encoder-decoder the target's.")
    token_ids: list[schemas.Size]
    next_tokens: list[NextToken] = Field(description="The likeliest first.")
    effect: Effect | None = Field(
        None, description="With `without`: the change from the whole model, KL divergence in bits."
    )
    lens: list[LayerTokens] = Field(
        [], description="The last norm and the head, applied to what each layer returns."
    )
    entropies: list[list[Annotated[float, Field(ge=0)]]] | None = Field(
        None, description="In bits, by layer, then by head; none of recurrent layers."
    )
    source_tokens: list[str] = Field([], description="Encoder-decoders only, as all of sources.")
    source_token_ids: list[schemas.Size] = Field([])
    attention: list[HeadWeights] = Field(description="By layer, then by head.")
    memory: list[HeadMemory] = Field([], description="Of recurrent layers, instead of attention.")
    source_attention: list[HeadWeights] = Field(
        [], description="A row for each token, of its weights over the source's."
    )
    head_values: HeadValues | None = None


def shown(
    explanation: explained.Explanation, heads: dict[int, list[int]], config: TransformerConfig
) -> Pieces:
    """Return the JSON of an Explanation, of some heads by layer; matrices are written by rows."""
    answer: dict[str, Any] = {
        "tokens": explanation.tokens,
        "token_ids": explanation.token_ids,
        "next_tokens": explanation.next_tokens,
    }
    if explanation.effect is not None:
        answer["effect"] = explanation.effect
    if explanation.lens:
        layers = enumerate(explanation.lens)
        answer["lens"] = [{"layer": layer, "next_tokens": tokens} for layer, tokens in layers]
    if explanation.entropies is not None:
        answer["entropies"] = explanation.entropies
    answer["attention"] = [
        {"layer": layer, "head": head, "weights": _rows(weights[head])}
        | {"behaviour": behaviour.label, "shares": behaviour.shares}
        for layer, weights in explanation.weights.items()
        for head, behaviour in zip(
            heads[layer], explanation.behaviours(layer, heads[layer], config), strict=True
        )
    ]
    if explanation.memories:
        answer["memory"] = [
            {"layer": layer, "head": head}
            | {name: _rows(part[head]) for name, part in asdict(memory).items()}
            for layer, memory in explanation.memories.items()
            for head in heads[layer]
        ]
    if explanation.source_ids:
        answer["source_tokens"] = explanation.source_tokens
        answer["source_token_ids"] = explanation.source_ids
        answer["source_attention"] = [
            {"layer": layer, "head": head, "weights": _rows(weights[head])}
            for layer, weights in explanation.source_weights.items()
            for head in heads[layer]
        ]
    if explanation.head_values is not None:
        head_values = explanation.head_values
        values = {field.name: getattr(head_values, field.name) for field in fields(head_values)}
        if values["bias"] is None:
            del values["bias"]
        answer["head_values"] = {
            name: _rows(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
    return Pieces(answer)


def _rows(matrix: Floats) -> LazyList:
    return LazyList(matrix, np.ndarray.tolist)

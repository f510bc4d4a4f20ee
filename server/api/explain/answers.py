"""The JSON of an explanation: its types, for the OpenAPI document and tests, and its writing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import to_json

from kvasir.server.api import schemas
from kvasir.server.engine.sampling import Floats
from kvasir.server.explain import explanation as explained
from kvasir.server.explain.behaviour import Behaviour
from kvasir.server.explain.explanation import Effect, NextToken


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
        None, description="In bits, by layer, then by head."
    )
    source_tokens: list[str] = Field([], description="Encoder-decoders only, as all of sources.")
    source_token_ids: list[schemas.Size] = Field([])
    attention: list[HeadWeights] = Field(description="By layer, then by head.")
    source_attention: list[HeadWeights] = Field(
        [], description="A row for each token, of its weights over the source's."
    )
    head_values: HeadValues | None = None


def write(
    found: explained.Explanation, heads: list[int], behaviours: list[Behaviour]
) -> Iterator[bytes]:
    """Yield the JSON of an Explanation row by row."""
    known: dict[str, Any] = {
        "tokens": found.tokens,
        "token_ids": found.token_ids,
        "next_tokens": found.next_tokens,
    }
    if found.effect is not None:
        known["effect"] = found.effect
    if found.lens:
        known["lens"] = [{"layer": i, "next_tokens": one} for i, one in enumerate(found.lens)]
    if found.entropies is not None:
        known["entropies"] = found.entropies.tolist()
    maps = {"attention": found.weights}
    if found.source_ids:
        known |= {"source_tokens": found.source_tokens, "source_token_ids": found.source_ids}
        maps["source_attention"] = found.source_weights
    yield to_json(known)[:-1]
    for name, of_layers in maps.items():
        yield b',"%s":[' % name.encode()
        for i, (layer, head) in enumerate(product(of_layers, heads)):
            about: dict[str, Any] = {"layer": layer, "head": head}
            if name == "attention":
                about |= {"behaviour": behaviours[i].label, "shares": behaviours[i].shares}
            yield (b"," if i else b"") + to_json(about)[:-1]
            yield from _rows("weights", of_layers[layer][head])
            yield b"}"
        yield b"]"
    if (of := found.head_values) is not None:
        about = {"layer": of.layer, "head": of.head, "scale": of.scale, "sink": of.sink}
        yield b',"head_values":' + to_json(about)[:-1]
        for name in ("queries", "keys", "values", "scores", "bias"):
            if (matrix := getattr(of, name)) is not None:
                yield from _rows(name, matrix)
        yield b"}"
    yield b"}"


def _rows(name: str, matrix: Floats) -> Iterator[bytes]:
    """Yield a field of an object, a matrix [n, …], row by row."""
    yield b',"%s":[' % name.encode()
    for i, row in enumerate(matrix):
        yield (b"," if i else b"") + to_json(row.tolist())
    yield b"]"

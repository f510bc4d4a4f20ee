"""Attention weights and next-token probabilities of the served model, outside the engine.

The session runs attention.onnx, another graph over the weights file of the served model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt
from tokenizers import Tokenizer, decoders

from model.bundle import ATTENTION_GRAPH_FILE, ModelBundle
from model.config import TransformerConfig
from model.packing import pack
from server.engine.machine import usable_cpus
from server.engine.sampling import Floats
from server.errors import ContextLengthError, InvalidRequestError, NotFoundError
from server.text.detokenizer import token_name

MAX_TOKENS = 512  # a head has n² weights for n tokens


@dataclass(frozen=True, slots=True)
class NextToken:
    """A token that may come next, with its probability at temperature 1."""

    token_id: NonNegativeInt
    text: str
    probability: Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The attention weights of one text, and the candidates for its next token, likeliest first.

    weights: by layer, float [n_head, n_tokens, n_tokens]. A row is a query, whose weights over the
    keys sum to 1. In a decoder those of later keys are exactly 0; an encoder has no next tokens.
    """

    token_ids: list[int]
    tokens: list[str]
    weights: dict[int, Floats]
    next_tokens: list[NextToken]

    def as_json(self, layer: int, heads: list[int]) -> dict[str, Any]:
        """Return the weights of some heads of a layer, and all else, as JSON values."""
        return {
            "tokens": self.tokens,
            "token_ids": self.token_ids,
            "layer": layer,
            "heads": {str(head): self.weights[layer][head].tolist() for head in heads},
            "next_tokens": [asdict(token) for token in self.next_tokens],
        }


class Explainer:
    """A session that returns attention weights. It holds the model's weights a second time.

    Raises NotFoundError if the model directory has no attention.onnx.
    """

    def __init__(self, bundle: ModelBundle, threads: int | None = None) -> None:
        path = bundle.path / ATTENTION_GRAPH_FILE
        if not path.is_file():
            how = "again" if bundle.manifest.device == "cpu" else "for the CPU"
            cause = f"{bundle.path.name} has no {ATTENTION_GRAPH_FILE}"
            raise NotFoundError(f"{cause}; export the model {how}")
        from server.engine.session import open_session  # noqa: PLC0415  imports ONNX Runtime

        self._bundle = bundle
        self._session = open_session(path, threads or usable_cpus(), spin_microseconds=0)

    def explain(self, text: str, layers: list[int], *, top_k: int = 10) -> Explanation:
        """Explain a text; see `explain_tokens`."""
        return self.explain_tokens(self._bundle.tokenizer.encode(text).ids, layers, top_k=top_k)

    def explain_tokens(
        self, token_ids: list[int], layers: list[int], *, top_k: int = 10
    ) -> Explanation:
        """Return the weights of some layers, and the `top_k` likeliest next tokens.

        Raises InvalidRequestError for no tokens or an unknown layer, ContextLengthError for too
        many tokens.
        """
        config, tokenizer, n = self._bundle.config, self._bundle.tokenizer, len(token_ids)
        for layer in layers:
            check_index("layer", layer, config.n_layer)
        check_length(n, config)
        names = [f"attention.{layer}" for layer in layers]
        next_tokens = []
        if config.pooling is None:
            inputs = {
                "input_ids": np.array([token_ids], dtype=np.int64),
                "position_ids": np.arange(n)[None],
                "seqlens_k": np.array([n - 1], dtype=np.int32),
                "total_sequence_length": np.array(n, dtype=np.int32),
                "logits_indices": np.array([n - 1]),
            }
            # logits: [1, vocab] of the last token; weights: [1, n_head, n, n] for each layer
            logits, *weights = self._session.run(["logits", *names], inputs)
            probabilities = np.exp(logits[0] - logits[0].max(), dtype=np.float64)
            probabilities /= probabilities.sum()
            likeliest = np.argsort(-probabilities, kind="stable")[:top_k].tolist()
            next_tokens = [
                NextToken(i, token_name(tokenizer, i), float(probabilities[i])) for i in likeliest
            ]
        else:
            text, _ = pack([token_ids], None if config.n_token_types is None else [None])
            weights = self._session.run(names, text)  # one token has another beside it
        return Explanation(
            token_ids,
            [_name(tokenizer, token_id) for token_id in token_ids],
            {
                layer: of_layer[0, :, :n, :n]
                for layer, of_layer in zip(layers, weights, strict=True)
            },
            next_tokens,
        )


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Name a token. WordPiece's own names tell which continue a word: those after ##."""
    if isinstance(tokenizer.decoder, decoders.WordPiece):
        return str(tokenizer.id_to_token(token_id))
    return token_name(tokenizer, token_id)


def most_tokens(config: TransformerConfig) -> int:
    """Return the maximum number of tokens of a text that can be explained."""
    return min(MAX_TOKENS, config.max_model_len)


def check_length(n_tokens: int, config: TransformerConfig) -> None:
    """Raise InvalidRequestError for no tokens, ContextLengthError for too many."""
    longest = most_tokens(config)
    if not n_tokens:
        raise InvalidRequestError("there is no token in the text; give at least one", param="text")
    if n_tokens > longest:
        message = f"the text has {n_tokens} tokens; at most {longest} can be explained"
        raise ContextLengthError(message)


def check_index(name: str, index: int, count: int) -> None:
    """Raise InvalidRequestError for a layer or a head that does not exist."""
    if index not in range(count):
        message = f"there is no {name} {index}; the model has {name}s 0 to {count - 1}"
        raise InvalidRequestError(message, param=f"{name}s")

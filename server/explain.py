"""What the served model attends to, and what it would say next: off the engine's path, on a session of its own.

The weights are the model's own: its graph of attention.onnx runs over the same file as the one that is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from model.bundle import ATTENTION_GRAPH_FILE, ModelBundle
from model.config import DecoderConfig
from server.engine.machine import usable_cpus
from server.engine.sampling import Floats
from server.errors import ContextLengthError, InvalidRequestError, NotFoundError
from server.text.detokenizer import token_name

MAX_TOKENS = 512  # a head's map of n tokens has n² weights


@dataclass(frozen=True, slots=True)
class NextToken:
    """A token that may follow, and how likely it is at temperature 1."""

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """One text through the model.

    weights: by layer, float [n_head, n_tokens, n_tokens]: how much each token (a row, which sums to 1) takes from each
    token up to itself (what comes later is exactly 0). next_tokens: the likeliest first. Tokens that are no whole
    characters are named by their bytes, as in completions.
    """

    token_ids: list[int]
    tokens: list[str]
    weights: dict[int, Floats]
    next_tokens: list[NextToken]

    def as_json(self, layer: int, heads: list[int]) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_ids": self.token_ids,
            "layer": layer,
            "heads": {str(head): self.weights[layer][head].tolist() for head in heads},
            "next_tokens": [
                {"token_id": token.token_id, "text": token.text, "probability": token.probability}
                for token in self.next_tokens
            ],
        }


class Explainer:
    """Holds the model's weights a second time, for as long as it lives.

    Raises NotFoundError for a model directory without attention.onnx.
    """

    def __init__(self, bundle: ModelBundle, threads: int | None = None) -> None:
        path = bundle.path / ATTENTION_GRAPH_FILE
        if not path.is_file():
            mend = (
                "export the model again"
                if bundle.manifest.device == "cpu"
                else "export the model for the CPU"
            )
            raise NotFoundError(f"{bundle.path.name} has no {ATTENTION_GRAPH_FILE}; {mend}")
        from server.engine.session import open_session  # noqa: PLC0415  imports ONNX Runtime

        self._bundle = bundle
        self._session = open_session(path, threads or usable_cpus(), spin_microseconds=0)

    def explain(self, text: str, layers: list[int], *, top_k: int = 10) -> Explanation:
        """Raises InvalidRequestError for no text or a layer that does not exist, ContextLengthError for too much."""
        return self.explain_tokens(self._bundle.tokenizer.encode(text).ids, layers, top_k=top_k)

    def explain_tokens(
        self, token_ids: list[int], layers: list[int], *, top_k: int = 10
    ) -> Explanation:
        """The same of a text that has been tokenised."""
        for layer in layers:
            check_index("layer", layer, self._bundle.config.n_layer)
        check_length(len(token_ids), self._bundle.config)
        tokenizer = self._bundle.tokenizer
        logits, *weights = self._run(token_ids, layers)
        probabilities = np.exp(logits[0] - logits[0].max(), dtype=np.float64)
        probabilities /= probabilities.sum()
        likeliest = np.argsort(-probabilities, kind="stable")[:top_k].tolist()
        return Explanation(
            token_ids,
            [token_name(tokenizer, token_id) for token_id in token_ids],
            {layer: of_layer[0] for layer, of_layer in zip(layers, weights, strict=True)},
            [NextToken(i, token_name(tokenizer, i), float(probabilities[i])) for i in likeliest],
        )

    def _run(self, token_ids: list[int], layers: list[int]) -> list[Floats]:
        """Logits [1, vocab] of the last token, and each layer's weights [1, n_head, n_tokens, n_tokens]."""
        n = len(token_ids)
        feeds = {
            "input_ids": np.array([token_ids], dtype=np.int64),
            "position_ids": np.arange(n)[None],
            "seqlens_k": np.array([n - 1], dtype=np.int32),
            "total_sequence_length": np.array(n, dtype=np.int32),
            "logits_indices": np.array([n - 1]),
        }
        outputs: list[Floats] = self._session.run(
            ["logits", *(f"attention.{layer}" for layer in layers)], feeds
        )
        return outputs


def most_tokens(config: DecoderConfig) -> int:
    """How many tokens a text may have that is explained."""
    return min(MAX_TOKENS, config.max_model_len)


def check_length(n_tokens: int, config: DecoderConfig) -> None:
    """Raises InvalidRequestError for no token at all, ContextLengthError for more than can be explained."""
    longest = most_tokens(config)
    if not n_tokens:
        raise InvalidRequestError("there is no token in the text; give at least one", param="text")
    if n_tokens > longest:
        raise ContextLengthError(
            f"the text has {n_tokens} tokens; at most {longest} can be explained"
        )


def check_index(name: str, index: int, count: int) -> None:
    """Raises InvalidRequestError for a layer or a head that does not exist."""
    if index not in range(count):
        raise InvalidRequestError(
            f"there is no {name} {index}; the model has {name}s 0 to {count - 1}", param=f"{name}s"
        )

"""Attention weights and next-token probabilities of the served model, outside the engine.

The session runs attention.onnx, another graph over the weights file of the served model. An encoder
of a decoder runs its own graph before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt
from tokenizers import Tokenizer, decoders

from model.bundle import ATTENTION_GRAPH_FILE, ENCODER_GRAPH_FILE, ModelBundle, cache_names
from model.config import TransformerConfig
from model.packing import SOURCE_OUTPUT, pack
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
    source_…: of an encoder-decoder's source, whose text is the target; the source's weights are
    [n_head, n_tokens, n_source].
    """

    token_ids: list[int]
    tokens: list[str]
    weights: dict[int, Floats]
    next_tokens: list[NextToken]
    source_ids: list[int] = field(default_factory=list)
    source_tokens: list[str] = field(default_factory=list)
    source_weights: dict[int, Floats] = field(default_factory=dict)

    def as_json(self, layer: int, heads: list[int]) -> dict[str, Any]:
        """Return the weights of some heads of a layer, and all else, as JSON values."""
        shown = {
            "tokens": self.tokens,
            "token_ids": self.token_ids,
            "layer": layer,
            "heads": {str(head): self.weights[layer][head].tolist() for head in heads},
            "next_tokens": [asdict(token) for token in self.next_tokens],
        }
        if self.source_ids:
            of_source = {str(head): self.source_weights[layer][head].tolist() for head in heads}
            shown |= {"source_tokens": self.source_tokens, "source_heads": of_source}
        return shown


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
        threads = threads or usable_cpus()
        self._session = open_session(path, threads, spin_microseconds=0)
        self._encoder = None
        if bundle.config.encoder is not None:
            encoder = bundle.path / ENCODER_GRAPH_FILE
            fits_16_bits = bundle.manifest.fits_16_bits
            self._encoder = open_session(encoder, threads, 0, fits_16_bits=fits_16_bits)

    def explain(
        self, text: str, layers: list[int], *, top_k: int = 10, target: str | None = None
    ) -> Explanation:
        """Explain a text, or a source and its target; see `explain_tokens`.

        Raises InvalidRequestError for a target that is missing, or too much, as well.
        """
        encode, config = self._bundle.tokenizer.encode, self._bundle.config
        token_ids = encode(text).ids
        if (target is None) is not (config.encoder is None):
            raise InvalidRequestError("an encoder-decoder needs a target, and no other model does")
        if target is None:
            return self.explain_tokens(token_ids, layers, top_k=top_k)
        target_ids = [*config.target_prefix, *encode(target, add_special_tokens=False).ids]
        return self.explain_tokens(target_ids, layers, token_ids, top_k=top_k)

    def explain_tokens(
        self,
        token_ids: list[int],
        layers: list[int],
        source_ids: list[int] | None = None,
        *,
        top_k: int = 10,
    ) -> Explanation:
        """Return the weights of some layers, and the `top_k` likeliest next tokens.

        Of an encoder-decoder the tokens are a target's, with those that begin it. Raises
        InvalidRequestError for no tokens or an unknown layer, ContextLengthError for too many.
        """
        config, tokenizer, n = self._bundle.config, self._bundle.tokenizer, len(token_ids)
        source_ids = source_ids or []
        for layer in layers:
            check_index("layer", layer, config.n_layer)
        check_length(n, config)
        names = [f"attention.{layer}" for layer in layers]
        next_tokens = []
        if config.encoder is not None:
            check_length(len(source_ids), config.encoder)
            names += [f"source_attention.{layer}" for layer in layers]
        if config.pooling is None:
            inputs = {
                "input_ids": np.array([token_ids], dtype=np.int64),
                "position_ids": np.arange(n)[None],
                "seqlens_k": np.array([n - 1], dtype=np.int32),
                "total_sequence_length": np.array(n, dtype=np.int32),
                "logits_indices": np.array([n - 1]),
                **self._read(source_ids),
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
            {layer: own[0, :, :n, :n] for layer, own in zip(layers, weights, strict=False)},
            next_tokens,
            source_ids,
            [_name(tokenizer, token_id) for token_id in source_ids],
            dict(zip(layers, (of_source[0] for of_source in weights[len(layers) :]), strict=False)),
        )

    def _read(self, source_ids: list[int]) -> dict[str, NDArray[Any]]:
        """Return the decoder's inputs for a source; none without an encoder."""
        if self._encoder is None:
            return {}
        (found,) = self._encoder.run([SOURCE_OUTPUT], pack([source_ids])[0])
        # [tokens, 2 * n_layer, n_kv_head, head_dim] to [2 * n_layer, 1, n_kv_head, tokens, …]
        blocks = found[: len(source_ids)].transpose(1, 2, 0, 3)[:, None]
        names = cache_names(SOURCE_OUTPUT, len(blocks) // 2)
        return dict(zip(names, map(np.ascontiguousarray, blocks), strict=True))


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

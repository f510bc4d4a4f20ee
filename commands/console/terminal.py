"""One completion in this process, token by token, and its text on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

from rich.style import Style
from rich.text import Text

from model.bundle import ModelBundle
from model.harmless import harmless
from server.engine.engine import Engine
from server.engine.sampling import SamplingParams
from server.engine.sequence import FinishReason, Sequence
from server.text.detokenizer import Detokenizer

# The page's shades: least probabilities, and the colours of text and background.
_SHADES = (
    (0.9, ""),
    (0.5, "black on #fdf1d3"),
    (0.2, "black on #fbdfa6"),
    (0.05, "black on #f8c48c"),
    (0.0, "black on #f3a287"),
)


class Piece(NamedTuple):
    """The text that a token adds, if any yet. The last piece has a finish reason and no token.

    probability: the raw model's, if `SamplingParams.logprobs` asks for it.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    probability: float | None = None


def complete(
    engine: Engine, bundle: ModelBundle, prompt_ids: list[int], params: SamplingParams
) -> Iterator[Piece]:
    """Yield the pieces of a completion; `check_length` must have accepted the prompt."""
    ending_ids = frozenset(bundle.config.eos_token_ids)
    prefix = list(bundle.config.target_prefix)
    sequence = Sequence(0, prompt_ids, params, ending_ids, perf_counter(), target_prefix=prefix)
    text, reason = Detokenizer(bundle.tokenizer, () if prefix else prompt_ids), None
    engine.add(sequence)
    while engine.has_work:
        for output in engine.step()[0]:
            reason = output.finish_reason
            if output.token_id is not None and reason is not FinishReason.STOP:
                probability = math.exp(output.logprobs.logprob) if output.logprobs else None
                yield Piece(text.push(output.token_id), output.token_id, None, probability)
    yield Piece(text.flush(), None, reason)


def shaded(piece: Piece) -> Text:
    """Return a piece's text on the shade of its token's probability."""
    probability = 1.0 if piece.probability is None else piece.probability
    style = next(style for least, style in _SHADES if probability >= least)
    return Text(harmless(piece.text), Style.parse(style))


def legend() -> Text:
    """Return a line that explains the shades."""
    parts = [(f" ≥ {least:.0%} " if least else " less ", style) for least, style in _SHADES]
    return Text.assemble("probability ", *parts)

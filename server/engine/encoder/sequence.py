"""A text that an encoder reads, and what it makes of it."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass

from kvasir.server.engine.engine import TokenOutput
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Encoding:
    """The tokens of a text, and their types if it is a pair; without types all are of type 0."""

    ids: collections.abc.Sequence[int]
    type_ids: collections.abc.Sequence[int] | None = None


@dataclass(slots=True, eq=False)
class EncoderSequence(Sequence):
    """A sequence that ends with its prompt. wants_tokens: its output is its tokens' vectors."""

    type_ids: collections.abc.Sequence[int] | None = None
    wants_tokens: bool = False

    def __post_init__(self) -> None:
        """Leave the generator out: nothing is drawn."""
        self.scores = self.beams = None


@dataclass(frozen=True, slots=True)
class EncoderOutput(TokenOutput):
    """The end of a text. vectors: [d_out] or, of its tokens, [tokens, d_model]; None on failure."""

    vectors: Floats | None = None

"""The text of a completion on a terminal."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from kvasir.model.harmless import harmless
from kvasir.server.process.library import Piece

# The page's shades: least probabilities, and the colours of text and background.
_SHADES = (
    (0.9, ""),
    (0.5, "black on #fdf1d3"),
    (0.2, "black on #fbdfa6"),
    (0.05, "black on #f8c48c"),
    (0.0, "black on #f3a287"),
)


def shaded(piece: Piece) -> Text:
    """Return a piece's text on the shade of its token's probability."""
    probability = 1.0 if piece.probability is None else piece.probability
    style = next(style for least, style in _SHADES if probability >= least)
    return Text(harmless(piece.text), Style.parse(style))


def legend() -> Text:
    """Return a line that explains the shades."""
    parts = [(f" ≥ {least:.0%} " if least else " less ", style) for least, style in _SHADES]
    return Text.assemble("probability ", *parts)

"""What rounding costs as a picture: by position, for most tokens and for the worst."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvasir.model.records import SpanFigures


def draw_losses(title: str, spans: Sequence[SpanFigures], out: Path) -> None:
    """Write a PNG: the mean and the 99th percentile of KL, in nats, at positions of rows.

    Raises ValueError without figures, or for a name that does not say which kind of picture.
    """
    if not spans:
        raise ValueError(f"{title} has no figures by position to draw; leave {out} out")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    edges = [spans[0].first, *(span.last + 1 for span in spans)]
    for name, values in (
        ("mean", [span.mean_kl for span in spans]),
        ("99th percentile", [span.kl_99 for span in spans]),
    ):
        axes.stairs(values, edges, label=name, linewidth=2)
    axes.set(title=title, xlabel="position", ylabel="KL of the next token, nats", yscale="log")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=110)

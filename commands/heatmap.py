"""Attention weights as a picture: a labelled heat map of one head, or of all heads of a layer side by side."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from server.engine.sampling import Floats
from server.explain import Explanation

_MOST_LABELS = 64  # tokens that can be named on an axis and still be read
_SIGNS = str.maketrans(
    {" ": "·", "\n": "↵", "\t": "→", "$": r"\$"}
)  # what cannot be seen; $ would begin a formula


def draw_attention(
    explanation: Explanation,
    title: str,
    layer: int,
    heads: list[int],
    picture: Path,
    window: int | None = None,
) -> None:
    """Write a PNG: queries from top to bottom, the keys they attend to from left to right; what is masked is empty.

    window: how many tokens one sees in this layer, itself among them; None is all before it.
    """
    labels = [token.translate(_SIGNS) or "∅" for token in explanation.tokens]
    columns = math.ceil(math.sqrt(len(heads)))
    rows = math.ceil(len(heads) / columns)
    alone = len(heads) == 1
    side = min(14.0, max(6.0, 2.5 + 0.28 * len(labels))) if alone else 2.6
    figure = Figure(figsize=(side * columns + 1.2, side * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(heads) :]:
        axes.set_axis_off()
    for head, axes in zip(heads, grid.flat, strict=False):
        image = _draw_head(axes, explanation.weights[layer][head], window)
        if alone and len(labels) <= _MOST_LABELS:
            axes.set_xticks(
                range(len(labels)), labels, rotation=90, fontfamily="monospace", fontsize=9
            )
            axes.set_yticks(range(len(labels)), labels, fontfamily="monospace", fontsize=9)
            axes.set(xlabel="attended to (key)", ylabel="attends (query)")
        elif not alone:
            axes.set_title(f"head {head}", fontsize=9)
            axes.tick_params(labelsize=6)
    where = f"layer {layer}, head {heads[0]}" if alone else f"layer {layer}, all {len(heads)} heads"
    figure.suptitle(f"{title}: {where}")
    figure.colorbar(image, ax=grid, shrink=0.8, label="softmax(s·QKᵀ + M), a row sums to 1")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font"
        )  # it draws a box instead
        figure.savefig(picture, format="png", dpi=120)


def _draw_head(axes: Axes, weights: Floats, window: int | None) -> AxesImage:
    colours = colormaps["viridis"].with_extremes(bad="white")
    distances = np.subtract.outer(np.arange(len(weights)), np.arange(len(weights)))
    masked = (distances < 0) | (distances >= (window or len(weights)))
    return axes.imshow(
        np.ma.array(weights, mask=masked), cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest"
    )

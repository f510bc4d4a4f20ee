"""Pictures: what heads attend to in a text, and what rounding costs by position."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvasir.model.directory import ModelDirectory
from kvasir.model.records import SpanFigures
from kvasir.server.explain.explanation import Explanation, visible_keys

_MAX_LABELS = 64  # tokens that can be read on an axis
# At weights 0, 0.25 … 1: the page's in light (static/common/colours.js).
_COLOURS = ("#faf6ee", "#e1b785", "#cc6f08", "#8b411d", "#4b1b15")
_VISIBLE = str.maketrans({" ": "·", "\n": "↵", "\t": "→", "$": r"\$"})  # $ would begin a formula


def draw_attention(
    explanation: Explanation, model_dir: ModelDirectory, layer: int, heads: list[int], out: Path
) -> None:
    """Write a PNG: queries from top to bottom, keys from left to right, masked weights empty.

    Of an encoder-decoder the keys are the source's. Of a recurrent layer the weights are decays.
    """
    labels = [token.translate(_VISIBLE) or "∅" for token in explanation.tokens]
    keys, is_single, memory = labels, len(heads) == 1, explanation.memories.get(layer)
    maps = explanation.weights.get(layer) if memory is None else memory.decays
    names, scale = ("attended to (key)", "attends (query)"), "softmax(s·QKᵀ + M), a row sums to 1"
    if memory is not None:
        names, scale = ("wrote", "reads"), "what is left after all decays between"
    masked = ~visible_keys(len(labels), layer, model_dir.config)
    if explanation.source_ids:
        keys = [token.translate(_VISIBLE) or "∅" for token in explanation.source_tokens]
        maps = explanation.source_weights[layer]
        if model_dir.config.cross_attention == "additive":
            scale = "softmax(vᵀ tanh(W s + U h)), a row sums to 1"
        masked = np.zeros((len(labels), len(keys)), dtype=np.bool_)
    assert maps is not None, "a layer without heads is not drawn"
    n = max(masked.shape)
    colours = LinearSegmentedColormap.from_list("page", _COLOURS).with_extremes(bad="white")
    columns = math.ceil(math.sqrt(len(heads)))
    rows = math.ceil(len(heads) / columns)
    side = min(14.0, max(6.0, 2.5 + 0.28 * n)) if is_single else 2.6
    figure = Figure(figsize=(side * columns + 1.2, side * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(heads) :]:
        axes.set_axis_off()
    for head, axes in zip(heads, grid.flat, strict=False):
        weights = np.ma.array(maps[head], mask=masked)
        image = axes.imshow(weights, cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest")
        if is_single and n <= _MAX_LABELS:
            font = {"fontfamily": "monospace", "fontsize": 9}
            axes.set_xticks(range(len(keys)), keys, rotation=90, **font)
            axes.set_yticks(range(len(labels)), labels, **font)
            axes.set(xlabel=names[0], ylabel=names[1])
        elif not is_single:
            axes.set_title(f"head {head}", fontsize=9)
            axes.tick_params(labelsize=6)
    which = f"head {heads[0]}" if is_single else f"all {len(heads)} heads"
    figure.suptitle(f"{model_dir.path.name}: layer {layer}, {which}")
    figure.colorbar(image, ax=grid, shrink=0.8, label=scale)
    with warnings.catch_warnings():  # a missing glyph is drawn as a box
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(out, format="png", dpi=120)


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

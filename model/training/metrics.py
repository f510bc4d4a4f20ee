"""The measurements of a run on disk: metrics.csv, loss.png, confusion.png, TensorBoard's events."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvasir.model.platform.printable import printable

METRICS_FILE = "metrics.csv"
PICTURE_FILE = "loss.png"
CONFUSION_FILE = "confusion.png"
_MAX_LABELS = 40  # that can be read on an axis
_WINDOWS = 50  # of which each smoothed loss is the mean
TENSORBOARD_FOLDER = "tensorboard"


class Evaluation(NamedTuple):
    """Measurements of what is held out; None is not measured.

    loss: the mean cross-entropy in nats. accuracy: the share of targets that are the likeliest.
    exact_match: the share of translations all of whose targets are; greedy decoding finds these,
    because it takes the likeliest token after those before.
    """

    loss: float | None = None
    accuracy: float | None = None
    exact_match: float | None = None

    @classmethod
    def of(cls, columns: Mapping[str, float | None]) -> Evaluation:
        """Read what `columns` gives; what is missing there was not measured."""
        return cls(*(columns.get(f"held_out_{name}") for name in cls._fields))

    @property
    def columns(self) -> dict[str, float | None]:
        """The measurements by the names of metrics.csv."""
        return {f"held_out_{name}": value for name, value in self._asdict().items()}

    def __str__(self) -> str:
        shares = (("accuracy", self.accuracy), ("exact match", self.exact_match))
        measured = (f", {name} {share:.1%}" for name, share in shares if share is not None)
        return f"held-out loss {self.loss or 0.0:.4f}{''.join(measured)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """A row of metrics.csv; tokens and seconds are of training, since the run began."""

    step: int
    tokens: int
    train_loss: float
    held_out_loss: float | None = None
    learning_rate: float
    gradient_norm: float
    seconds: float
    mfu: float  # model FLOPs utilisation
    held_out_accuracy: float | None = None
    held_out_exact_match: float | None = None


@contextmanager
def open_metrics(
    folder: Path | None, step: int, *, tensorboard: bool = False
) -> Iterator[Callable[[StepMetrics], None]]:
    """Open a run's metrics and yield the function that writes a row, if there is a folder.

    Rows up to `step` are kept; later ones, of a run that was killed, are removed.
    """
    if folder is None:
        yield lambda _: None
        return
    path = folder / METRICS_FILE
    columns = [field.name for field in fields(StepMetrics)]
    kept: list[list[str]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row and row[0].isdigit()]
        kept = [row for row in rows if int(row[0]) <= step]
    with ExitStack() as stack:
        file = stack.enter_context(path.open("w", newline="", encoding="utf-8"))
        writer = csv.writer(file)
        writer.writerows([columns, *kept])
        events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (an optional extra)

            place = str(folder / TENSORBOARD_FOLDER)
            events = stack.enter_context(SummaryWriter(place, purge_step=step + 1))

        def write(metrics: StepMetrics) -> None:
            row = asdict(metrics)
            writer.writerow(row.values())  # None is an empty cell
            file.flush()
            for name in columns[1:]:
                if events is not None and row[name] is not None:
                    events.add_scalar(name, row[name], metrics.step)

        yield write


def plot_losses(folder: Path, *, has_perplexity: bool = True) -> None:
    """Draw the losses in a run's metrics.csv as a PNG, the training's smoothed over its raw ones.

    Another axis shows perplexities, which are e to the power of the loss.
    """
    with (folder / METRICS_FILE).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    of_training = np.array([float(row["train_loss"]) for row in rows])
    steps = np.array([int(row["step"]) for row in rows])
    axes.plot(steps, of_training, linewidth=0.5, alpha=0.35, color="C0")
    axes.plot(steps, smoothed(of_training), linewidth=1.4, color="C0", label="training, smoothed")
    held_out = [
        (step, float(row["held_out_loss"]))
        for step, row in zip(steps, rows, strict=True)
        if row["held_out_loss"]
    ]
    axes.plot(*np.reshape(held_out, (-1, 2)).T, "o-", linewidth=1.0, color="C1", label="held out")
    axes.set(xlabel="step", ylabel="cross-entropy (nats)")
    axes.set_title(f"{folder.resolve().name}: loss", parse_math=False)
    if has_perplexity:
        ticks = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 200_000)
        right = axes.secondary_yaxis("right")
        right.set_yticks(np.log(ticks), [f"{tick:,}" for tick in ticks])
        right.set_ylabel("perplexity")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / PICTURE_FILE, dpi=120)


def plot_confusion(
    folder: Path, found: NDArray[np.int64], right: NDArray[np.int64], labels: Sequence[str]
) -> None:
    """Draw a PNG that counts texts by their label and, in columns, the likeliest.

    found, right: [texts], places among the labels. Colours are shares of a label's texts. Of more
    than 40 labels those are left out that no text has and none was given.
    """
    kinds = np.arange(len(labels))
    if len(labels) > _MAX_LABELS:
        kinds = np.unique((found, right))
    confusion = np.zeros((len(kinds), len(kinds)), dtype=np.int64)
    np.add.at(confusion, tuple(np.searchsorted(kinds, places) for places in (right, found)), 1)
    side = 4.0 + 0.4 * min(len(kinds), _MAX_LABELS)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    shares = confusion / np.maximum(1, confusion.sum(axis=1, keepdims=True))
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    if len(kinds) <= _MAX_LABELS:
        shown = [printable(labels[int(kind)])[:20] for kind in kinds]
        axes.set_xticks(range(len(kinds)), shown, rotation=90, parse_math=False)
        axes.set_yticks(range(len(kinds)), shown, parse_math=False)
        for (row, column), n in np.ndenumerate(confusion):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{n:,}", ha="center", va="center", color=colour, fontsize=8)
    axes.set(xlabel="likeliest label", ylabel="label")
    axes.set_title(f"{folder.resolve().name}: {len(right):,} held-out texts", parse_math=False)
    with warnings.catch_warnings():  # a missing glyph is drawn as a box
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(folder / CONFUSION_FILE, dpi=120)


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean around each value: over a fiftieth of all, and less at both ends."""
    reach = len(values) // (2 * _WINDOWS)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    around = np.minimum(reach, np.minimum(places, places[::-1]))
    means: NDArray[np.float64] = sums[places + around + 1] - sums[places - around]
    means /= 2 * around + 1
    return means

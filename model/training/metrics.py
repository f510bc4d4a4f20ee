"""The measurements of a training run on disk: metrics.csv, loss.png and TensorBoard's events."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

METRICS_FILE = "metrics.csv"
TENSORBOARD_FOLDER = "tensorboard"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """A row of metrics.csv; tokens and seconds are of training, since the run began."""

    step: int
    tokens: int
    train_loss: float
    held_out_loss: float | None
    learning_rate: float
    gradient_norm: float
    seconds: float
    mfu: float  # model FLOPs utilisation
    held_out_accuracy: float | None = None  # share of targets that are the likeliest


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


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw the losses of metrics.csv as a PNG."""
    with metrics.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    curves = (("train_loss", "training", "-"), ("held_out_loss", "held out", "o-"))
    for name, label, style in curves:
        points = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        axes.plot(*np.reshape(points, (-1, 2)).T, style, linewidth=0.8, label=label)
    axes.set(xlabel="step", ylabel="cross-entropy (nats)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)

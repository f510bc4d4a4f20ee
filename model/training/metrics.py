"""What training measures, on disk: metrics.csv, loss.png and, if wanted, TensorBoard's event files."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.csv"
TENSORBOARD_FOLDER = "tensorboard"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """A row of metrics.csv. tokens and seconds: of training, since the run began. mfu: model FLOPs utilisation."""

    step: int
    tokens: int
    train_loss: float
    held_out_loss: float | None
    learning_rate: float
    gradient_norm: float
    seconds: float
    mfu: float


_COLUMNS = [field.name for field in fields(StepMetrics)]


class MetricsLog:
    """Takes a row a step; each is on its way to disk before the next step begins."""

    def __init__(self, file: IO[str], events: SummaryWriter | None) -> None:
        self._file = file
        self._writer = csv.writer(file)
        self._events = events

    def write(self, metrics: StepMetrics) -> None:
        row = asdict(metrics)
        self._writer.writerow(row.values())  # None is an empty cell
        self._file.flush()
        if self._events is not None:
            for name in _COLUMNS[1:]:
                if row[name] is not None:
                    self._events.add_scalar(name, row[name], metrics.step)


@contextmanager
def open_metrics(folder: Path, step: int, *, tensorboard: bool = False) -> Iterator[MetricsLog]:
    """A run's metrics, with those up to `step` kept and later ones (of a run that was cut off) dropped."""
    path = folder / METRICS_FILE
    kept: list[list[str]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [
                row for row in csv.reader(file) if row and row[0].isdigit() and int(row[0]) <= step
            ]
    with (
        path.open("w", newline="", encoding="utf-8") as file,
        _open_events(folder, step, tensorboard) as events,
    ):
        csv.writer(file).writerows([_COLUMNS, *kept])
        yield MetricsLog(file, events)


@contextmanager
def _open_events(folder: Path, step: int, wanted: bool) -> Iterator[SummaryWriter | None]:
    if not wanted:
        yield None
        return
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (an extra that training does without)

    with SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1) as events:
        yield events


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw metrics.csv as a PNG: training loss per step, held-out loss where it was measured."""
    with metrics.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    held_out = [row for row in rows if row["held_out_loss"]]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [int(r["step"]) for r in rows],
        [float(r["train_loss"]) for r in rows],
        linewidth=0.8,
        label="training",
    )
    axes.plot(
        [int(r["step"]) for r in held_out],
        [float(r["held_out_loss"]) for r in held_out],
        "o-",
        label="held out",
    )
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)

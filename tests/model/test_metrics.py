"""TensorBoard's events against metrics.csv, also of a run that was killed and resumed."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvasir.model.training.metrics import StepMetrics, open_metrics

ROW = StepMetrics(
    step=1,
    tokens=512,
    train_loss=1 / 3,
    held_out_loss=None,
    learning_rate=1e-4,
    gradient_norm=2.5,
    seconds=0.125,
    mfu=0.01,
)


def write_rows(write: Callable[[StepMetrics], None], steps: range, scale: float = 1.0) -> None:
    for step in steps:
        held_out = step / 7 if step % 2 == 0 else None
        write(
            replace(
                ROW,
                step=step,
                tokens=512 * step,
                train_loss=scale / step,
                held_out_loss=held_out,
                held_out_accuracy=held_out,
                held_out_exact_match=held_out,
            )
        )


def read_csv(folder: Path) -> dict[str, dict[int, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: {int(row["step"]): float(row[name]) for row in rows if row[name]}
        for name in rows[0]
        if name != "step"
    }


def read_events(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def test_events_hold_what_metrics_csv_holds(tmp_path: Path) -> None:
    """The second session repeats steps 4 and 5; the first session's have to be gone from both."""
    with open_metrics(tmp_path, 0, tensorboard=True) as write:
        write_rows(write, range(1, 6))
    with open_metrics(tmp_path, 3, tensorboard=True) as write:
        write_rows(write, range(4, 8), scale=2.0)
    metrics, events = read_csv(tmp_path), read_events(tmp_path)
    assert metrics["train_loss"] == {
        step: (2.0 if step > 3 else 1.0) / step for step in range(1, 8)
    }
    assert list(metrics["held_out_loss"]) == [2, 4, 6]
    float32 = {
        name: {step: float(np.float32(value)) for step, value in row.items()}
        for name, row in metrics.items()
    }
    assert events == float32


def test_a_row_is_on_its_way_to_disk_at_once(tmp_path: Path) -> None:
    with open_metrics(tmp_path, 0) as write:
        write_rows(write, range(1, 3))
        assert list(read_csv(tmp_path)["train_loss"]) == [1, 2]

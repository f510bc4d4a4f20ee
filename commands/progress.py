"""How far long work is, as bars on a terminal; they are gone when it is done."""

from __future__ import annotations

import sys
from threading import Timer
from typing import TYPE_CHECKING

from commands.output import console

if TYPE_CHECKING:
    from rich.progress import TaskID

_PATIENCE = 0.5  # seconds: what takes no longer needs no bar


class ProgressBar:
    """`model.progress.Progress` that draws: a line for each thing that is done, below those before it.

    On standard error, and on a terminal only; quiet: nowhere.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console(stderr=True),
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._what = ""
        self._task: TaskID | None = None
        self._timer = Timer(_PATIENCE, self._bar.start)
        self._timer.daemon = True

    @classmethod
    def loading(cls, what: str, *, quiet: bool = False) -> ProgressBar:
        """For imports that take seconds."""
        bar = cls(quiet=quiet)
        bar(f"loading {what}", 0, 0)
        return bar

    def __enter__(self) -> ProgressBar:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()  # it may be starting the bar at this moment
        if self._bar.live.is_started:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._task is None or what != self._what:
            if self._task is not None:
                self._bar.update(self._task, total=1, completed=1)
            self._what = what
            self._task = self._bar.add_task(what, total=None, count="")
        count = f"{done:,}/{total:,}" if total else ""
        self._bar.update(self._task, completed=done, total=total or None, count=count)

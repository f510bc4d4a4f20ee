"""Progress bars of long work on a terminal, which vanish when it is done; and Ctrl-C meanwhile.

`kvasir` imports this first, so it imports packages only when a bar is made.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

_DELAY = 0.5  # seconds: shorter work shows no bar


@contextmanager
def on_interrupt(handle: Callable[..., None] | signal.Handlers) -> Iterator[None]:
    """Handle Ctrl-C with `handle` in this block, unless the process was started to ignore it."""
    previous: Any = signal.getsignal(signal.SIGINT)
    if previous != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class ProgressBar:
    """A `model.progress.Progress` that draws a bar for each stage, below the earlier ones.

    It draws on standard error if that is a terminal and `quiet` is not set. Ctrl-C ends the block
    as KeyboardInterrupt, at the next report at the latest: PyTorch swallows some of them, or turns
    them into other errors.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from commands.output import console

        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # a pipe gets its lines as they are
            disable=quiet or not sys.stderr.isatty(),
        )
        self._timer = Timer(_DELAY, self._bar.start)
        self._timer.daemon = True
        self._interrupted = False
        self._handling = on_interrupt(self._interrupt)

    def __enter__(self) -> ProgressBar:
        self._handling.__enter__()
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._handling.__exit__(None, None, None)
        self.close()
        if self._interrupted and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt from None

    def close(self) -> None:
        """Remove the bars."""
        self._timer.cancel()
        self._timer.join()  # it may be starting the bar at this moment
        if self._bar.live.is_started:
            self._bar.stop()

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Report how much of a stage is done; a total of 0 is unknown."""
        if self._interrupted:
            raise KeyboardInterrupt
        stages = self._bar.tasks
        if not stages or stages[-1].description != what:
            if stages:
                self._bar.update(stages[-1].id, total=1, completed=1)
            self._bar.add_task(what, total=None, completed=done, count="", note="")
        count = f"{done:,}/{total:,}" if total else ""
        stage = self._bar.task_ids[-1]
        self._bar.update(stage, completed=done, total=total or None, count=count, note=note)


@contextmanager
def loading(*, quiet: bool = False) -> Iterator[None]:
    """Show a bar while PyTorch is imported, and let Ctrl-C end the process at once.

    A KeyboardInterrupt within an import may be lost, or become another error.
    """
    with ProgressBar(quiet=quiet) as bar:
        bar("loading PyTorch", 0, 0)

        def end_process(*_: object) -> None:
            bar.close()
            os._exit(130)

        with on_interrupt(end_process):
            yield

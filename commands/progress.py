"""How far long work is, as bars on a terminal; they are gone when it is done."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any

from commands.output import console

if TYPE_CHECKING:
    from rich.progress import TaskID

_PATIENCE = 0.5  # seconds: what takes no longer needs no bar


class ProgressBar:
    """`model.progress.Progress` that draws: a line for each thing that is done, below those before it.

    On standard error, and on a terminal only; quiet: nowhere. Ctrl-C ends the block as KeyboardInterrupt, at the next
    report at the latest: PyTorch loses some of them, or makes other errors of them.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
        self._what = ""
        self._task: TaskID | None = None
        self._timer = Timer(_PATIENCE, self._bar.start)
        self._timer.daemon = True
        self._interrupted = False

    def __enter__(self) -> ProgressBar:
        self._handler = on_interrupt(self._interrupt)
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        signal.signal(signal.SIGINT, self._handler)
        self.close()
        if self._interrupted and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt from None

    def close(self) -> None:
        self._timer.cancel()
        self._timer.join()  # it may be starting the bar at this moment
        if self._bar.live.is_started:
            self._bar.stop()

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        if self._task is None or what != self._what:
            if self._task is not None:
                self._bar.update(self._task, total=1, completed=1)
            self._what = what
            self._task = self._bar.add_task(what, total=None, completed=done, count="", note="")
        count = f"{done:,}/{total:,}" if total else ""
        self._bar.update(self._task, completed=done, total=total or None, count=count, note=note)


@contextmanager
def loading(what: str, *, quiet: bool = False) -> Iterator[None]:
    """For imports that take seconds. Ctrl-C ends the process at once: raised within them, it would be lost, or become
    another error.
    """
    with ProgressBar(quiet=quiet) as bar:
        bar(f"loading {what}", 0, 0)

        def leave(*_: object) -> None:
            bar.close()
            os._exit(130)

        on_interrupt(leave)
        yield


def on_interrupt(handle: Callable[..., None]) -> Any:
    """Have Ctrl-C handled like this, unless it is ignored. The handler before."""
    previous = signal.getsignal(signal.SIGINT)
    if previous != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)
    return previous

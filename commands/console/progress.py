"""Progress of long work: bars on a terminal that vanish when it is done; and signals meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from kvasir.commands.console.output import console
from kvasir.model.platform.progress import handling

_DELAY = 0.5  # seconds: shorter work shows no bar


class ProgressBar:
    """A `model.platform.progress.Progress` that draws a bar for each stage, below the earlier ones.

    It draws on standard error if that is a terminal and `quiet` is not set. Ctrl-C ends the block
    as KeyboardInterrupt, at the next report at the latest: PyTorch swallows some of them, or turns
    them into other errors.

    takes_minutes: SIGTERM ends the block as SystemExit, so that nothing half written stays; and
    where there is no terminal, each stage is a line as it begins. lines: the console for lines on
    standard output, which come above the bar; others would be glued to it.
    """

    def __init__(self, *, quiet: bool = False, takes_minutes: bool = False) -> None:
        self.lines = console(quiet=quiet)
        shares_terminal = sys.stdout.isatty() and sys.stderr.isatty()
        screen = self.lines if shares_terminal else console(stderr=True)

        class NarrowProgress(Progress):
            def get_renderable(self) -> RenderableType:
                """Leave room for the terminal's ^C, which would begin a new line."""
                return Constrain(super().get_renderable(), screen.width - len("^C") - 1)

        # A bar of two lines leaves copies of itself on the screen when it becomes one.
        line = Column(no_wrap=True)
        note = Column(no_wrap=True, overflow="ellipsis", ratio=2)
        self._bar = NarrowProgress(
            TextColumn("{task.description}", style="bold", markup=False, table_column=line),
            BarColumn(None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.fields[count]}", table_column=line),
            TextColumn("{task.fields[note]}", markup=False, table_column=note),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=line),
            expand=True,
            console=screen,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # a pipe gets its lines as they are
            disable=quiet or not sys.stderr.isatty(),
        )
        self._timer = Timer(_DELAY, self._bar.start)
        self._timer.daemon = True
        self._prints = takes_minutes and not quiet and not sys.stderr.isatty()
        self._started, self._stage = time.monotonic(), ""
        self._end: BaseException | None = None
        ending = (signal.SIGINT, signal.SIGTERM)[: 1 + takes_minutes]
        self._handling = handling(self._interrupt, *ending)

    def __enter__(self) -> ProgressBar:
        self._handling.__enter__()
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._handling.__exit__(None, None, None)
        self.close()
        if self._end and kind is not type(self._end):
            raise self._end from None

    def close(self) -> None:
        """Remove the bars."""
        self._timer.cancel()
        self._timer.join()  # it may be starting the bar at this moment
        if self._bar.live.is_started:
            self._bar.stop()

    def _interrupt(self, number: int, _: object) -> None:
        ends = number == signal.SIGTERM
        self._end = SystemExit(128 + number) if ends else KeyboardInterrupt()
        raise self._end

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Report how much of a stage is done; a total of 0 is unknown."""
        if self._end:
            raise self._end
        if self._prints and what != self._stage:
            self._stage = what
            sys.stderr.write(f"{time.monotonic() - self._started:6.1f} s  {what}\n")
            sys.stderr.flush()
        stages = self._bar.tasks
        if not stages or stages[-1].description != what:
            if stages:
                self._bar.update(stages[-1].id, total=1, completed=1)
            self._bar.add_task(what, total=None, completed=done, count="", note="")
        count = f"{done:,}/{total:,}" if total else ""
        stage = self._bar.task_ids[-1]
        self._bar.update(stage, completed=done, total=total or None, count=count, note=note)


@contextmanager
def loading(*, quiet: bool = False, takes_minutes: bool = False) -> Iterator[None]:
    """Show a bar while PyTorch is imported, and let Ctrl-C end the process at once.

    A KeyboardInterrupt within an import may be lost, or become another error. takes_minutes: as in
    ProgressBar, of the work that follows.
    """
    with ProgressBar(quiet=quiet, takes_minutes=takes_minutes) as bar:
        bar("loading PyTorch", 0, 0)

        def end_process(*_: object) -> None:
            bar.close()
            os._exit(130)

        with handling(end_process, signal.SIGINT):
            yield

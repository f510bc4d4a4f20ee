"""Bars beside lines, as an emulator of a terminal shows them."""

from __future__ import annotations

import os
import pty
import sys
from contextlib import suppress

import pytest


def screen_of(code: str, *, press_at: bytes = b"", columns: int = 60) -> list[str]:
    """Run Python in a terminal; return the lines of the screen at its end.

    press_at: output at which Ctrl-C is pressed.
    """
    pyte = pytest.importorskip("pyte")
    screen = pyte.Screen(columns, 40)
    stream = pyte.ByteStream(screen)
    pid, fd = pty.fork()
    if not pid:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns)}
        os.execve(sys.executable, [sys.executable, "-c", code], environment)  # noqa: S606
    seen = b""
    with suppress(OSError):  # the end
        while data := os.read(fd, 4096):
            stream.feed(data)
            seen += data
            if press_at and press_at in seen:
                os.write(fd, b"\x03")
                press_at = b""
    os.waitpid(pid, 0)
    os.close(fd)
    return [line.rstrip() for line in screen.display if line.strip()]


BAR = """
import os
from time import sleep
from kvasir.commands.console import progress
progress._DELAY = 0
try:
    with progress.ProgressBar() as bar:
        bar._timer.join()
        for i in range(1, 7):
            bar("training", i, 1000 + 6 * {long}, "loss 1.0 · 123,456,789 tokens/s" * i)
            bar._bar.refresh()
            if i % 2 == 0:
                bar.lines.print(f"step {{i}}", soft_wrap=True)
        print("waiting" if {long} else "done", flush=True)
        os.write(1, b"\\a")  # only now, since Ctrl-C in a flush would make it write twice
        while {long}:
            sleep(0.01)  # a signal just before a system call does not interrupt it
except KeyboardInterrupt:
    print("stopped")
"""


def test_a_bar_leaves_no_copies_between_the_lines() -> None:
    """Lines beside the bar's console were glued to it, and a bar of two lines left one of them."""
    lines = ["step 2", "step 4", "step 6"]
    assert screen_of(BAR.format(long=False)) == [*lines, "done"]


def test_control_c_beside_a_bar_leaves_no_copy() -> None:
    """Terminals show ^C at the cursor, so a bar of the whole width continued on the next line."""
    stopped = screen_of(BAR.format(long=True), press_at=b"\a")
    assert stopped == ["step 2", "step 4", "step 6", "waiting", "stopped"]

"""Ctrl-C: a handler for the time of a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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

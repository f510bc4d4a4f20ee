"""What threads and memory of this process leave to others on the machine."""

from __future__ import annotations

import ctypes
import os
import sys

_NICENESS = 5  # of an encoder beside streams: Linux gives it a third of a stream's time

_C = ctypes.CDLL(None) if sys.platform == "linux" else None


def yield_to_streams() -> None:
    """Let this thread and those that it will start run less often than threads of streams."""
    if sys.platform == "linux":  # elsewhere the whole process would yield
        os.nice(_NICENESS)


def return_freed_memory() -> None:
    """Return memory that was freed to the operating system; glibc would keep much of it."""
    if trim := getattr(_C, "malloc_trim", None):
        trim(0)

"""Long work: functions say how far they are, which a caller may show, and signals interrupt it."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event, Thread, current_thread, main_thread
from time import monotonic
from typing import TypeVar

# Called with a description of the work, the units done, and their total (0: unknown).
Progress = Callable[[str, int, int], object]
T = TypeVar("T")
_LONGEST_WAIT = 0.2  # seconds until Ctrl-C is noticed
_LAST_SECONDS = 0.5  # for work to notice that nobody waits for it


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore a report."""


def with_progress(items: Sequence[T], what: str, progress: Progress) -> Iterator[T]:
    """Yield the items, and report how many of them are done."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))


def interruptible(work: Callable[[Event], T], longest: float = math.inf) -> T:
    """Return the result of `work`, which runs compiled code in a thread of its own.

    Ctrl-C ends the wait at once, not when the compiled code returns. Then the event is set, and
    Python code of `work` should end; as it should after TimeoutError, raised after `longest`
    seconds.
    """
    result, is_over = Future[T](), Event()

    def run() -> None:
        try:
            result.set_result(work(is_over))
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=run, name="work", daemon=True)  # else the process would wait for it
    try:
        thread.start()
        ends = monotonic() + longest
        while thread.is_alive():  # the kernel may give the signal to another thread
            thread.join(min(_LONGEST_WAIT, max(0.0, ends - monotonic())))
            if thread.is_alive() and monotonic() >= ends:
                is_over.set()
                raise TimeoutError(f"it takes longer than {longest:g} seconds")
    except (KeyboardInterrupt, SystemExit):
        is_over.set()
        thread.join(_LAST_SECONDS)
        raise
    return result.result()


@contextmanager
def handling(
    handle: Callable[..., None] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Handle signals with `handle` in this block.

    Those that the process was started to ignore stay ignored. Only the main thread can handle
    signals; in another one this does nothing.
    """
    previous = {}
    if current_thread() is main_thread():
        previous = {number: signal.getsignal(number) for number in numbers}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""Work in compiled code, which Ctrl-C does not wait for."""

from __future__ import annotations

import os
import signal
from threading import Event, Thread

import pytest

from kvasir.model.platform.progress import interruptible
from tests.kit.fake_runner import TIMEOUT


def test_the_result_is_the_works() -> None:
    assert interruptible(lambda _: 42) == 42
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda _: 1 // 0)


def test_control_c_ends_the_wait_and_not_the_work() -> None:
    """BPE training returns to Python, where Ctrl-C is noticed, only after minutes."""
    has_begun, compiled, told = Event(), Event(), Event()

    def work(is_over: Event) -> None:
        has_begun.set()
        is_over.wait()
        told.set()
        compiled.wait()

    def press() -> None:
        has_begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    pressing = Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        interruptible(work)
    pressing.join()
    assert told.wait(TIMEOUT)
    compiled.set()

"""Seconds of each step of a server's start, from the beginning of its process."""

from __future__ import annotations

import sys
import time

import psutil


class StartClock:
    """A clock of laps, each of which begins where the last ended.

    of_process: the first begins with the process, not now.
    """

    def __init__(self, *, of_process: bool = True) -> None:
        self.seconds: dict[str, float] = {}
        self._began = _process_began() if of_process else _now()

    def lap(self, step: str) -> None:
        """End a lap, whose time is added to that of this step."""
        passed = _now() - self._began - sum(self.seconds.values())
        self.seconds[step] = self.seconds.get(step, 0.0) + passed

    def rounded(self) -> dict[str, float]:
        """Return the seconds by step, and in total, to the millisecond."""
        everything = self.seconds | {"total": sum(self.seconds.values())}
        return {step: round(seconds, 3) for step, seconds in everything.items()}


# On Linux psutil knows the moment of the boot to the second only, but that of a process after the
# boot to a tick.
def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.time()


def _process_began() -> float:
    began: float = psutil.Process().create_time()
    return began - psutil.boot_time() if sys.platform == "linux" else began

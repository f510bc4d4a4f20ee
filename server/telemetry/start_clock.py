"""Where the time of a start goes: seconds of each step, from the beginning of the process to the last lap."""

from __future__ import annotations

import sys
import time

import psutil


class StartClock:
    """Each lap is one step; it begins where the one before ended, the first one with the process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = _process_began()

    def lap(self, step: str) -> None:
        """What was done since the last lap was this step."""
        self.seconds[step] = _now() - self._began - sum(self.seconds.values())

    def rounded(self) -> dict[str, float]:
        """Seconds by step, and in all, to the millisecond."""
        everything = self.seconds | {"total": sum(self.seconds.values())}
        return {step: round(seconds, 3) for step, seconds in everything.items()}


if (
    sys.platform == "linux"
):  # psutil knows when the machine booted to the second only; since then, to a tick

    def _now() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def _process_began() -> float:
        return float(psutil.Process().create_time() - psutil.boot_time())

else:

    def _now() -> float:
        return time.time()

    def _process_began() -> float:
        return float(psutil.Process().create_time())

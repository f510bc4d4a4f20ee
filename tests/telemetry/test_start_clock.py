"""A start's seconds by step divide the process's time so far."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvasir.server.telemetry.start_clock
from kvasir.server.telemetry.start_clock import StartClock
from tests.faults.cold_start import start, table

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"


def test_laps_divide_the_time_since_the_process_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(kvasir.server.telemetry.start_clock, "_now", lambda: now)
    monkeypatch.setattr(kvasir.server.telemetry.start_clock, "_process_began", lambda: 99.0)
    clock = StartClock()
    for step, seconds in (("imports", 0.25), ("session", 2.0), ("nothing", 0.0)):
        now += seconds
        clock.lap(step)
    assert clock.rounded() == {"imports": 1.25, "session": 2.0, "nothing": 0.0, "total": 3.25}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems know it to the microsecond")
def test_the_process_began_between_its_parents_call_and_its_own_first_line() -> None:
    """Both read the machine's clock; the system counts the beginning of a process in ticks."""
    code = "import time\nfirst = time.clock_gettime(time.CLOCK_BOOTTIME)\n"
    code += "from kvasir.server.telemetry.start_clock import _process_began\n"
    code += "print(_process_began(), first)"
    asked = time.clock_gettime(time.CLOCK_BOOTTIME)
    command = [sys.executable, "-c", code]
    began, first = map(
        float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert asked - tick <= began <= first + tick


def test_a_real_start_is_logged_step_by_step() -> None:
    """A process cannot have run for longer than its parent waited for it."""
    asked = time.monotonic()
    seconds = start(EXAMPLE)
    waited = time.monotonic() - asked
    total = seconds.pop("total")
    assert list(seconds) == [
        "imports_and_settings",
        "model_directory",
        "application",
        "session",
        "warm_up",
    ]
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(total, abs=0.005)
    assert 0 < total <= waited + 0.01


def test_the_table_holds_medians() -> None:
    starts = [{"session": value, "total": 2 * value} for value in (3.0, 1.0, 8.0)]
    (_, medians) = table("title", starts).columns
    assert list(medians.cells) == ["3.000", "6.000"]

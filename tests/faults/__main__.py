"""Inject every fault many times: python -m tests.faults [NAME...]. Exit code 1 if any is lost.

Attacks on a live server are in `attack.py`.
"""

from __future__ import annotations

import logging
import sys
from time import perf_counter

from typer import echo

from tests.faults.damage import refused_models
from tests.faults.ends import kills, terminations
from tests.faults.full_disk import full_disk
from tests.faults.step_exceptions import step_exceptions

# The number of times for this command, and for tests/test_faults.py, where 0 is never.
FAULTS = {
    kills: (10, 1),
    terminations: (10, 0),
    step_exceptions: (10_000, 20),
    full_disk: (50, 1),
    refused_models: (100, 0),
}


def main(names: list[str]) -> int:
    logging.getLogger().addHandler(logging.NullHandler())  # the faults read the log themselves
    lost: list[str] = []
    echo(f"{'fault':28} {'tried':>7} {'survived':>9} {'lost':>5} {'seconds':>8}")
    for fault, (many, _) in FAULTS.items():
        if names and fault.__name__ not in names:
            continue
        started = perf_counter()
        report = fault(many)
        seconds = perf_counter() - started
        counts = f"{report.tried:7} {report.survived:9} {len(report.lost):5} {seconds:8.1f}"
        echo(f"{report.what:28} {counts}  {report.note}")
        lost += [f"{report.what}: {what}" for what in report.lost]
    echo("\n".join(lost))
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

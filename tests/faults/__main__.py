"""Inject every fault many times: python -m tests.faults [NAME...]. Exit code 1 if any is lost.

The stalls are the gaps between the tokens of a client's stream beside the fault, from a process of
its own, and the memory is the growth of the server's process; - is explained in the fault's file.
"""

from __future__ import annotations

import logging
import sys
from time import perf_counter

from typer import echo

from tests.faults.abandoned_texts import abandoned_texts
from tests.faults.clock_jumps import clock_jumps
from tests.faults.damage import damaged_models, hostile_models
from tests.faults.disconnects import disconnects
from tests.faults.ends import kills, terminations
from tests.faults.foreign_pages import foreign_pages
from tests.faults.full_disk import full_disk
from tests.faults.hostile_grammars import hostile_grammars
from tests.faults.large_bodies import large_bodies
from tests.faults.malformed import malformed_bodies
from tests.faults.neighbours import neighbours
from tests.faults.no_fault import no_fault
from tests.faults.overload import overload
from tests.faults.raw_http import malformed_http
from tests.faults.slow_readers import slow_readers
from tests.faults.step_exceptions import step_exceptions
from tests.faults.unfinished import slow_senders, unfinished_bodies
from tests.faults.waiting_bodies import waiting_bodies

# The number of times for this command, and for tests/test_faults.py.
FAULTS = {
    no_fault: (1000, 40),
    kills: (10, 1),
    terminations: (10, 2),
    disconnects: (1000, 200),
    slow_readers: (20, 4),
    step_exceptions: (10_000, 40),
    clock_jumps: (1000, 30),
    overload: (16_000, 320),
    full_disk: (50, 1),
    damaged_models: (100, 2),
    hostile_models: (41, 2),
    hostile_grammars: (300, 2),
    malformed_bodies: (20_000, 800),
    large_bodies: (1000, 12),
    waiting_bodies: (60, 16),
    abandoned_texts: (200, 10),
    malformed_http: (5000, 100),
    unfinished_bodies: (100, 40),
    slow_senders: (1000, 40),
    foreign_pages: (5000, 150),
    neighbours: (3000, 60),
}


def main(names: list[str]) -> int:
    logging.getLogger().addHandler(logging.NullHandler())  # the faults read the log themselves
    lost: list[str] = []
    echo(f"{'':60} {'stalls in ms':>17} {'memory':>6}")
    echo(
        f"{'fault':28} {'tried':>7} {'survived':>9} {'lost':>5} {'seconds':>8} {'p99':>8} "
        f"{'longest':>8} {'MiB':>6}"
    )
    for fault, (many, _) in FAULTS.items():
        if names and fault.__name__ not in names:
            continue
        started = perf_counter()
        report = fault(many)
        seconds = perf_counter() - started
        counts = f"{report.tried:7} {report.survived:9} {len(report.lost):5} {seconds:8.1f}"
        echo(f"{report.what:28} {counts} {report.figures}  {report.note}")
        lost += [f"{report.what}: {what}" for what in report.lost]
    echo("\n".join(lost))
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The attacks on a live server, by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import batch_files, connections, hostile_models, texts, unfinished
from tests.faults.client import Site
from tests.faults.foreign_pages import ALLOWED, foreign_pages
from tests.faults.malformed import malformed_bodies
from tests.faults.neighbours import neighbours
from tests.faults.raw_http import malformed_http
from tests.faults.report import Report

MOST_GROWTH = 64 * 2**20  # bytes
_LIMITED = (  # without keys, unlike the usual server
    *("--send-timeout", "2"),
    *(part for name, text in ALLOWED.items() for part in (f"--{name.replace('_', '-')}", text)),
)


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack, and the server that it is for.

    n, few: times for `make attack`, and for tests/test_faults.py, where 0 is never.
    models: writes others to a folder, for the server to serve too. n_files: `ulimit -n`.
    n_disk: bytes of a disk for batches.
    """

    run: Callable[[Site, int, Report], Awaitable[None]]
    n: int
    few: int
    options: tuple[str, ...] = ()
    models: Callable[[Path], list[str]] | None = None
    n_files: int | None = None
    n_disk: int | None = None

    @property
    def kind(self) -> str:
        """Return what tells its server from that of other attacks; "" for the usual one."""
        parts = (*self.options, self.models and self.models.__name__, self.n_files, self.n_disk)
        return " ".join(str(part) for part in parts if part)

    @property
    def is_usual(self) -> bool:
        """True if its server is like that of most others, so that they can be mixed."""
        return not self.kind


async def nothing(site: Site, n: int, report: Report) -> None:
    """Do nothing for as long as n probes take: the streams alone."""
    for _ in range(n):
        report.answered((await connections.probe(site)).status, "a probe", 200)


async def busy_machine(site: Site, n: int, report: Report) -> None:
    """Take a processor for n probes, without a request: what attackers themselves cost."""
    for _ in range(n):
        sum(i * i for i in range(10**5))
        report.answered((await connections.probe(site)).status, "a probe", 200)


ATTACKS = {
    "nothing": Attack(nothing, 500, 0),
    "busy_machine": Attack(busy_machine, 300, 0),
    "pipelined_20": Attack(connections.pipelined, 20, 0),
    "pipelined_50": Attack(connections.pipelined, 50, 0),
    "pipelined_150": Attack(connections.pipelined, 150, 0),
    "pipelined_others": Attack(connections.pipelined_others, 30, 20),
    "half_closed": Attack(connections.half_closed, 60, 4),
    "slow_readers": Attack(connections.slow_readers, 5, 0, _LIMITED, n_files=unfinished.FILES),
    "disconnects": Attack(connections.disconnects, 1000, 60),
    "large_answers": Attack(texts.large_answers, 10, 1),
    "large_bodies": Attack(texts.large_bodies, 300, 8),
    "abandoned_texts": Attack(texts.abandoned_texts, 200, 10),
    "hostile_grammars": Attack(texts.hostile_grammars, 60, 1),
    "overload": Attack(texts.overload, 3000, 150),
    "invalid_requests": Attack(texts.invalid_requests, 2000, 40),
    "unfinished_bodies": Attack(unfinished.unfinished_bodies, 100, 40),
    "slow_senders": Attack(unfinished.slow_senders, 100, 0, _LIMITED, n_files=unfinished.FILES),
    "waiting_bodies": Attack(unfinished.waiting_bodies, 60, 8),
    "malformed_bodies": Attack(malformed_bodies, 4000, 16),
    "malformed_http": Attack(malformed_http, 2000, 60),
    "foreign_pages": Attack(foreign_pages, 2000, 0, _LIMITED, n_files=unfinished.FILES),
    "neighbours": Attack(neighbours, 600, 40),
    "newline_files": Attack(batch_files.newline_files, 199, 8),
    "full_disk": Attack(batch_files.full_disk, 12, 0, n_disk=8 * 2**20),
    "hostile_templates": Attack(
        hostile_models.hostile_templates, 24, 0, models=hostile_models.write_templates
    ),
    "hostile_tokenizers": Attack(
        hostile_models.hostile_tokenizers, 12, 0, models=hostile_models.write_tokenizers
    ),
}

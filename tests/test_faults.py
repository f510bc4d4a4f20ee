"""A few faults and attacks of each kind. `make faults` and `make attack` make many more."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.faults.__main__ import FAULTS
from tests.faults.attack import ROOT, Row, attacking, job, serving, stand, watched
from tests.faults.attacks import ATTACKS, MOST_GROWTH
from tests.faults.bodies import VALID
from tests.faults.client import Site
from tests.faults.foreign_pages import ALLOWED, foreign_pages
from tests.faults.malformed import post_routes
from tests.faults.report import Report
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.live import live
from tests.kit.serving import VOCAB_SIZE, fake_app

FEW = [(fault, few) for fault, (_, few) in FAULTS.items() if few]
SHORT = [name for name, attack in ATTACKS.items() if attack.few]


@pytest.mark.parametrize(("fault", "n"), FEW)
def test_nothing_is_lost_by(fault: Callable[[int], Report], n: int) -> None:
    report = fault(n)
    assert report.lost == []
    assert report.tried >= 0.8 * n  # some lines are reached less often the second time


def test_a_server_stands() -> None:
    """It takes one attack after the other, beside streams, and ends in the middle of them all."""
    with (
        serving(SHORT, ROOT, "--threads", "1") as server,
        watched(server, pause=2.0) as watch,
        attacking() as attackers,
    ):
        for name in SHORT:
            row, few = Row(name), ATTACKS[name].few
            told = job([name], server, 0, few=True)
            stand(row, (server, watch, attackers), told, settles=False)
            assert row.lost + row.told.get("lost", []) + server.errors == [], name
            assert (row.grown or 0) < MOST_GROWTH, name
            assert row.told["tried"] >= 0.8 * few, name
        attackers.tell(job(SHORT, server, 0, few=True))
        server.popen.terminate()
        assert server.popen.wait(TIMEOUT) == 0


async def test_pages_of_other_origins_are_refused() -> None:
    report = Report("foreign pages")
    with live(api_key=None, **ALLOWED) as server:
        await foreign_pages(Site(server.port, chance=random.Random(0)), 100, report)
    assert report.lost == []


def test_every_route_with_a_body_gets_malformed_ones() -> None:
    assert post_routes(fake_app(FakeRunner(VOCAB_SIZE))) == VALID.keys()

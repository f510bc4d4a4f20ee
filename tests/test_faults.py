"""A few faults and attacks of each kind. `make faults` and `make attack` make many more."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest

from tests.faults.__main__ import FAULTS
from tests.faults.attack import ROOT, Row, attacking, job, serving, stand, watched
from tests.faults.attacks import ATTACKS, MOST_GROWTH
from tests.faults.bodies import VALID
from tests.faults.malformed import post_routes
from tests.faults.report import Report
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import VOCAB_SIZE, fake_app

SHORT = sorted((name for name in ATTACKS if ATTACKS[name].few), key=lambda name: ATTACKS[name].kind)
OF_A_SERVER = [[*names] for _, names in groupby(SHORT, lambda name: ATTACKS[name].kind)]


@pytest.mark.parametrize(("fault", "n"), [(fault, few) for fault, (_, few) in FAULTS.items()])
def test_nothing_is_lost_by(fault: Callable[[int], Report], n: int) -> None:
    report = fault(n)
    assert report.lost == []
    assert report.tried >= 0.8 * n  # some lines are reached less often the second time


@pytest.mark.parametrize("names", OF_A_SERVER, ids="+".join)
def test_a_server_stands(names: list[str]) -> None:
    """It takes one attack after the other, beside streams, and ends in the middle of them all."""
    try:
        with (
            serving(names[:1], ROOT) as server,
            watched(server) as watch,
            attacking() as attackers,
        ):
            for name in names:
                row, few = Row(name), ATTACKS[name].few
                told = job([name], server, 0, few=True)
                stand(row, (server, watch, attackers), told, settles=False)
                assert row.lost + row.told.get("lost", []) + server.errors == [], name
                assert (row.grown or 0) < MOST_GROWTH, name
                assert row.told["tried"] >= 0.8 * few, name
            attackers.tell(job(names, server, 0, few=True))
            server.popen.terminate()
            assert server.popen.wait(TIMEOUT) == 0
    except PermissionError as error:
        pytest.skip(str(error))


def test_every_route_with_a_body_gets_malformed_ones() -> None:
    assert post_routes(fake_app(FakeRunner(VOCAB_SIZE))) == VALID.keys()

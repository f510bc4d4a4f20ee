"""A few faults and attacks of each kind. `make faults` and `make attack` make many more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests.faults.__main__ import FAULTS
from tests.faults.attack import ROOT, Row, attacking, job, serving, stand, watched
from tests.faults.attacks import ATTACKS, MOST_GROWTH
from tests.faults.bodies import VALID
from tests.faults.child import Child
from tests.faults.malformed import post_routes
from tests.faults.report import Report
from tests.faults.victim import Victim
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import VOCAB_SIZE, fake_app

Attacked = tuple[Victim, Child]
SHORT = [name for name, attack in ATTACKS.items() if attack.few]


@pytest.fixture(scope="module")
def attackers() -> Iterator[Child]:
    with attacking() as child:
        yield child


@pytest.fixture(scope="module")
def usual(attackers: Child) -> Iterator[Attacked]:
    """A server for most attacks, one after the other, and the clients beside them.

    It ends in the middle of all attacks at once.
    """
    with _serving("nothing") as (server, watch):
        yield server, watch
        names = [name for name in SHORT if ATTACKS[name].is_usual]
        attackers.tell(job(names, server, 0, few=True))
        server.popen.terminate()
        assert server.popen.wait(TIMEOUT) == 0


@contextmanager
def _serving(name: str) -> Iterator[Attacked]:
    try:
        with serving([name], ROOT) as server, watched(server) as watch:
            yield server, watch
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("fault", "n"), [(fault, few) for fault, (_, few) in FAULTS.items()])
def test_nothing_is_lost_by(fault: Callable[[int], Report], n: int) -> None:
    report = fault(n)
    assert report.lost == []
    assert report.tried >= 0.8 * n  # some lines are reached less often the second time


@pytest.mark.parametrize("name", SHORT)
def test_a_server_stands(name: str, usual: Attacked, attackers: Child) -> None:
    with nullcontext(usual) if ATTACKS[name].is_usual else _serving(name) as (server, watch):
        row = Row(name)
        stand(row, (server, watch, attackers), job([name], server, 0, few=True), settles=False)
        assert row.lost + row.told.get("lost", []) + server.errors == []
        assert (row.grown or 0) < MOST_GROWTH
        assert row.told["tried"] >= 0.8 * ATTACKS[name].few


def test_every_route_with_a_body_gets_malformed_ones() -> None:
    assert post_routes(fake_app(FakeRunner(VOCAB_SIZE))) == VALID.keys()

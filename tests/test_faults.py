"""A few faults of each kind, which must lose nothing. `make faults` injects many more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_runner import FakeRunner
from tests.faults.bodies import VALID
from tests.faults.clock_jumps import clock_jumps
from tests.faults.damage import damaged_models
from tests.faults.disconnects import disconnects
from tests.faults.ends import kills, terminations
from tests.faults.full_disk import full_disk
from tests.faults.malformed import malformed_bodies, post_routes
from tests.faults.overload import overload
from tests.faults.raw_http import malformed_http
from tests.faults.report import Report
from tests.faults.slow_readers import slow_readers
from tests.faults.step_exceptions import step_exceptions
from tests.serving import VOCAB_SIZE, fake_app


@pytest.mark.parametrize(
    ("fault", "n"),
    [
        (malformed_bodies, 800),
        (malformed_http, 100),
        (disconnects, 200),
        (slow_readers, 4),
        (step_exceptions, 40),
        (clock_jumps, 30),
        (overload, 320),
        (full_disk, 1),
        (damaged_models, 2),
        (kills, 1),
        (terminations, 2),
    ],
)
def test_nothing_is_lost_by(fault: Callable[[int], Report], n: int) -> None:
    report = fault(n)
    assert report.lost == []
    assert report.tried >= 0.8 * n  # some lines are reached less often the second time


def test_every_route_that_takes_a_body_gets_malformed_ones() -> None:
    assert post_routes(fake_app(FakeRunner(VOCAB_SIZE))) == VALID.keys()

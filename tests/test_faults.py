"""A few faults of each kind, which must lose nothing. `make faults` injects many more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_runner import FakeRunner
from tests.faults.__main__ import FAULTS
from tests.faults.bodies import VALID
from tests.faults.malformed import post_routes
from tests.faults.report import Report
from tests.serving import VOCAB_SIZE, fake_app


@pytest.mark.parametrize(("fault", "n"), [(fault, few) for fault, (_, few) in FAULTS.items()])
def test_nothing_is_lost_by(fault: Callable[[int], Report], n: int) -> None:
    report = fault(n)
    assert report.lost == []
    assert report.tried >= 0.8 * n  # some lines are reached less often the second time


def test_every_route_with_a_body_gets_malformed_ones() -> None:
    assert post_routes(fake_app(FakeRunner(VOCAB_SIZE))) == VALID.keys()

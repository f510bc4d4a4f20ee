"""No fault: the stalls of the canary's stream that the machine and the canary make themselves."""

from __future__ import annotations

from tests.faults.canary import canary
from tests.faults.paced_runner import PacedRunner
from tests.faults.report import Report, errors_logged
from tests.live import KEY, live, wait

_TOKENS = 1000


def no_fault(n: int, _seed: int = 0) -> Report:
    """Let the canary stream alone for n steps of the engine."""
    report = Report("none", n)
    runner = PacedRunner(max_model_len=_TOKENS + 10)
    with (
        errors_logged() as errors,
        live(runner) as served,
        canary(report, served.port, tokens=_TOKENS, key=KEY),
    ):
        for _ in range(n):
            wait(runner.steps)
    report.lost += errors
    report.check(len(report.gaps) >= n / 2, f"the canary saw {len(report.gaps)} of {n} steps")
    return report

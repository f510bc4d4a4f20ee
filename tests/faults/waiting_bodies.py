"""Requests that wait with bodies of the largest size: the server keeps little of what they sent."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle, islice
from typing import Any

from tests.faults.canary import canary
from tests.faults.leaks import OF_LARGE_BODIES, check_nothing_leaked, held
from tests.faults.paced_runner import PacedRunner
from tests.faults.report import Report, errors_logged
from tests.live import KEY, Live, live, wait

_TOKENS = 1000
_FILLER = "x" * (4 * 2**20 - 500)
_MOST = 48 * 2**20  # bytes: several bodies while they are read, and what an allocator keeps
_CHAT = {"prompt": None, "messages": [{"role": "user", "content": "a"}]}
_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"metadata": {"x": _FILLER}}),
    ("/v1/completions", {"metadata": {"x": _FILLER}, "stream": True}),
    ("/v1/chat/completions", _CHAT | {"chat_template_kwargs": {"x": _FILLER}}),
    ("/v1/chat/completions", _CHAT | {"chat_template_kwargs": {"x": _FILLER}, "stream": True}),
)


def waiting_bodies(n: int, _seed: int = 0) -> Report:
    """Let n requests run and wait, each with a body of the largest size."""
    report = Report("bodies that wait", n)
    runner = PacedRunner(max_model_len=_TOKENS + 20)
    with errors_logged() as errors, live(runner, max_queue=n + 1) as served:
        _send(served, len(_BODIES))  # fills the pools that stay
        before = held(served)
        with canary(report, served.port, tokens=_TOKENS, key=KEY):
            _send(served, n)
        check_nothing_leaked(report, before, held(served), OF_LARGE_BODIES)
        report.lost += errors
    report.check((report.grown or 0) < _MOST, f"memory grew by {report.grown} bytes")
    return report


def _send(served: Live, n: int) -> None:
    """Send n bodies, each once the one before is admitted, and then leave."""
    with ExitStack() as stack:
        for path, body in islice(cycle(_BODIES), n):
            fields = body | {"max_tokens": _TOKENS, "ignore_eos": True}
            stack.enter_context(served.post_raw(path, **fields))
            wait(served.submitted)

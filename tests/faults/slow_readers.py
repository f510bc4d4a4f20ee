"""Clients that never read: they slow no other, take bounded memory, and are disconnected."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from tests.faults.canary import canary
from tests.faults.leaks import check_nothing_leaked, held
from tests.faults.paced_runner import PacedRunner
from tests.faults.report import Report, errors_logged
from tests.live import KEY, Live, live, wait

_NAME = "x" * 20_000  # a model name that makes answers too large for the sockets' buffers
_TOKENS = 500


def slow_readers(n: int, _seed: int = 0) -> Report:
    """Connect n clients that read nothing, and n that do."""
    report = Report("clients that do not read", n)
    runner = PacedRunner(max_model_len=_TOKENS + 10, max_num_seqs=n + 3)
    with (
        errors_logged() as errors,
        live(runner, served_model_name=_NAME, send_timeout=1.0, max_queue=n) as served,
    ):
        _stand_still(served, n, report)
        before = held(served)
        most = _stand_still(served, n, report)
        report.note = (
            f"at most {most / 2**20:.1f} of {_TOKENS * len(_NAME) / 2**20:.1f} MiB waited for one, "
        )
        check_nothing_leaked(report, before, held(served))
        report.lost += errors
    return report


def _stand_still(served: Live, n: int, report: Report) -> int:
    """Return the most bytes that waited for one client, after all clients were disconnected."""
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        with canary(report, served.port, tokens=_TOKENS, key=KEY):
            for _ in range(n):
                stack.enter_context(
                    served.post_raw(max_tokens=_TOKENS, stream=True, ignore_eos=True)
                )
                wait(served.submitted)
            lengths = [_TOKENS // 2, *[5] * n]  # the first one takes as long as buffers to fill
            statuses = list(pool.map(partial(_ask, served), lengths))
            report.check(set(statuses) == {200}, f"the clients that read got {statuses}")
            most = asyncio.run_coroutine_threadsafe(_most_buffered(served), served.loop).result()
        rest = held(served)["rows, reservations and places"]
        report.check(
            rest == 0, f"they were not disconnected: {rest} rows, reservations and places are held"
        )
    return most


def _ask(served: Live, n_tokens: int) -> int:
    body = {"prompt": "a", "max_tokens": n_tokens, "ignore_eos": True}
    with served.http() as client:
        return client.post("/v1/completions", json=body).status_code


async def _most_buffered(served: Live) -> int:
    transports = [getattr(one, "transport", None) for one in served.server.server_state.connections]
    return max((one.get_write_buffer_size() for one in transports if one), default=0)

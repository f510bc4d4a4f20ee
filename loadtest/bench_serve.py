"""Benchmarks over HTTP: workloads on one server, or round by round on two in turn."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import uvloop

from loadtest.load import Prompts, Workload, closed_loop, open_loop
from loadtest.local_server import serve_locally
from loadtest.serve_figures import Limits, Measured, Round, ServeFigures, good
from loadtest.sse_client import Answer, Target, complete
from model.progress import Progress, followed, unheard


class ServeBenchError(Exception):
    """A server that answers no request."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test: its URL, or a model directory to serve meanwhile. extra: fields it needs in each request."""

    address: str
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How each workload is run. requests and warm_up: None is three times, and once, the concurrency.

    rate: an open loop's requests a second; None is a closed loop. timeout: seconds that a request may take.
    """

    workloads: list[Workload]
    rounds: int = 3
    requests: int | None = None
    warm_up: int | None = None
    rate: float | None = None
    timeout: float = 300.0
    vocab_size: int = 2048
    seed: int = 0
    limits: Limits = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rate is not None and any(workload.shared_len for workload in self.workloads):
            raise ValueError(
                "a shared prefix is measured in waves, not at a rate; name workloads without one"
            )


def bench_serve(
    servers: dict[str, Server], plan: Plan, api_key: str | None, progress: Progress = unheard
) -> ServeFigures:
    """Measure one server or two. Raises ValueError for a URL that is none, ChildProcessError for a directory that
    cannot be served, and ServeBenchError.
    """
    with ExitStack() as stack:
        clients = {}
        for letter, server in servers.items():
            url = server.address
            if "://" not in url:
                progress(f"starting {url}", 0, 0)
                url = stack.enter_context(serve_locally(Path(url)))
            clients[letter] = _Client(Target(url, api_key), server.extra, plan.timeout)
        rows = uvloop.run(_Bench(clients, plan, progress).run())
    about = {letter: server.address for letter, server in servers.items()}
    names = ("rounds", "requests", "warm_up", "rate", "limits", "vocab_size", "seed")
    return ServeFigures(about | {name: getattr(plan, name) for name in names}, rows)


@dataclass(frozen=True, slots=True)
class _Client:
    target: Target
    extra: dict[str, Any]
    timeout: float

    async def ask(self, body: bytes) -> Answer:
        return await complete(self.target, body, self.timeout)


class _Bench:
    """All workloads, each with its warm-up, on all servers."""

    def __init__(self, clients: dict[str, _Client], plan: Plan, progress: Progress) -> None:
        self._clients = clients
        self._plan = plan
        self._prompts = Prompts(plan.vocab_size, plan.seed)
        self._progress = progress

    async def run(self) -> dict[str, dict[str, Measured]]:
        rows: dict[str, dict[str, Measured]] = {}
        for workload in self._plan.workloads:
            self._progress(f"{workload}, warm-up", 0, 0)
            for client in self._clients.values():
                await self._warm_up(client, workload)
            for _ in followed(range(self._plan.rounds), f"{workload}, rounds", self._progress):
                for letter, client in self._clients.items():
                    for part, waves in (await self._run_round(client, workload)).items():
                        label = f"{workload}{part}"
                        measured = rows.setdefault(label, {}).setdefault(
                            letter, Measured(workload, self._plan.limits)
                        )
                        measured.waves.append(waves)
        return rows

    async def _warm_up(self, client: _Client, workload: Workload) -> None:
        n = workload.concurrency if self._plan.warm_up is None else self._plan.warm_up
        bodies = self._prompts.bodies(workload, n, client.extra)
        _require_one(client, await closed_loop(client.ask, bodies, workload.concurrency))

    async def _run_round(self, client: _Client, workload: Workload) -> dict[str, Round]:
        """A round's parts: all of it, or with a shared prefix the wave that finds it new and those that come later."""
        plan, concurrency = self._plan, workload.concurrency
        bodies = self._prompts.bodies(workload, plan.requests or 3 * concurrency, client.extra)
        if workload.shared_len:
            starts = range(0, len(bodies), concurrency)
            waves = [
                await closed_loop(client.ask, bodies[i : i + concurrency], concurrency)
                for i in starts
            ]
            parts = {" cold": waves[:1], " warm": waves[1:]}
        elif plan.rate is not None:
            parts = {"": [await open_loop(client.ask, bodies, plan.rate, self._prompts.generator)]}
        else:
            parts = {"": [await closed_loop(client.ask, bodies, concurrency)]}
        parts = {part: waves for part, waves in parts.items() if waves}
        for waves in parts.values():
            _require_one(client, list(chain(*waves)))
        return parts


def _require_one(client: _Client, answers: list[Answer]) -> None:
    """A server that answers nothing ends the benchmark, or one that hangs would stretch it by every timeout."""
    if answers and not good(answers):
        raise ServeBenchError(
            f"{client.target.url} answered none of {len(answers)} requests: {answers[0].error}"
        )

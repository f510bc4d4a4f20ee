"""Benchmarks over HTTP: workloads on one server, or on several in alternating rounds."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from numpy.random import Generator

from kvasir.loadtest.client import Answer, Client, Target
from kvasir.loadtest.load import Prompts, Workload, closed_loop, open_loop
from kvasir.loadtest.serve_figures import Limits, Measured, Round, ServeFigures, good
from kvasir.model.platform.progress import Progress, with_progress
from kvasir.server.process.local_server import serve_locally


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure."""

    address: str  # its URL, or a model directory to serve
    extra: dict[str, Any]  # fields of each request


@dataclass(frozen=True, slots=True)
class Plan:
    """Workloads, and the way to run each of them."""

    workloads: list[Workload]
    rounds: int
    requests: int | None  # in a round; by default as many as the workload says
    warm_up: int | None  # requests before the rounds; by default the concurrency
    rate: float | None  # requests a second of an open loop; None is a closed loop
    timeout: float  # seconds for a request
    vocab_size: int
    seed: int
    limits: Limits

    def __post_init__(self) -> None:
        if self.rate is not None and any(workload.shared_len for workload in self.workloads):
            reason = "a shared prefix is measured in waves, not at a rate"
            raise ValueError(f"{reason}; name workloads without one")


def bench_serve(
    servers: dict[str, Server], plan: Plan, api_key: str | None, progress: Progress
) -> ServeFigures:
    """Measure servers, which are named by letters.

    Raises ValueError for an invalid URL, ChildProcessError for a directory that cannot be served,
    and ConnectionError for a server that answers no request.
    """
    with ExitStack() as stack:
        loads = {}
        for letter, server in servers.items():
            url = server.address
            if "://" not in url:
                progress(f"starting {url}", 0, 0)
                url = stack.enter_context(serve_locally(Path(url)))
            loads[letter] = _Load(Client(Target(url, api_key), plan.timeout), server.extra, plan)
        rows = uvloop.run(_measure(loads, plan, progress))
    about = {letter: server.address for letter, server in servers.items()}
    names = ("rounds", "requests", "warm_up", "rate", "limits", "vocab_size", "seed")
    return ServeFigures(about | {name: getattr(plan, name) for name in names}, rows)


async def _measure(
    loads: dict[str, _Load], plan: Plan, progress: Progress
) -> dict[str, dict[str, Measured]]:
    """Run each workload on all servers, after a warm-up; return answers by workload and server."""
    rows: dict[str, dict[str, Measured]] = {}
    prompts = Prompts(plan.vocab_size, plan.seed)
    try:
        for workload in plan.workloads:
            progress(f"{workload}, warm-up", 0, 0)
            for load in loads.values():
                n = workload.concurrency if plan.warm_up is None else plan.warm_up
                await load.send(prompts.bodies(workload, n, load.extra), workload)
            for _ in with_progress(range(plan.rounds), f"{workload}, rounds", progress):
                for letter, load in loads.items():
                    for part, waves in (await load.run_round(workload, prompts)).items():
                        if waves:
                            row = rows.setdefault(f"{workload}{part}", {})
                            row.setdefault(letter, Measured(workload, plan.limits)).waves.append(
                                waves
                            )
    finally:
        for load in loads.values():  # within the event loop of their connections
            load.client.close()
    return rows


@dataclass(frozen=True, slots=True)
class _Load:
    """The requests to one server."""

    client: Client
    extra: dict[str, Any]
    plan: Plan

    async def run_round(self, workload: Workload, prompts: Prompts) -> dict[str, Round]:
        """Run a round and return its waves by part.

        A shared prefix makes two parts: the first wave computes it, the later ones find it cached.
        So does a mix: its short and its long prompts, by the server's counts of their tokens.
        """
        n, size = self.plan.requests or workload.n_requests, workload.concurrency
        bodies = prompts.bodies(workload, n, self.extra)
        if workload.mixed:
            parts: dict[str, list[Answer]] = {" short": [], " long": []}
            for answer in await self.send(bodies, workload, prompts.generator):
                is_long = (answer.usage or {}).get("prompt_tokens", 0) >= workload.input_len
                parts[" long" if is_long else " short"].append(answer)
            return {part: [answers] for part, answers in parts.items() if answers}
        if not workload.shared_len:
            return {"": [await self.send(bodies, workload, prompts.generator)]}
        starts = range(0, len(bodies), size)
        waves = [await self.send(bodies[i : i + size], workload) for i in starts]
        return {" cold": waves[:1], " warm": waves[1:]}

    async def send(
        self, bodies: list[bytes], workload: Workload, generator: Generator | None = None
    ) -> list[Answer]:
        """Send requests: in an open loop if there is a rate and a generator, else in a closed one.

        Raises ConnectionError if none succeeds: a hanging server would cost every timeout.
        """
        ask = partial(self.client.ask, route=workload.route)
        if self.plan.rate is not None and generator is not None:
            answers = await open_loop(ask, bodies, self.plan.rate, generator)
        else:
            answers = await closed_loop(ask, bodies, workload.concurrency)
        if answers and not good(answers):
            failed = f"{self.client.target.url} answered none of {len(answers)} requests"
            raise ConnectionError(f"{failed}: {answers[0].error}")
        return answers

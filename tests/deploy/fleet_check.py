"""Compare simulated fleets with real ones: python -m tests.deploy.fleet_check PICTURE [REPLICAS…]

Measures the step times of the example on one server with one thread, runs the same conversations on
one to three such servers and on paper, and prints both: shares of prompt tokens that were cached,
which must be equal, and tokens a second. Then simulates fleets of so many replicas, 1 to 1,000 by
default, and draws them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
from matplotlib.figure import Figure
from prometheus_client.parser import text_string_to_metric_families

from kvasir.loadtest.client import Client, Target
from kvasir.loadtest.fleet import ROUTERS, Mix, StepCosts, simulate
from tests.faults.server_process import ServerProcess

MIXES = {
    "own beginnings": Mix(),
    "7 beginnings of 512 tokens": Mix(n_turns=3, asked=48, beginning=512, n_beginnings=7),
}
PER_REPLICA, SIZES = 16, (1, 3, 10, 30, 100, 300, 1000)
MEMORY = "24MiB"
OPTIONS = ("--threads", "1", "--kv-cache-memory", MEMORY, "--no-speculate")
COLOURS = dict(zip(ROUTERS, ("#1b4965", "#e9a23b", "#b23a48"), strict=True))


class Figures(NamedTuple):
    """What a fleet did: shares of 1, new tokens a second, and seconds of 99 of 100 first tokens."""

    hit_rate: float
    tokens_per_second: float
    p99: float


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def metric(port: int, name: str) -> tuple[float, dict[str, str]]:
    """Return the value of a lone series of a server, and its labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    (sample,) = (one for family in families for one in family.samples if one.name == name)
    return sample.value, sample.labels


async def converse(ports: list[int], mix: Mix, router: str) -> Figures:
    """Run all conversations at once."""
    loop, waits = asyncio.get_running_loop(), list[float]()
    started, n_conversations = loop.time(), PER_REPLICA * len(ports)
    clients = [Client(Target(f"http://127.0.0.1:{port}"), 600) for port in ports]

    async def run(conversation: int) -> None:
        for turn in range(mix.n_turns):
            client = clients[ROUTERS[router](len(ports), conversation, turn)]
            body: dict[str, Any] = {"prompt": mix.prompt(conversation, turn), "ignore_eos": True}
            body |= {"max_tokens": mix.answered, "stream": True}
            answer = await client.ask(json.dumps(body).encode())
            assert answer.error is None, answer.error
            waits.append(answer.ttft)

    await asyncio.gather(*map(run, range(n_conversations)))
    seconds = loop.time() - started
    for client in clients:
        client.close()
    hits, asked = (
        sum(metric(port, f"kvasir_prefix_cache_{kind}_total")[0] for port in ports)
        for kind in ("hits", "queries")
    )
    n_tokens = n_conversations * mix.n_turns * mix.answered
    return Figures(hits / asked, n_tokens / seconds, float(np.percentile(waits, 99)))


def real(n_replicas: int, mix: Mix, router: str) -> tuple[Figures, StepCosts, int]:
    """Return the figures of new servers, the costs of their steps, and the blocks of a cache."""
    servers = [ServerProcess(0, *OPTIONS) for _ in range(n_replicas)]
    try:
        ports = [server.port for server in servers]
        figures = asyncio.run(converse(ports, mix, router))
        steps = []
        for port in ports:
            with urlopen(f"http://127.0.0.1:{port}/debug/steps") as response:
                steps.append(json.load(response)["steps"])
        blocks = metric(ports[0], "kvasir_cache_config_info")[1]["num_gpu_blocks"]
        return figures, fit(steps), int(blocks)
    finally:
        for server in servers:
            server.close()


def fit(servers: list[list[dict[str, Any]]]) -> StepCosts:
    """Return what steps cost by least squares, with what a server does until the next begins."""
    seconds = np.concatenate([-np.diff([step["ago"] for step in steps]) for steps in servers])
    work = [
        (1, len(step["streams"]), sum(prompt["tokens"] for prompt in step["prompts"]))
        for steps in servers
        for step in steps[:-1]
    ]
    costs = np.linalg.lstsq(np.array(work, dtype=float), seconds, rcond=None)[0]
    return StepCosts(*map(float, costs.clip(0)))


def simulated(mix: Mix, router: str, costs: StepCosts, n_replicas: int, n_blocks: int) -> Figures:
    found = simulate(mix, router, costs, n_replicas, PER_REPLICA, n_blocks)
    return Figures(found[0], found[1], float(np.percentile(found[2], 99)))


def compare() -> tuple[StepCosts, int]:
    """Print both for 1 to 3 replicas; return the costs of the fastest, and the size of the cache.

    On paper steps cost what they cost in the run that is compared, whatever else the machine did.
    """
    known: list[tuple[float, StepCosts]] = []
    for name, mix in MIXES.items():
        for router, n in product(ROUTERS, (1, 2, 3)):
            measured, costs, n_blocks = real(n, mix, router)
            paper = simulated(mix, router, costs, n, n_blocks)
            rates = f"hits {measured.hit_rate:.4f} {paper.hit_rate:.4f}"
            speeds = f"tokens/s {measured.tokens_per_second:.0f} {paper.tokens_per_second:.0f}"
            waits = f"p99 {measured.p99:.2f} {paper.p99:.2f} s"
            say(f"{name}, {router}, {n}: {rates}, {speeds}, {waits}")
            if mix.beginning == 0:
                assert measured.hit_rate == paper.hit_rate
            known += [(-measured.tokens_per_second, costs)] if n == 1 else []
    say(f"{min(known)[1]}, {n_blocks} blocks")
    return min(known)[1], n_blocks


def draw(found: dict[tuple[str, str, int], Figures], path: Path) -> None:
    """Draw four figures of fleets by their size."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panels: dict[str, Callable[[Figures, int], float]] = {
        "prompt tokens that were cached": lambda f, _: f.hit_rate,
        "new tokens a second and replica": lambda f, n: f.tokens_per_second / n,
        "p99 of the first token, s": lambda f, _: f.p99,
        "replica-hours for a million new tokens": lambda f, n: n * 1e6 / 3600 / f.tokens_per_second,
    }
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for (name, style), router in product(zip(MIXES, ("-", "--"), strict=True), ROUTERS):
            sizes = sorted(n for mix, which, n in found if (mix, which) == (name, router))
            values = [value(found[name, router, n], n) for n in sizes]
            label = f"{router}, {name}"
            axes.plot(sizes, values, style, color=COLOURS[router], marker="o", ms=3, label=label)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("replicas")
        axes.grid(alpha=0.3)
    lines, labels = axes.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


def main(picture: str, *sizes: str) -> None:
    with ProcessPoolExecutor(2) as pool:
        costs, n_blocks = compare()
        cells = [
            (name, router, n)
            for n in sorted(map(int, sizes or SIZES), reverse=True)
            for name in MIXES
            for router in ROUTERS
        ]
        work = [
            pool.submit(simulated, MIXES[name], router, costs, n, n_blocks)
            for name, router, n in cells
        ]
        found = {cell: one.result() for cell, one in zip(cells, work, strict=True)}
    for cell in reversed(cells):
        say(" ".join([*map(str, cell), *(f"{value:.4g}" for value in found[cell])]))
    draw(found, Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Ask for ten times what the server can answer: python -m tests.faults.goodput [MODEL_DIRECTORY]

In turn it measures the peak, with as many clients as sequences run at once, and then sends ten
times that rate as an open loop, each request with a deadline. Goodput is whole answers in time, a
second.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import typer
import uvloop

from kvasir.loadtest.client import Answer, Target, complete
from kvasir.loadtest.load import Prompts, Workload, closed_loop, open_loop
from kvasir.server.process.local_server import serve_locally
from tests.faults.server_process import EXAMPLE, Model

LEAST_GOODPUT = 0.9  # of the peak
_TIMES = 10
_DEADLINE = 4.0  # in times of an answer at the peak
_TIMEOUT = 60.0  # seconds for any request
_LATE = 1.1  # of the deadline: an answer also travels to the client, on a busy machine
_CUT = "cut by its deadline"
_ALLOWED = {"whole", "HTTP 429", "HTTP 504", _CUT}


@dataclass(slots=True)
class Overload:
    """The results of all rounds.

    peaks, goodputs: answers a second. lateness: of whole answers under overload, in deadlines.
    """

    target: Target
    workload: Workload
    prompts: Prompts = field(default_factory=lambda: Prompts(2048, seed=0))
    peaks: list[float] = field(default_factory=list)
    goodputs: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        """Return the goodput as a share of the peak."""
        return sum(self.goodputs) / sum(self.peaks)

    async def run_round(self, seconds: float) -> None:
        """Measure the peak for a third of the time, and overload the server for the rest."""
        await self._overload(2 * seconds / 3, _DEADLINE * await self._measure_peak(seconds / 3))

    async def _measure_peak(self, seconds: float) -> float:
        """Return the 99th percentile of the time of an answer."""
        size = self.workload.concurrency
        n = max(2 * size, round(seconds * self.peaks[-1])) if self.peaks else 2 * size
        bodies = self.prompts.bodies(self.workload, n, {})
        answers = await closed_loop(self._ask, bodies, size)
        self.peaks.append(_rate(answers, answers))
        return float(np.percentile([answer.e2e for answer in answers], 99))

    async def _overload(self, seconds: float, deadline: float) -> None:
        rate = _TIMES * self.peaks[-1]
        extra = {"timeout_ms": round(1000 * deadline)}
        bodies = self.prompts.bodies(self.workload, round(rate * seconds), extra)
        answers = await open_loop(self._ask, bodies, rate, self.prompts.generator)
        whole = [answer for answer in answers if self._end(answer) == "whole"]
        self.goodputs.append(_rate(whole, answers))
        self.lateness += [answer.e2e / deadline for answer in whole]
        self.ends += Counter(map(self._end, answers))

    async def _ask(self, body: bytes) -> Answer:
        return await complete(self.target, body, _TIMEOUT)

    def _end(self, answer: Answer) -> str:
        if answer.error:
            return answer.error.partition(":")[0]
        return "whole" if answer.n_tokens == self.workload.output_len else _CUT


def _rate(whole: list[Answer], answers: list[Answer]) -> float:
    """Return whole answers a second, from the first request to the last whole answer."""
    return len(whole) / (max(one.ended for one in whole) - min(one.sent for one in answers))


def main(
    model: Model = EXAMPLE,
    seconds: Annotated[float, typer.Option(help="Total time of overload.")] = 60.0,
    rounds: Annotated[int, typer.Option(help="Overloads, each after measuring the peak.")] = 4,
    sequences: Annotated[int, typer.Option(help="Simultaneous sequences.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 400,
) -> None:
    """Overload a server; exit code 1 if goodput falls, answers are late or requests end wrongly."""
    threads = max(1, (os.cpu_count() or 1) - 1)  # the clients need a processor of their own
    with serve_locally(model, "--max-num-seqs", str(sequences), "--threads", str(threads)) as url:
        workload = Workload(sequences, 32, tokens)
        uvloop.run(Overload(Target(url), workload).run_round(5.0))  # warm-up
        overload = Overload(Target(url), workload)
        for i in range(rounds):
            uvloop.run(overload.run_round(1.5 * seconds / rounds))
            rates = f"peak {overload.peaks[-1]:.1f} answers/s, goodput {overload.goodputs[-1]:.1f}"
            typer.echo(f"round {i + 1}: {rates}, {dict(overload.ends)} so far")
    late = float(np.percentile(overload.lateness, 99))
    typer.echo(f"{overload.ends.total()} requests: {dict(overload.ends.most_common())}")
    goodput = f"goodput {overload.goodput:.2f} of the peak, at least {LEAST_GOODPUT}"
    typer.echo(f"{goodput}; p99 {late:.2f} deadlines")
    is_wrong = overload.goodput < LEAST_GOODPUT or late > _LATE or overload.ends.keys() - _ALLOWED
    raise typer.Exit(int(bool(is_wrong)))


if __name__ == "__main__":
    typer.run(main)

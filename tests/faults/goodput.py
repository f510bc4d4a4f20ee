"""Ten times as many requests as the server can answer: python -m tests.faults.goodput [MODEL_DIRECTORY].

In turn its peak, with as many clients as sequences run at once; and ten times that rate, however many requests are
unanswered, each with a deadline. Goodput is whole answers in time, a second.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvloop

from loadtest.load import Prompts, Workload, closed_loop, open_loop
from loadtest.local_server import serve_locally
from loadtest.sse_client import StreamedCompletion, Target, complete

LEAST_GOODPUT = 0.9  # of the peak
_TIMES = 10
_PATIENCE = 4.0  # a deadline, in times of what an answer takes at the peak
_LATE = 1.1  # of the deadline: the answer's way to the client, on a machine that is full
_LIMIT = 60.0  # seconds for any request
_CUT = "cut by its deadline"
_ALLOWED = {"whole", "HTTP 429", "HTTP 504", _CUT}


@dataclass(slots=True)
class Overload:
    """What came of all rounds. peaks, goodputs: answers a second; lateness: of answers under overload, in deadlines."""

    target: Target
    workload: Workload
    prompts: Prompts = field(default_factory=lambda: Prompts(2048, seed=0))
    peaks: list[float] = field(default_factory=list)
    goodputs: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        """As a part of the peak."""
        return sum(self.goodputs) / sum(self.peaks)

    async def run_round(self, seconds: float) -> None:
        """A third of the time at the peak, the rest beyond it."""
        usual = await self._run_peak(seconds / 3)
        await self._run_beyond(2 * seconds / 3, _PATIENCE * usual)

    async def _ask(self, body: bytes) -> StreamedCompletion:
        return await complete(self.target, body, _LIMIT)

    async def _run_peak(self, seconds: float) -> float:
        """What an answer takes, at the 99th percentile."""
        size = self.workload.concurrency
        n = 2 * size if not self.peaks else max(2 * size, round(seconds * self.peaks[-1]))
        answers = await closed_loop(self._ask, self.prompts.bodies(self.workload, n, {}), size)
        self.peaks.append(_rate(answers, answers))
        return float(np.percentile([answer.e2e for answer in answers], 99))

    async def _run_beyond(self, seconds: float, deadline: float) -> None:
        rate = _TIMES * self.peaks[-1]
        extra = {"timeout_ms": round(1000 * deadline)}
        bodies = self.prompts.bodies(self.workload, round(rate * seconds), extra)
        answers = await open_loop(self._ask, bodies, rate, self.prompts.generator)
        whole = [answer for answer in answers if self._end(answer) == "whole"]
        self.goodputs.append(_rate(whole, answers))
        self.lateness += [answer.e2e / deadline for answer in whole]
        self.ends += Counter(map(self._end, answers))

    def _end(self, answer: StreamedCompletion) -> str:
        if answer.error:
            return answer.error.partition(":")[0]
        return "whole" if answer.n_tokens == self.workload.output_len else _CUT


def _rate(whole: list[StreamedCompletion], answers: list[StreamedCompletion]) -> float:
    """Whole answers a second, from the first request until the last of them."""
    return len(whole) / (
        max(answer.ended for answer in whole) - min(answer.sent for answer in answers)
    )


def main(
    model: Annotated[Path, typer.Argument(help="Model directory.")] = Path("examples/stdlib"),
    seconds: Annotated[float, typer.Option(help="How long it is overloaded in all.")] = 60.0,
    rounds: Annotated[
        int, typer.Option(help="Times that it is, with its peak measured before each.")
    ] = 4,
    sequences: Annotated[int, typer.Option(help="Sequences that run at once.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 400,
) -> None:
    """Exit code 1 where goodput falls, an answer is late, or a request ends neither whole, nor refused, nor in time."""
    threads = max(1, (os.cpu_count() or 1) - 1)  # the clients need a processor of their own
    with serve_locally(model, "--max-num-seqs", str(sequences), "--threads", str(threads)) as url:
        uvloop.run(
            Overload(Target(url), Workload(sequences, 32, tokens)).run_round(5.0)
        )  # to warm it up
        overload = Overload(Target(url), Workload(sequences, 32, tokens))
        for i in range(rounds):
            uvloop.run(overload.run_round(1.5 * seconds / rounds))
            peak, goodput = overload.peaks[-1], overload.goodputs[-1]
            typer.echo(
                f"round {i + 1}: peak {peak:.1f} answers/s, goodput {goodput:.1f}, {dict(overload.ends)} so far"
            )
    late = float(np.percentile(overload.lateness, 99))
    typer.echo(f"{overload.ends.total()} requests: {dict(overload.ends.most_common())}")
    typer.echo(
        f"goodput {overload.goodput:.2f} of the peak, at least {LEAST_GOODPUT}; p99 {late:.2f} deadlines"
    )
    raise typer.Exit(
        int(
            overload.goodput < LEAST_GOODPUT
            or late > _LATE
            or bool(overload.ends.keys() - _ALLOWED)
        )
    )


if __name__ == "__main__":
    typer.run(main)

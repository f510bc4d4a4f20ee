"""Ten times as many requests as the server can answer: python -m loadtest.overload [MODEL_DIRECTORY].

First its peak, with as many clients as sequences run at once; then requests arrive at ten times that rate, however many
are unanswered, each with a deadline. Goodput is whole answers in time, a second.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
import uvloop

from loadtest.load import Ask, Prompts, Workload, closed_loop, open_loop
from loadtest.local_server import serve_locally
from loadtest.sse_client import Answer, Target, complete

LEAST_GOODPUT = 0.9  # of the peak
_TIMES = 10
_PATIENCE = 4.0  # a deadline, in times of what an answer takes at the peak
_LATE = 1.1  # of the deadline: the answer's way to the client, on a machine that is full
_LIMIT = 60.0  # seconds for any request
_CUT = "cut by its deadline"
_ALLOWED = {"whole", "HTTP 429", "HTTP 504", _CUT}


def main(
    model: Annotated[Path, typer.Argument(help="Model directory.")] = Path("examples/stdlib"),
    seconds: Annotated[float, typer.Option(help="How long the overload lasts.")] = 60.0,
    sequences: Annotated[int, typer.Option(help="Sequences that run at once.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 400,
) -> None:
    """Exit code 1 where goodput falls, an answer is late, or a request ends neither whole, nor refused, nor in time."""
    workload, prompts = Workload(sequences, 32, tokens), Prompts(2048, seed=0)
    threads = max(1, (os.cpu_count() or 1) - 1)  # the clients need a processor of their own
    with serve_locally(model, "--max-num-seqs", str(sequences), "--threads", str(threads)) as url:
        target = Target(url)

        async def ask(body: bytes) -> Answer:
            return await complete(target, body, _LIMIT)

        uvloop.run(closed_loop(ask, prompts.bodies(workload, sequences, {}), sequences))
        peak, usual = uvloop.run(_peak(ask, prompts.bodies(workload, 12 * sequences, {}), sequences))
        deadline = _PATIENCE * usual
        typer.echo(f"peak: {peak:.1f} answers/s, p99 {usual:.2f} s; deadlines are {deadline:.2f} s")
        rate = _TIMES * peak
        bodies = prompts.bodies(workload, round(rate * seconds), {"timeout_ms": round(1000 * deadline)})
        started = perf_counter()
        answers = uvloop.run(open_loop(ask, bodies, rate, np.random.default_rng(0)))
        lasted = max(answer.sent for answer in answers) - started
    ends = Counter(_end(answer, tokens) for answer in answers)
    whole = [answer for answer in answers if _end(answer, tokens) == "whole"]
    goodput = sum(answer.ended - started <= lasted for answer in whole) / lasted / peak
    late = float(np.percentile([answer.e2e for answer in whole], 99)) / deadline if whole else np.inf
    typer.echo(f"{len(answers)} requests in {lasted:.0f} s: {', '.join(f'{n} {end}' for end, n in ends.most_common())}")
    typer.echo(
        f"goodput {goodput:.2f} of the peak, to be at least {LEAST_GOODPUT}; p99 of answers {late:.2f} deadlines"
    )
    raise typer.Exit(int(goodput < LEAST_GOODPUT or late > _LATE or bool(ends.keys() - _ALLOWED)))


async def _peak(ask: Ask, bodies: list[bytes], concurrency: int) -> tuple[float, float]:
    """Answers a second, and the 99th percentile of what one takes."""
    started = perf_counter()
    answers = await closed_loop(ask, bodies, concurrency)
    return len(answers) / (perf_counter() - started), float(np.percentile([answer.e2e for answer in answers], 99))


def _end(answer: Answer, n_tokens: int) -> str:
    if answer.error:
        return answer.error.partition(":")[0]
    return "whole" if answer.n_tokens == n_tokens else _CUT


if __name__ == "__main__":
    typer.run(main)

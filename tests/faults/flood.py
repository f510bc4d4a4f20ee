"""What a flood of invalid requests costs running streams: python -m tests.faults.flood [MODEL_DIRECTORY].

In turn it hits the server that streams, and a trivial one beside it that only says 400: A B A B. Both keep the same
processors busy with sockets, so the ratio is what the server itself does with an invalid request.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvloop

from loadtest.load import Prompts, Workload, closed_loop, open_loop
from loadtest.local_server import serve_locally
from loadtest.sse_client import StreamedCompletion, Target, complete

GOAL = 1.15

_TRIVIAL = """
import socket, uvicorn
async def app(scope, receive, send):
    while (await receive()).get("more_body"): pass
    await send({"type": "http.response.start", "status": 400, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})
listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", access_log=False)).run([listener])
"""
_INVALID = [
    b"{",
    b"\xff\xfe\0",
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "max_tokens": "many"}',
    b'{"prompt": "a", "surprise": 1}',
    b'{"prompt": [[1, 2], "a"]}',
    b'{"prompt": "a", "max_tokens": 1000000}',
    json.dumps({"prompt": "a", "stop": ["x"] * 100}).encode(),
]
_LIMIT = 60.0  # seconds for any request


@contextmanager
def trivial_server() -> Iterator[str]:
    """Its URL: uvicorn, and one line of an application."""
    with subprocess.Popen(
        [sys.executable, "-c", _TRIVIAL], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


class Flood:
    """Invalid requests, `rate` of them a second, until it is cancelled; `n_refused` have been told so."""

    def __init__(self, target: Target, rate: float) -> None:
        self.n_refused = 0
        self._target, self._rate = target, rate

    async def run(self) -> None:
        """Raises RuntimeError when one of them is not refused."""
        for seed in range(sys.maxsize):
            bodies = list(islice(cycle(_INVALID), round(self._rate)))
            await open_loop(self._ask, bodies, self._rate, np.random.default_rng(seed))

    async def _ask(self, body: bytes) -> StreamedCompletion:
        answer = await complete(self._target, body, _LIMIT)
        if not (answer.error or "").startswith("HTTP 400"):
            raise RuntimeError(f"an invalid request got {answer.error or 'an answer'}")
        self.n_refused += 1
        return answer


async def stream_under(
    flood: Flood, streams: Target, bodies: list[bytes], concurrency: int
) -> list[float]:
    """Gaps between the tokens of all streams, in seconds, while the flood lasts. RuntimeError for one that fails."""
    flooding = asyncio.ensure_future(flood.run())
    answers = await closed_loop(lambda body: complete(streams, body, _LIMIT), bodies, concurrency)
    if flooding.done():
        flooding.result()
    flooding.cancel()
    if failed := next((answer.error for answer in answers if answer.error), None):
        raise RuntimeError(f"a stream failed: {failed}")
    return [gap for answer in answers for gap in answer.gaps]


def main(
    model: Annotated[Path, typer.Argument(help="Model directory.")] = Path("examples/stdlib"),
    streams: Annotated[int, typer.Option(help="Streams that run at once.")] = 32,
    rate: Annotated[float, typer.Option(help="Invalid requests a second.")] = 200.0,
    rounds: Annotated[int, typer.Option(help="Times that each server is flooded.")] = 16,
    requests: Annotated[int, typer.Option(help="Streams in a round.")] = 64,
) -> None:
    """Flood the server and a trivial one in turn; exit code 1 where the ratio of 99th percentiles is over the goal."""
    prompts = Prompts(2048, seed=0)
    workload = Workload(streams, 32, 256)
    highs: dict[str, list[float]] = {"server": [], "trivial": []}
    with serve_locally(model, "--max-num-seqs", str(streams)) as url, trivial_server() as beside:
        flooded = {"server": Target(url), "trivial": Target(beside)}
        for i in range(rounds):
            for name in sorted(flooded, reverse=i % 2 == 0):  # neither is always the first
                flood = Flood(flooded[name], rate)
                bodies = prompts.bodies(workload, requests, {})
                gaps = uvloop.run(stream_under(flood, Target(url), bodies, streams))
                middle, high = np.percentile(gaps, (50, 99)) * 1000
                highs[name].append(float(high))
                figures = (
                    f"inter-token p50 {middle:.2f} ms, p99 {high:.2f} ms over {len(gaps)} gaps"
                )
                typer.echo(f"round {i + 1}, {name} refused {flood.n_refused}: {figures}")
    for name, high_of in highs.items():
        typer.echo(
            f"{name:8} flooded at {rate:g}/s: median of the rounds' p99 {np.median(high_of):.2f} ms"
        )
    ratio = float(np.median(highs["server"]) / np.median(highs["trivial"]))
    typer.echo(f"ratio: {ratio:.3f}, to be at most {GOAL}")
    raise typer.Exit(int(ratio > GOAL))


if __name__ == "__main__":
    typer.run(main)

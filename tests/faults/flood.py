"""Flood a server with invalid requests beside streams: python -m tests.faults.flood [DIRECTORY]

The flood hits the server that streams, and in alternation a trivial server beside it that only
answers 400. Both keep the same processors busy with sockets, so the ratio shows the work of the
server itself on an invalid request.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Annotated

import numpy as np
import typer
import uvloop

from loadtest.load import Prompts, Workload, closed_loop, open_loop
from loadtest.sse_client import StreamedCompletion, Target
from server.process.local_server import serve_locally
from tests.faults.probe import EXAMPLE, Model, asking

GOAL = 1.15

_TRIVIAL = """
import socket, uvicorn
async def app(scope, receive, send):
    while (await receive()).get("more_body"): pass
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body"})
listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(listener.getsockname()[1], flush=True)
config = uvicorn.Config(app, lifespan="off", log_level="critical", access_log=False)
uvicorn.Server(config).run([listener])
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


@contextmanager
def trivial_server() -> Iterator[str]:
    """Run uvicorn with a trivial application, and yield its URL."""
    command = [sys.executable, "-c", _TRIVIAL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


class Flood:
    """Invalid requests at a rate until it is cancelled.

    n_refused: those that were answered with 400.
    """

    def __init__(self, target: Target, rate: float) -> None:
        self.n_refused = 0
        self._ask, self._rate = asking(target), rate

    async def send(self) -> None:
        """Send requests. Raises RuntimeError when one is not refused."""
        for seed in range(sys.maxsize):
            bodies = list(islice(cycle(_INVALID), round(self._rate)))
            await open_loop(self._send_one, bodies, self._rate, np.random.default_rng(seed))

    async def _send_one(self, body: bytes) -> StreamedCompletion:
        answer = await self._ask(body)
        if not (answer.error or "").startswith("HTTP 400"):
            raise RuntimeError(f"an invalid request got {answer.error or 'an answer'}")
        self.n_refused += 1
        return answer


async def stream_under(
    flood: Flood, streams: Target, bodies: list[bytes], concurrency: int
) -> list[float]:
    """Return the gaps in seconds between tokens of streams during a flood.

    Raises RuntimeError if one fails.
    """
    flooding = asyncio.ensure_future(flood.send())
    answers = await closed_loop(asking(streams), bodies, concurrency)
    if flooding.done():
        flooding.result()
    flooding.cancel()
    if failed := next((answer.error for answer in answers if answer.error), None):
        raise RuntimeError(f"a stream failed: {failed}")
    return [gap for answer in answers for gap in answer.gaps]


def main(
    model: Model = EXAMPLE,
    streams: Annotated[int, typer.Option(help="Simultaneous streams.")] = 32,
    rate: Annotated[float, typer.Option(help="Invalid requests a second.")] = 200.0,
    rounds: Annotated[int, typer.Option(help="Floods of each server.")] = 16,
    requests: Annotated[int, typer.Option(help="Streams in a round.")] = 64,
) -> None:
    """Flood the server and a trivial one in turn; exit code 1 if the ratio misses the goal."""
    prompts = Prompts(2048, seed=0)
    workload = Workload(streams, 32, 256)
    highs: dict[str, list[float]] = {"server": [], "trivial": []}
    with serve_locally(model, "--max-num-seqs", str(streams)) as url, trivial_server() as beside:
        flooded = {"server": Target(url), "trivial": Target(beside)}
        for i in range(rounds):
            for name in sorted(flooded, reverse=i % 2 == 0):  # alternate the first one
                flood = Flood(flooded[name], rate)
                bodies = prompts.bodies(workload, requests, {})
                gaps = uvloop.run(stream_under(flood, Target(url), bodies, streams))
                middle, high = np.percentile(gaps, (50, 99)) * 1000
                highs[name].append(float(high))
                times = f"p50 {middle:.2f} ms, p99 {high:.2f} ms over {len(gaps)} gaps"
                title = f"round {i + 1}, {name} refused {flood.n_refused}"
                typer.echo(f"{title}: inter-token {times}")
    medians = {name: float(np.median(values)) for name, values in highs.items()}
    for name, value in medians.items():
        typer.echo(f"{name:8} flooded at {rate:g}/s: median p99 of the rounds {value:.2f} ms")
    ratio = medians["server"] / medians["trivial"]
    typer.echo(f"ratio: {ratio:.3f}; the goal is at most {GOAL}")
    raise typer.Exit(int(ratio > GOAL))


if __name__ == "__main__":
    typer.run(main)

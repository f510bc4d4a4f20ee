"""Ordinary clients beside an attack: two steady streams, and a prober of the server's liveness.

python -m tests.faults.watch PORT KEY PAUSE answers each line on standard input, `begin`, `report`
or `end`, with what it has seen since the last, the first once both streams have begun. It is a
process of its own, so that the attackers' work does not delay it. PAUSE: seconds between streams.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, field
from time import perf_counter

from kvasir.loadtest.client import Answer, Target

_PAUSE = 0.05  # seconds between probes, and after a stream that was refused
_TICK = 0.005
_LIMIT = 120.0  # seconds for a probe and a stream
_FIRST = -6  # of priorities: a stream waits behind nobody
_FIELDS = {
    "model": "fake-model", "prompt": "a",
    "max_tokens": 1000, "ignore_eos": True, "stream": True, "priority": _FIRST,
    "temperature": 0, "logit_bias": {"66": 100},  # text in every event
}  # fmt: skip


@dataclass(slots=True)
class Seen:
    """Longest times in seconds: between tokens of a stream, of a probe, and by which the
    machine woke this process too late. streamed: seconds of both streams together.
    """

    gap: float = 0.0
    probe: float = 0.0
    machine: float = 0.0
    streamed: float = 0.0
    n_gaps: int = 0
    errors: list[str] = field(default_factory=list)


class _Watch:
    def __init__(self, target: Target, pause: float) -> None:
        self._target, self._request = target, json.dumps(_FIELDS).encode()
        self._pause = pause
        self.seen = Seen()
        self.begun = asyncio.Semaphore(0)
        self._last: dict[int, float] = {}  # the time of the last token of each running stream
        self._probed = 0.0  # the time since which a probe has waited; 0 without one

    def report(self) -> Seen:
        """Return what was seen since the last report; what goes on counts with its time so far."""
        now = perf_counter()
        for i, last in self._last.items():
            self._note_gap(now - last)
            self._last[i] = now
        if self._probed:
            self.seen.probe = max(self.seen.probe, now - self._probed)
        seen, self.seen = self.seen, Seen()
        return seen

    def _note_gap(self, seconds: float) -> None:
        self.seen.n_gaps += 1
        self.seen.streamed += seconds
        self.seen.gap = max(self.seen.gap, seconds)

    async def stream(self, i: int) -> None:
        """Stream again and again."""
        while True:
            answer = Answer()
            try:
                async with asyncio.timeout(_LIMIT):
                    await self._read(i, answer)
            except (OSError, TimeoutError) as error:
                answer.fail(repr(error))
            self._last.pop(i, None)
            was_refused = not answer.event_times
            if not (answer.ended or was_refused):
                self.seen.errors.append(f"a stream broke off: {answer.error}")
            await asyncio.sleep(_PAUSE if was_refused else self._pause)

    async def _read(self, i: int, answer: Answer) -> None:
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            writer.write(self._target.request(self._request))
            while piece := await reader.read(2**16):
                n_before, now = len(answer.event_times), perf_counter()
                answer.feed(piece, now)
                if len(answer.event_times) == n_before:
                    continue
                if i in self._last:
                    self._note_gap(now - self._last[i])
                else:
                    self.begun.release()
                self._last[i] = now
        finally:
            writer.close()

    async def probe(self) -> None:
        """Ask for the server's liveness again and again."""
        request = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        while True:
            self._probed, answer = perf_counter(), b""
            try:
                async with asyncio.timeout(_LIMIT):
                    reader, writer = await asyncio.open_connection(
                        self._target.host, self._target.port
                    )
                    writer.write(request)
                    answer = await reader.read(2**16)
                    writer.close()
            except (OSError, TimeoutError) as error:
                answer = repr(error).encode()
            self.seen.probe = max(self.seen.probe, perf_counter() - self._probed)
            self._probed = 0.0
            if not answer.startswith(b"HTTP/1.1 200 "):
                self.seen.errors.append(f"a probe got {answer[:100]!r}")
            await asyncio.sleep(_PAUSE)

    async def tick(self) -> None:
        """Note how late the machine wakes a process, whatever the server does."""
        while True:
            started = perf_counter()
            await asyncio.sleep(_TICK)
            self.seen.machine = max(self.seen.machine, perf_counter() - started - _TICK)


async def _main(port: str, key: str, pause: str) -> None:
    watch = _Watch(Target(f"http://127.0.0.1:{port}", key), float(pause))
    tasks = set[asyncio.Task[None]]()
    while line := await asyncio.to_thread(sys.stdin.readline):
        if "begin" in line:
            works = (watch.stream(0), watch.stream(1), watch.probe(), watch.tick())
            tasks = {asyncio.create_task(work) for work in works}
            for _ in range(2):
                await watch.begun.acquire()
            watch.report()
        elif "end" in line:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        print(json.dumps(asdict(watch.report())), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))

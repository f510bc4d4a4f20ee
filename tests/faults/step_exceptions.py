"""An exception at any line of a step: every request ends, and the server is unhealthy.

There is no canary: the first exception ends its stream too, and tracing makes each step slow.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import httpx

import kvasir.server.engine
import kvasir.server.requests.async_engine
from kvasir.server.requests.async_engine import AsyncEngine
from tests.faults.report import Report
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import VOCAB_SIZE, Served, serving

Line = tuple[str, str, int]  # file, function, line

_ENGINE = str(Path(kvasir.server.engine.__file__ or "").parent)
_ASYNC_ENGINE = kvasir.server.requests.async_engine.__file__
_STEP = ("_step", "_commands", "_hand_out", "_record_end", "abort")

# Requests that run when the exception is raised, with most of what a step handles.
_BODIES: list[dict[str, Any]] = [
    {"max_tokens": 9, "stream": True, "temperature": 0},
    {"max_tokens": 3, "n": 2, "logprobs": 2, "echo": True},
    {"max_tokens": 6, "prompt": "a a a a a a", "top_k": 5, "min_p": 0.1, "min_tokens": 2}
    | {"repetition_penalty": 1.2},
    {"max_tokens": 0, "echo": True, "logprobs": 0, "prompt": "def read_json(path):"},
    {"max_tokens": 9, "regex": "[a-z]{2,5}", "ignore_eos": False},
    {"max_tokens": 9, "stream": True, "logit_bias": {"5": 1}, "top_p": 0.5, "typical_p": 0.5}
    | {"timeout_ms": 1},
]


class InjectedError(Exception):
    """The fault."""


class Tracer:
    """A counter of the lines of steps, which raises when a line is reached for the n-th time."""

    def __init__(self, line: Line | None = None, nth: int = 1) -> None:
        self.hits: Counter[Line] = Counter()
        self.has_raised = False
        self.ends_all = False  # which an error does not while a sequence is being added
        self._line, self._nth = line, nth

    def install(self, engine: AsyncEngine) -> None:
        """Trace the engine's thread, and the event loop while it hands out tokens."""
        step, hand_out = engine._step, engine._hand_out

        def traced(function: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                sys.settrace(self._on_call)
                try:
                    function(*arguments)
                finally:
                    sys.settrace(None)

            return call

        engine._step = traced(step)  # type: ignore[method-assign]
        engine._hand_out = traced(hand_out)  # type: ignore[method-assign]

    def _on_call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        of_step = code.co_filename == _ASYNC_ENGINE and code.co_name in _STEP
        return self._on_line if of_step or code.co_filename.startswith(_ENGINE) else None

    def _on_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and not self.has_raised:
            line = (frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno)
            self.hits[line] += 1
            if line == self._line and self.hits[line] == self._nth:
                self.has_raised = True
                callers = (caller.f_code.co_name for caller, _ in walk_stack(frame))
                self.ends_all = "_ended" not in callers
                raise InjectedError
        return self._on_line


def step_exceptions(n: int, seed: int = 0) -> Report:
    """Raise at n different lines of steps, or at all, each at some time that it is reached."""
    report = Report("exceptions in a step")
    every = Tracer()
    report.lost += asyncio.run(_serve(every))
    chance = random.Random(seed)
    lines = sorted(every.hits)
    for line in chance.sample(lines, min(n, len(lines))):
        tracer = Tracer(line, chance.randint(1, 1 + every.hits[line] // 2))
        wrong = asyncio.run(_serve(tracer))
        report.tried += tracer.has_raised
        report.check(not wrong, f"{Path(line[0]).name}:{line[2]} in {line[1]}: {'; '.join(wrong)}")
    report.note = f"of {len(lines)} lines"
    return report


async def _serve(tracer: Tracer) -> list[str]:
    """Return what is wrong after a few requests, during which the tracer may raise."""
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=3)
    async with serving(runner, cache_bytes=2**12, speculate=True, max_queue=100) as served:
        # Skip the process that tries grammars first.
        served.model.grammars._trial.check = lambda grammar: ""  # type: ignore[method-assign]  # noqa: ARG005
        await _post(
            served, _BODIES[0]
        )  # only then does the engine's thread look up the traced functions
        tracer.install(served.model.engine)
        try:
            async with asyncio.timeout(TIMEOUT):
                answers = await asyncio.gather(
                    *(_post(served, body) for body in _BODIES), _disconnect(served)
                )
        except TimeoutError:
            return ["a request hangs"]
        whole = [answer for answer in answers if answer]
        wrong = [
            f"{answer.status_code} {answer.text[-200:]}"
            for answer in whole
            if not _has_ended(answer)
        ]
        if served.model.admission.n_inside:
            wrong.append("places are still held")
    engine = served.model.engine
    if engine.is_healthy is tracer.ends_all:
        wrong.append(f"the engine's health is {engine.is_healthy}")
    if engine.is_running:
        wrong.append("the engine's thread does not end")
    return wrong


async def _post(served: Served, body: dict[str, Any]) -> httpx.Response:
    return await served.client.post(
        "/v1/completions", json={"prompt": "def a", "seed": 1, "ignore_eos": True} | body
    )


async def _disconnect(served: Served) -> None:
    """Disconnect as soon as the engine has the request."""
    sending = asyncio.create_task(_post(served, {"max_tokens": 30}))
    submitted = asyncio.create_task(served.submitted.acquire())
    await asyncio.wait((sending, submitted), return_when=asyncio.FIRST_COMPLETED)
    submitted.cancel()
    sending.cancel()
    await asyncio.wait((sending,))


def _has_ended(answer: httpx.Response) -> bool:
    if answer.headers["content-type"].startswith("text/event-stream"):
        return answer.text.endswith("data: [DONE]\n\n")
    return answer.status_code in (200, 429, 504) or (
        answer.status_code == 500 and "internal_error" in answer.text
    )

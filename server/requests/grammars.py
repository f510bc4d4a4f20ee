"""Grammars compiled off the event loop, for requests that wait for it only so long.

What is not known yet waits for its trial, one grammar at a time; what is known does not wait for that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import TypeVar

from model.bundle import ModelBundle
from server.engine.grammar.constraints import (
    Constraint,
    Grammar,
    GrammarCompiler,
    GrammarError,
    check_size,
)
from server.engine.grammar.trial import GrammarTrial, TrialEndedError
from server.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from server.requests.completion import CompletionRequest

T = TypeVar("T")

_KNOWN = 64  # grammars that were found good, and as many that were refused: clients send the same ones again
_MOST_WAITING = 64  # requests, for a trial or to be compiled
_WAIT_SECONDS = 10.0


class Grammars:
    """For one model. Close it: a process belongs to it, once there has been a grammar."""

    def __init__(self, bundle: ModelBundle) -> None:
        self._bundle = bundle
        self._trials = _Worker("grammar-trials")
        self._compilations = _Worker("grammars")
        self._verdicts = _Verdicts()

    async def constraint(self, request: CompletionRequest) -> Constraint | None:
        """A request's grammar, to be copied for each of its texts; None without one.

        Raises InvalidRequestError for a grammar that cannot be held, OverloadedError where too many are compiled,
        DeadlineExceededError where that takes too long.
        """
        grammar = request.grammar
        if grammar is None:
            return None
        _check_params(request)
        left = request.demand.own.left
        try:
            async with asyncio.timeout(min(_WAIT_SECONDS, left)):
                return await self._begin(grammar)
        except GrammarError as error:
            raise InvalidRequestError(f"{grammar.param}: {error}", param=grammar.param) from None
        except TimeoutError:
            if left > _WAIT_SECONDS:
                raise _busy() from None
            raise DeadlineExceededError(
                f"the deadline passed while the grammar of {grammar.param} waited; allow more time, or try later"
            ) from None

    def close(self) -> None:
        self._trials.close()
        self._compilations.close()
        if "_trial" in vars(self):
            self._trial.close()

    async def _begin(self, grammar: Grammar) -> Constraint:
        """Raises GrammarError."""
        check_size(grammar)
        verdict = self._verdicts.of(grammar)
        if verdict is None:
            verdict = await self._trials.run(self._try, grammar)
        if verdict:
            raise GrammarError(verdict)
        return await self._compilations.run(self._compile, grammar)

    def _try(self, grammar: Grammar) -> str:
        verdict = self._verdicts.of(grammar)  # of its twin, which waited before it
        if verdict is None:
            verdict = ""
            try:
                self._trial.check(grammar)
            except TrialEndedError:
                raise
            except GrammarError as error:
                verdict = str(error)
            self._verdicts.add(grammar, verdict)
        return verdict

    def _compile(self, grammar: Grammar) -> Constraint:
        return self._compiler.compile(grammar)

    @cached_property
    def _tokens(self) -> tuple[str, int, tuple[int, ...]]:
        config = self._bundle.config
        return self._bundle.tokenizer.to_str(), config.vocab_size, config.eos_token_ids

    @cached_property
    def _trial(self) -> GrammarTrial:
        return GrammarTrial(*self._tokens)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(*self._tokens)


class _Worker:
    """A thread, and those who wait for it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._n_waiting = 0

    async def run(self, work: Callable[[Grammar], T], grammar: Grammar) -> T:
        """Raises what the work does, or OverloadedError. Who is cancelled while it waits leaves the queue."""
        if self._n_waiting >= _MOST_WAITING:
            raise _busy()
        self._n_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, grammar)
        finally:
            self._n_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class _Verdicts:
    """What is wrong with the latest grammars, "" where nothing is. Those that are refused push no good ones out."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._good: OrderedDict[Grammar, str] = OrderedDict()
        self._refused: OrderedDict[Grammar, str] = OrderedDict()

    def of(self, grammar: Grammar) -> str | None:
        with self._lock:
            for latest in (self._good, self._refused):
                if grammar in latest:
                    latest.move_to_end(grammar)
                    return latest[grammar]
        return None

    def add(self, grammar: Grammar, verdict: str) -> None:
        with self._lock:
            latest = self._refused if verdict else self._good
            latest[grammar] = verdict
            if len(latest) > _KNOWN:
                latest.popitem(last=False)


def _busy() -> OverloadedError:
    return OverloadedError("too many grammars are being compiled; try again", retry_after=1)


def _check_params(request: CompletionRequest) -> None:
    """A grammar says where the text may end, so nothing else may forbid it there."""
    assert request.grammar is not None
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request.params, name):
            raise InvalidRequestError(
                f"{name} cannot be combined with {request.grammar.param}, which says where the text may end",
                param=name,
            )

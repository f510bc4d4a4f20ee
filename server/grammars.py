"""Grammars compiled off the event loop, one at a time, for requests that wait for it only so long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache

from model.bundle import ModelBundle
from server.completion import CompletionRequest
from server.engine.constraints import Constraint, Grammar, GrammarCompiler, GrammarError
from server.engine.grammar_trial import GrammarTrial
from server.errors import InvalidRequestError, OverloadedError

_KNOWN = 64  # grammars that were found good: clients send the same ones again
_MOST_WAITING = 64  # requests
_WAIT_SECONDS = 10.0


class Grammars:
    """For one model. Close it: a process belongs to it, once there has been a grammar."""

    def __init__(self, bundle: ModelBundle) -> None:
        self._bundle = bundle
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._n_waiting = 0

    async def constraint(self, request: CompletionRequest) -> Constraint | None:
        """A request's grammar, to be copied for each of its texts; None without one.

        Raises InvalidRequestError for a grammar that cannot be held, OverloadedError where too many are compiled.
        """
        grammar = request.grammar
        if grammar is None:
            return None
        _check_params(request)
        busy = OverloadedError("too many grammars are being compiled; try again", retry_after=1)
        if self._n_waiting >= _MOST_WAITING:
            raise busy
        self._n_waiting += 1
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
        except GrammarError as error:
            raise InvalidRequestError(f"{grammar.param}: {error}", param=grammar.param) from None
        except TimeoutError:
            raise busy from None
        finally:
            self._n_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if "_trial" in vars(self):
            self._trial.close()

    def _compile(self, grammar: Grammar) -> Constraint:
        self._check(grammar)
        return self._compiler.compile(grammar)

    @cached_property
    def _tokens(self) -> tuple[str, int, tuple[int, ...]]:
        config = self._bundle.config
        return self._bundle.tokenizer.to_str(), config.vocab_size, config.eos_token_ids

    @cached_property
    def _trial(self) -> GrammarTrial:
        return GrammarTrial(*self._tokens)

    @cached_property
    def _check(self) -> Callable[[Grammar], None]:
        return lru_cache(_KNOWN)(self._trial.check)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(*self._tokens)


def _check_params(request: CompletionRequest) -> None:
    """A grammar says where the text may end, so nothing else may forbid it there."""
    assert request.grammar is not None
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request.params, name):
            raise InvalidRequestError(
                f"{name} cannot be combined with {request.grammar.param}, which says where the text may end", param=name
            )

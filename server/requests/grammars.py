"""Grammars compiled off the event loop.

An unknown grammar is tried first, in a process with limits on time and memory, one at a time. A
known one does not wait for that.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from kvasir.model.directory import ModelDirectory
from kvasir.server.engine.grammar.constraints import Constraint, Grammar, GrammarError
from kvasir.server.errors import DeadlineExceededError, InvalidRequestError, UnavailableError
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.text_worker import BoundedThreads

if TYPE_CHECKING:
    from kvasir.server.engine.grammar.compiler import GrammarCompiler
    from kvasir.server.engine.grammar.trial import GrammarTrial

_KNOWN = 64  # good grammars, and as many refused ones, that are remembered: clients repeat theirs
_MOST_WAITING = 64  # requests that wait for a trial, and as many whose grammars are compiled
_WAIT_SECONDS = 60.0  # on an idle machine a full queue of the slowest trials takes half of it


class Grammars:
    """The grammars of one model's requests. It must be closed, to end the process of its trials."""

    def __init__(self, model_dir: ModelDirectory) -> None:
        self._model_dir = model_dir
        full = f"{_MOST_WAITING} grammars already wait to be compiled"
        self._trials = BoundedThreads(1, "grammar-trials", _MOST_WAITING, full)
        self._compilations = BoundedThreads(1, "grammars", _MOST_WAITING, full)
        # The errors of the latest grammars, "" for good ones. Refused ones displace no good ones.
        self._lock = Lock()
        self._good: OrderedDict[Grammar, str] = OrderedDict()
        self._refused: OrderedDict[Grammar, str] = OrderedDict()

    def warm_up(self) -> None:
        """Start to read the tokens, here and in the trials' process. The first grammar waits."""

        def start() -> None:
            self._trial.start()
            self._compilations.submit(lambda: self._compiler.tokens)

        self._trials.submit(start)

    async def constraint(self, request: CompletionRequest) -> Constraint | None:
        """Compile a request's grammar, to be copied for each of its texts; None without one.

        Raises InvalidRequestError for a grammar that cannot be compiled, OverloadedError when too
        many wait, UnavailableError when the server is too slow or the process of the trials ends,
        and DeadlineExceededError when the request's deadline passes first.
        """
        grammar = request.grammar
        if grammar is None:
            return None
        param = grammar.param
        for name in ("ignore_eos", "min_tokens"):
            if getattr(request.params, name):
                raise InvalidRequestError(
                    f"{name} cannot be combined with {param}, which says where the text may end",
                    param=name,
                )
        seconds_left = request.work.seconds_left
        try:
            async with asyncio.timeout(min(_WAIT_SECONDS, seconds_left)):
                grammar.check_size()
                error = self._known_error(grammar)
                if error is None:
                    error = await self._trials.run(lambda: self._try(grammar))
                if error:
                    raise GrammarError(error)
                return await self._compilations.run(lambda: self._compiler.compile(grammar))
        except GrammarError as error:
            raise InvalidRequestError(f"{param}: {error}", param=param) from None
        except TimeoutError:
            if seconds_left > _WAIT_SECONDS:
                raise UnavailableError(
                    f"{param} was not compiled within {_WAIT_SECONDS:g} s; try again", retry_after=1
                ) from None
            raise DeadlineExceededError(
                f"the deadline passed while the grammar of {param} waited; allow more time, or "
                "try later"
            ) from None
        except OSError as error:
            raise UnavailableError(f"{param}: {error}; try again", retry_after=1) from None

    def close(self) -> None:
        """End the threads, and the process of the trials."""
        self._trials.shutdown(cancel_futures=True)
        self._compilations.shutdown(cancel_futures=True)
        if "_trial" in vars(self):
            self._trial.close()

    def _known_error(self, grammar: Grammar) -> str | None:
        with self._lock:
            for latest in (self._good, self._refused):
                if grammar in latest:
                    latest.move_to_end(grammar)
                    return latest[grammar]
        return None

    # In the threads

    def _try(self, grammar: Grammar) -> str:
        """Return a grammar's error, "" for a good one. Raises OSError without a verdict."""
        error = self._known_error(grammar)  # an equal grammar may have been tried just before
        if error is None:
            error = self._trial.check(grammar)
            with self._lock:
                latest = self._refused if error else self._good
                latest[grammar] = error
                if len(latest) > _KNOWN:
                    latest.popitem(last=False)
        return error

    @cached_property
    def _trial(self) -> GrammarTrial:
        from kvasir.server.engine.grammar.trial import GrammarTrial  # noqa: PLC0415  llguidance

        config = self._model_dir.config
        tokenizer = json.loads(self._model_dir.tokenizer.to_str())
        if "merges" in tokenizer["model"]:  # grammars need none; reading them takes half the time
            tokenizer["model"]["merges"] = []
        return GrammarTrial(json.dumps(tokenizer), config.vocab_size, config.eos_token_ids)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        from kvasir.server.engine.grammar.compiler import GrammarCompiler  # noqa: PLC0415  llguidance

        return GrammarCompiler(*self._trial.model)  # each grammar has been tried first

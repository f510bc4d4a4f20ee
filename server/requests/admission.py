"""The door: what can never fit is refused, what would wait too long is turned away with a time to come back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

from server.engine.engine import Engine
from server.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnavailableError
from server.requests.forecast import OPTIMISM, Backlog, Forecast, Work

PATIENCE = 1.25  # of what it needs must be left to one that waits: less, and its tokens would be too late for anyone
_LONGEST_RETRY = 60  # seconds
_LOADING_RETRY = 5  # seconds


class Phase(Enum):
    LOADING = "the model is still loading"
    READY = "ready"
    DRAINING = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for. `own`: what the first of its sequences surely needs, and the time it has for that.

    turn: see Sequence. n_prompt_tokens: each prompt once.
    """

    n_sequences: int
    n_prompt_tokens: int
    turn: float
    own: Work


class Admission:
    """At most `max_num_seqs` + `max_queue` sequences are inside at once: those that run, and those that may wait.

    max_queue_tokens: of the prompts of those that wait, when they are more than one request's. backlog: what stands
    before whoever has a turn.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_queue: int,
        max_queue_tokens: int,
        forecast: Forecast,
        backlog: Callable[[float], Backlog],
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.capacity = max_num_seqs + max_queue
        self.max_queue_tokens = max_queue_tokens
        self.phase = Phase.LOADING
        self.n_inside = 0
        self._forecast = forecast
        self._backlog = backlog
        self._empty = asyncio.Event()
        self._empty.set()

    def check_open(self) -> None:
        """Raises UnavailableError while the server loads or drains."""
        if self.phase is not Phase.READY:
            retry_after = _LOADING_RETRY if self.phase is Phase.LOADING else 1
            raise UnavailableError(f"{self.phase.value}; try again", retry_after=retry_after)

    def check_size(self, n_sequences: int) -> None:
        """Raises InvalidRequestError for more than an empty server could take."""
        if n_sequences > self.capacity:
            raise InvalidRequestError(
                f"the request has {n_sequences} sequences; at most {self.capacity} can be served"
            )

    def check(self, demand: Demand) -> float:
        """For how many seconds it may wait. Raises OverloadedError, or what the other checks raise."""
        self.check_open()
        self.check_size(demand.n_sequences)
        missing = self.n_inside + demand.n_sequences - self.capacity
        if missing > 0:
            raise OverloadedError(
                f"{self.n_inside} sequences are running or waiting, of at most {self.capacity}; try again later",
                retry_after=self.retry_after(missing),
            )
        must_wait = self.n_inside + demand.n_sequences > self.max_num_seqs
        if not must_wait and demand.own.left == math.inf:
            return math.inf
        backlog = self._backlog(demand.turn)
        if must_wait:
            self._check_tokens(demand, backlog)
        return patience(self._forecast, backlog, demand.own)

    def _check_tokens(self, demand: Demand, backlog: Backlog) -> None:
        excess = backlog.n_waiting_tokens + demand.n_prompt_tokens - self.max_queue_tokens
        if excess > 0 and backlog.n_waiting_tokens:
            part = min(1.0, excess / backlog.n_waiting_tokens)
            raise OverloadedError(
                f"prompts of {backlog.n_waiting_tokens} tokens are waiting, and with this one's "
                f"{demand.n_prompt_tokens} they would be more than {self.max_queue_tokens}; try again later",
                retry_after=self.retry_after(math.ceil(part * len(backlog.waiting))),
                limit="tokens",
            )

    @contextmanager
    def admit(self, demand: Demand) -> Iterator[float]:
        """Hold places for the sequences of one request until it ends; gives and raises what `check` does."""
        patience = self.check(demand)
        self.n_inside += demand.n_sequences
        self._empty.clear()
        try:
            yield patience
        finally:
            self.n_inside -= demand.n_sequences
            if not self.n_inside:
                self._empty.set()

    def retry_after(self, n_sequences: int) -> int:
        """Seconds until that many will have left, as the last ones did, or as is sure of those inside; at least 1."""
        usual = n_sequences * self._forecast.seconds_held / self.max_num_seqs
        if not self.n_inside:
            return _whole(usual)
        backlog = self._backlog(math.inf)
        left = replace(backlog, waiting=backlog.waiting[: n_sequences - 1])
        return _whole(max(usual, self._forecast.seconds_to_row(left)))

    async def wait_until_empty(self) -> None:
        await self._empty.wait()


def patience(forecast: Forecast, backlog: Backlog, own: Work) -> float:
    """For how many seconds a newcomer may wait. Raises OverloadedError where its deadline cannot be met.

    Whoever is expected to be in time may wait as long as it still can be. The others are let in for the case that it
    goes faster, but have to begin with time to spare: otherwise all rows would soon be held by those who are just late.
    """
    wait = forecast.seconds_to_row(backlog) if own.left < math.inf else 0.0
    if not wait:  # it is better begun than forecast
        return own.left
    least_run, run = (
        forecast.least_seconds_to_run(own.n_prompt, own.n_new),
        forecast.seconds_to_run(own),
    )
    if wait + least_run > own.left:
        raise OverloadedError(
            f"an answer would take at least {wait + least_run:.1f} seconds, but the request's deadline allows "
            f"{own.left:.1f}; try again later, or allow more time",
            retry_after=_whole(wait + least_run - own.left),
            limit="deadline",
        )
    if wait / OPTIMISM + run <= own.left:
        return own.left - run
    return own.left - (PATIENCE * run if PATIENCE * run < own.left else least_run)


def _whole(seconds: float) -> int:
    return min(_LONGEST_RETRY, max(1, math.ceil(seconds)))


def check_prompt_length(n_prompt: int, max_model_len: int) -> None:
    """Raises ContextLengthError for a prompt that is too long whatever is to be generated."""
    if n_prompt > max_model_len:
        raise ContextLengthError(
            f"the model takes at most {max_model_len} tokens, but the prompt has {n_prompt}; shorten it",
            param="prompt",
        )


def check_length(n_prompt: int, max_tokens: int, engine: Engine) -> None:
    """Raises ContextLengthError or InvalidRequestError for a sequence that could never run."""
    if not n_prompt:
        raise InvalidRequestError(
            "the prompt is empty: it needs at least one token", param="prompt"
        )
    total = n_prompt + max_tokens
    if total > engine.max_model_len:
        raise ContextLengthError(
            f"the model takes at most {engine.max_model_len} tokens, but {total} were asked for: "
            f"{n_prompt} in the prompt and {max_tokens} to generate",
            param="max_tokens",
        )
    needed = engine.kv.n_needed(n_prompt, max_tokens)
    if needed > engine.kv.budget_tokens:
        raise InvalidRequestError(
            f"{total} tokens ({n_prompt} in the prompt and {max_tokens} to generate) take the key-value memory of "
            f"{needed} tokens while the prompt is computed, but the server has that of {engine.kv.budget_tokens}; "
            "ask for fewer, or raise KVASIR_KV_CACHE_MEMORY",
            param="max_tokens",
        )

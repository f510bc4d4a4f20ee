"""Admission: refuse requests that can never run, and those that would wait too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sequence import is_background
from kvasir.server.errors import (
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from kvasir.server.requests.admission.forecast import LEAST_SHARE, Snapshot, Work
from kvasir.server.requests.request import Request

# A request that will probably be late must get its slot SLACK times its run time before the
# deadline.
SLACK = 1.25
_LONGEST_RETRY = 60  # seconds
_LOADING_RETRY = 5  # seconds


class Phase(Enum):
    """The phases of a server's life; each value is what a refused client is told."""

    LOADING = "the model is still loading"
    READY = "ready"
    DRAINING = "the server is shutting down"


class Admission:
    """Limits on the sequences inside: at most `max_num_seqs` that run and `max_queue` that wait."""

    def __init__(self, *, max_num_seqs: int, max_queue: int, max_queue_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.capacity = max_num_seqs + max_queue
        self.max_queue_tokens = max_queue_tokens  # of waiting prompts, if of several requests
        self.phase = Phase.LOADING
        self.n_inside = 0
        self.empty = asyncio.Event()  # set while no sequence is inside
        self.empty.set()

    def check_open(self) -> None:
        """Raise UnavailableError while the server loads or drains."""
        if self.phase is not Phase.READY:
            retry_after = _LOADING_RETRY if self.phase is Phase.LOADING else 1
            raise UnavailableError(f"{self.phase.value}; try again", retry_after=retry_after)

    def check_size(self, n_sequences: int) -> None:
        """Raise InvalidRequestError for more sequences than an idle server could take."""
        if n_sequences > self.capacity:
            raise InvalidRequestError(
                f"the request has {n_sequences} sequences; at most {self.capacity} can be served"
            )

    def check(self, request: Request, work: Work, snapshot: Snapshot) -> float:
        """Return for how many seconds a request may wait. Raises OverloadedError if not at all.

        A line of a batch takes no place from others, so it may always wait.
        """
        self.check_open()
        self.check_size(request.n_sequences)
        if is_background(request.priority):
            return work.seconds_left
        n_inside = self.n_inside + request.n_sequences
        if n_inside > self.capacity:
            raise OverloadedError(
                f"{self.n_inside} sequences are running or waiting, of at most {self.capacity}; "
                "try again later",
                retry_after=self.retry_after(n_inside - self.capacity, snapshot),
            )
        ahead, n_waiting = snapshot.ahead_of(work), snapshot.n_waiting_tokens
        excess = n_waiting + request.n_prompt_tokens - self.max_queue_tokens
        if n_inside > self.max_num_seqs and n_waiting and excess > 0:
            n_ended = math.ceil(min(1.0, excess / n_waiting) * len(ahead.waiting))
            raise OverloadedError(
                f"prompts of {n_waiting} tokens are waiting; with the {request.n_prompt_tokens} of "
                f"this request they would exceed {self.max_queue_tokens}; try again later",
                retry_after=self.retry_after(n_ended, snapshot),
                limit="tokens",
            )
        return longest_wait(ahead, work)

    @contextmanager
    def admit(self, request: Request, work: Work, snapshot: Snapshot) -> Iterator[float]:
        """Count a request's sequences as inside until it ends; yield and raise as `check` does."""
        max_wait = self.check(request, work, snapshot)
        n_sequences = 0 if is_background(request.priority) else request.n_sequences
        self.n_inside += n_sequences
        if self.n_inside:
            self.empty.clear()
        try:
            yield max_wait
        finally:
            self.n_inside -= n_sequences
            if not self.n_inside:
                self.empty.set()

    def retry_after(self, n_sequences: int, snapshot: Snapshot) -> int:
        """Estimate the seconds until that many sequences end: the recent mean or a longer bound."""
        usual = n_sequences * snapshot.rates.slot / self.max_num_seqs
        ahead = replace(snapshot, waiting=snapshot.waiting[: max(0, n_sequences - 1)])
        return _whole(max(usual, ahead.seconds_to_slot()))


def longest_wait(ahead: Snapshot, work: Work) -> float:
    """Return for how many seconds a request may wait for a slot behind the work that is ahead.

    A request that is expected to meet its deadline may wait for as long as it still can meet it.
    Another is admitted in case the queue moves faster, but must get its slot with time to spare:
    otherwise requests that end just too late would soon hold all slots.
    Raises OverloadedError when the deadline cannot be met.
    """
    wait = ahead.seconds_to_slot() if work.seconds_left < math.inf else 0.0
    if not wait:  # running it costs less than an estimate could save
        return work.seconds_left
    run = ahead.rates.seconds_to_run(work)
    least_run = ahead.rates.least_seconds_to_run(work, work.n_new)
    if wait + least_run > work.seconds_left:
        raise OverloadedError(
            f"an answer would take at least {wait + least_run:.1f} seconds, but the request's "
            f"deadline allows {work.seconds_left:.1f}; try again later, or allow more time",
            retry_after=_whole(wait + least_run - work.seconds_left),
            limit="deadline",
        )
    if wait / LEAST_SHARE + run <= work.seconds_left:
        return work.seconds_left - run
    return work.seconds_left - (SLACK * run if SLACK * run < work.seconds_left else least_run)


def _whole(seconds: float) -> int:
    return min(_LONGEST_RETRY, max(1, math.ceil(seconds)))


def context_length(n: int) -> str:
    """Return the start of the message of a ContextLengthError, by which clients know it."""
    return f"This model's maximum context length is {n} tokens. However,"


def check_length(
    n_prompt: int,
    max_tokens: int,
    engine: Engine,
    n_given: int = 0,
    n_rows: int = 1,
    param: str = "max_tokens",
) -> None:
    """Raise ContextLengthError or InvalidRequestError for a sequence that can never run.

    n_given: tokens that begin the target of an encoder-decoder. n_rows: one for each beam. param:
    the field of `max_tokens` in the request.
    """
    if not n_prompt:
        raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
    total = n_prompt + max_tokens + n_given
    if max_tokens + n_given > engine.limits.after(n_prompt):
        before = f"{total}: {n_prompt} in the prompt"
        if n_given:
            before = f"{total - n_prompt} in the target: {n_given} that begin it"
        raise ContextLengthError(
            f"{context_length(engine.limits.max_model_len)} you asked for {before} and "
            f"{max_tokens} to generate",
            param=param,
        )
    needed = n_rows * engine.kv.reservation(n_prompt, n_given + max_tokens)
    if needed > engine.kv.budget_tokens:
        raise ContextLengthError(
            f"{total} tokens ({n_prompt} in the prompt and {max_tokens} to generate) take up to "
            f"{needed} tokens of the KV cache, but the server's has "
            f"{engine.kv.budget_tokens}; ask for fewer, or raise KVASIR_KV_CACHE_MEMORY",
            param=param,
        )

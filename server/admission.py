"""The door: what can never fit is refused, what would wait too long is turned away with a time to come back."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from time import monotonic

from server.engine.engine import Engine
from server.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnavailableError

_REMEMBERED = 64  # ends of sequences from which throughput is measured
_LONGEST_RETRY = 60  # seconds
_LOADING_RETRY = 5  # seconds


class Phase(Enum):
    LOADING = "the model is still loading"
    READY = "ready"
    DRAINING = "the server is shutting down"


class Admission:
    """At most `max_num_seqs` + `max_queue` sequences are inside at once: those that run, and those that may wait."""

    def __init__(self, *, max_num_seqs: int, max_queue: int) -> None:
        self.capacity = max_num_seqs + max_queue
        self.phase = Phase.LOADING
        self.n_inside = 0
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
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
            raise InvalidRequestError(f"the request has {n_sequences} sequences; at most {self.capacity} can be served")

    @contextmanager
    def admit(self, n_sequences: int) -> Iterator[None]:
        """Hold places for the sequences of one request until it ends. Raises OverloadedError, or UnavailableError."""
        self.check_open()
        self.check_size(n_sequences)
        missing = self.n_inside + n_sequences - self.capacity
        if missing > 0:
            raise OverloadedError(
                f"{self.n_inside} sequences are running or waiting, of at most {self.capacity}; try again later",
                retry_after=self.retry_after(missing),
            )
        self.n_inside += n_sequences
        self._empty.clear()
        try:
            yield
        finally:
            self.n_inside -= n_sequences
            self._ends.extend([monotonic()] * n_sequences)
            if not self.n_inside:
                self._empty.set()

    def retry_after(self, n_sequences: int) -> int:
        """Seconds until that many will have left, at the rate of the last ones; at least 1."""
        if len(self._ends) < 2:
            return 1
        seconds = monotonic() - self._ends[0]
        return min(_LONGEST_RETRY, max(1, math.ceil(n_sequences * seconds / len(self._ends))))

    async def wait_until_empty(self) -> None:
        await self._empty.wait()


def check_prompt_length(n_prompt: int, max_model_len: int) -> None:
    """Raises ContextLengthError for a prompt that is too long whatever is to be generated."""
    if n_prompt > max_model_len:
        raise ContextLengthError(
            f"the model takes at most {max_model_len} tokens, but the prompt has {n_prompt}; shorten it", param="prompt"
        )


def check_length(n_prompt: int, max_tokens: int, engine: Engine) -> None:
    """Raises ContextLengthError or InvalidRequestError for a sequence that could never run."""
    if not n_prompt:
        raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
    total = n_prompt + max_tokens
    if total > engine.max_model_len:
        raise ContextLengthError(
            f"the model takes at most {engine.max_model_len} tokens, but {total} were asked for: "
            f"{n_prompt} in the prompt and {max_tokens} to generate",
            param="max_tokens",
        )
    needed = engine.kv_tokens_needed(n_prompt, max_tokens)
    if needed > engine.kv_budget_tokens:
        raise InvalidRequestError(
            f"{total} tokens ({n_prompt} in the prompt and {max_tokens} to generate) take the key-value memory of "
            f"{needed} tokens while the prompt is computed, but the server has that of {engine.kv_budget_tokens}; "
            "ask for fewer, or raise KVASIR_KV_CACHE_MEMORY",
            param="max_tokens",
        )

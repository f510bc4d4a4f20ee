"""An accepted request on its way through the engine: its choices and deltas."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter

from tokenizers import Tokenizer

from kvasir.server.engine.engine import BeamOutput, TokenOutput
from kvasir.server.engine.grammar.constraints import Constraint
from kvasir.server.engine.sampling.params import TokenLogprobs
from kvasir.server.engine.sequence import BACKGROUND_PRIORITY, FinishReason, Sequence
from kvasir.server.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    KvasirError,
    UnavailableError,
)
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.requests.async_engine import OutputStream
from kvasir.server.requests.request import CompletionRequest, Prompt
from kvasir.server.text.detokenizer import Detokenizer, StopChecker


@dataclass(slots=True, eq=False)
class Choice:
    """One text as the client sees it; `index` is prompt index x n + sample.

    The best texts of a beam search share its sequence, and have scores.
    """

    index: int
    prompt: Prompt
    sequence: Sequence
    text: Detokenizer
    stops: StopChecker
    n_tokens: int = 0
    n_predicted: int = 0  # of them
    score: float | None = None
    finish_reason: FinishReason | None = None
    shown_reason: str | None = None  # if its protocol has another word for finish_reason


@dataclass(frozen=True, slots=True)
class Delta:
    """The addition of one engine output to a choice."""

    choice: Choice
    token_ids: list[int]
    text: str  # that may be shown now
    offset: int  # number of characters generated before it
    logprobs: TokenLogprobs | None
    prompt_logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None

    @property
    def n_tokens(self) -> int:
        """The number of its tokens."""
        return len(self.token_ids)


def make_choices(
    request: CompletionRequest,
    tokenizer: Tokenizer,
    ids: Iterator[int],
    constraint: Constraint | None = None,
) -> list[Choice]:
    """Make a request's sequences, numbered by `ids`, each with a copy of the constraint."""
    arrived = perf_counter()
    choices: list[Choice] = []
    for index in range(len(request.prompts) * request.n):
        prompt, sample = request.prompts[index // request.n], index % request.n
        if sample and request.params.beams is not None:
            sequence = choices[-1].sequence
        else:
            sequence = Sequence(
                next(ids),
                prompt.ids,
                replace(request.params, sample_index=sample),
                request.ending_ids,
                arrived,
                request.request_id,
                request.target_prefix,
                request.cache_salt,
                request.caller.name,
                request.priority,
                request.n_certain,
                request.deadline,
                request.prediction,
                request.adapter,
                constraint=constraint.copy() if constraint else None,
            )
        before = () if request.begins_text else sequence.given_ids
        text = Detokenizer(tokenizer, before, request.kept_ids)
        choices.append(Choice(index, prompt, sequence, text, StopChecker(request.stops)))
    return choices


@dataclass(slots=True, eq=False)
class Completion:
    """An accepted request, whose sequences have consecutive ids; iterate over `deltas`."""

    choices: list[Choice]
    stream: OutputStream

    @property
    def n_prompt_tokens(self) -> int:
        """The number of prompt tokens, each prompt counted once."""
        return sum(len(sequence.prompt_ids) for sequence in self._first_samples)

    @property
    def n_cached_tokens(self) -> int:
        """The number of prompt tokens that the prefix cache held for the first samples."""
        return sum(sequence.n_cached for sequence in self._first_samples)

    @property
    def _first_samples(self) -> list[Sequence]:
        return [s for s in self.stream.sequences if s.params.sample_index == 0]

    @property
    def n_completion_tokens(self) -> int:
        """The number of tokens generated so far."""
        return sum(choice.n_tokens for choice in self.choices)

    @property
    def n_prediction_tokens(self) -> tuple[int, int]:
        """The number of tokens that predictions had right so far, and of their other tokens.

        Both are 0 without drafts, for which alone predictions are read.
        """
        n_right = sum(choice.n_predicted for choice in self.choices)
        drafting = [choice.sequence for choice in self.choices if choice.sequence.speculation]
        return n_right, max(0, sum(len(s.prediction) for s in drafting) - n_right)

    @property
    def seconds_to_first_token(self) -> float | None:
        """The seconds from arrival to the first token; None before it."""
        firsts = ((s.first_token_at, s.arrived_at) for s in self.stream.sequences)
        return min((at - arrived for at, arrived in firsts if at is not None), default=None)

    async def deltas(self, max_silence: float | None = None) -> AsyncIterator[list[Delta]]:
        """Yield new deltas until every choice has finished.

        After the first output, yield an empty list after each `max_silence` seconds without one.
        Raises DeadlineExceededError (nothing was generated), UnavailableError (shutdown), and
        EngineError.
        """
        limit, by_sequence = None, dict[int, list[Choice]]()
        for choice in self.choices:
            by_sequence.setdefault(choice.sequence.id, []).append(choice)
        while any(choice.finish_reason is None for choice in self.choices):
            outputs = []
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    outputs = await self.stream.receive()
            ready: list[Delta] = []
            for output in outputs:
                try:
                    for rank, choice in enumerate(by_sequence[output.sequence_id]):
                        if choice.finish_reason is None:
                            ready.append(self._advance(choice, output, rank))
                except KvasirError:
                    for other in self.choices:  # an error of one choice ends the request
                        other.finish_reason = other.finish_reason or output.finish_reason
                    if ready:
                        yield ready
                    raise
            yield ready
            limit = max_silence

    def stop(self, choice: Choice) -> None:
        """End a choice whose text is complete; outputs received with its last one still show."""
        if choice.finish_reason is None:
            choice.finish_reason = FinishReason.STOP
            self.stream.stop(choice.sequence.id)

    def _advance(self, choice: Choice, output: TokenOutput, rank: int) -> Delta:
        """Add an output to a choice; rank: its own among the texts of a beam search."""
        self._raise_failure(choice, output)
        ending_ids = choice.sequence.ending_ids  # which are not part of the text
        reason, offset, text = output.finish_reason, choice.text.n_chars, ""
        token_ids = [] if output.token_id is None else [output.token_id]
        if isinstance(output, BeamOutput):
            choice.score, token_ids = output.hypotheses[rank]
            reason = FinishReason.STOP if token_ids[-1] in ending_ids else FinishReason.LENGTH
        choice.n_tokens += len(token_ids)
        choice.n_predicted += output.is_predicted
        for token_id in token_ids:
            if token_id not in ending_ids:
                text += choice.text.push(token_id)
        if reason is not None:
            text += choice.text.flush()
        if choice.n_tokens > choice.sequence.params.min_tokens:  # stop strings count from there on
            text = choice.stops.push(text)
        if reason is not None:
            text += choice.stops.flush()
        if choice.stops.stopped:
            reason = FinishReason.STOP
            if output.finish_reason is None:
                self.stream.stop(output.sequence_id)
        choice.finish_reason = reason
        scored = (output.logprobs, output.prompt_logprobs)
        return Delta(choice, token_ids, text, offset, *scored, reason)

    def _raise_failure(self, choice: Choice, output: TokenOutput) -> None:
        reason, constraint = output.finish_reason, choice.sequence.constraint
        if reason is FinishReason.GRAMMAR and constraint is not None:
            raise InvalidRequestError(
                f"the grammar cannot be followed any further: {constraint.error}",
                param=constraint.param,
            )
        if reason is not FinishReason.TIMEOUT or not self.n_completion_tokens:
            raise_failure(reason)


def raise_failure(reason: FinishReason | None) -> None:
    """Raise the error of a sequence that ended so without an answer, if there is one."""
    if reason is FinishReason.ERROR:
        raise EngineError("the engine failed")
    if reason is FinishReason.ABORT:
        raise UnavailableError("the server is shutting down; try again", retry_after=1)
    if reason is FinishReason.TIMEOUT:
        raise DeadlineExceededError(
            "the deadline passed before the first output; allow more time, or try later"
        )


@dataclass(slots=True)
class RequestState:
    """An HTTP request's id, arrival in seconds of `perf_counter`, sender, and completion if any.

    model: its name, "" until it is known; adapter: that of the adapter that it is asked for with,
    if any; served: either. held: what it keeps until its response is sent. body_size: in bytes,
    once it is read. error: the `reason` of the error that it ended in. error_param: the field at
    fault. trace_id: 32 hexadecimal digits. n_embedded: tokens of its texts, once their vectors or
    scores are known. is_background: a batch's line. ignored: fields of its body that have no
    effect. scored_by: what its scores are, if not the model's own.
    """

    id: str
    arrived: float
    caller: Caller = field(default_factory=Caller)
    model: str = ""
    adapter: str = ""
    served: object = None
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    body_size: int = 0
    completion: Completion | None = None
    n_embedded: int | None = None
    error: str | None = None
    error_param: str | None = None
    trace_id: str | None = None
    is_background: bool = False
    ignored: tuple[str, ...] = ()
    scored_by: str | None = None

    def priority(self, asked: int) -> int:
        """Return the priority of its sequences, if it asks for `asked`."""
        return BACKGROUND_PRIORITY + asked if self.is_background else asked


def start_timers(
    stream: OutputStream, max_wait: float, seconds_left: float
) -> list[asyncio.TimerHandle]:
    """Schedule the end of a request at its deadline, or after `max_wait` if it still waits."""

    def expire(only_waiting: bool) -> None:
        if stream.is_waiting or not only_waiting:
            stream.end(FinishReason.TIMEOUT)

    if seconds_left == math.inf:
        return []
    loop = asyncio.get_running_loop()
    timers = [loop.call_later(seconds_left, expire, False)]
    if max_wait < seconds_left:
        timers.append(loop.call_later(max(0.0, max_wait), expire, True))
    return timers

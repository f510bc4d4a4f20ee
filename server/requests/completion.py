"""One request on its way through the engine, in one form for every protocol."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter

from tokenizers import Tokenizer

from kvasir.server.engine.engine import BeamOutput, TokenOutput
from kvasir.server.engine.grammar.constraints import Constraint, Grammar
from kvasir.server.engine.sampling import SamplingParams, TokenLogprobs
from kvasir.server.engine.sequence import (
    BACKGROUND_PRIORITY,
    FinishReason,
    Sequence,
    SequenceStatus,
    queue_time,
)
from kvasir.server.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    KvasirError,
    UnavailableError,
)
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.requests.admission.forecast import Work
from kvasir.server.requests.async_engine import OutputStream
from kvasir.server.text.detokenizer import Detokenizer, StopChecker

# Of JSON. A position's log-probabilities are the alternatives, the token's, and a line beside them.
_LOGPROB_BYTES, _CHAR_BYTES, _ID_BYTES = 100, 6, 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt."""

    ids: list[int]
    text: str
    offsets: list[int] | None = None  # where in the text each token begins, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A client's request: `n` samples of each prompt, or the `n` best texts of a beam search.

    target_prefix: the given beginning of every target of an encoder-decoder.
    """

    prompts: list[Prompt]
    params: SamplingParams
    request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    n: int = 1
    target_prefix: list[int] = field(default_factory=list)
    ending_ids: frozenset[int] = frozenset()  # its stop tokens, and the model's unless ignored
    stops: tuple[str, ...] = ()
    deadline: float = math.inf  # in seconds of `perf_counter`
    priority: int = 0  # lower is earlier
    cache_salt: bytes = b""  # only prompts of the same salt share the prefix cache
    grammar: Grammar | None = None
    kept_ids: frozenset[int] = frozenset()  # special tokens that are shown in the text
    length_param: str = "max_tokens"  # the field of its maximum, in errors
    begins_text: bool = False  # the text begins with the first new token; else with the prompt
    shows_prompt: bool = False  # the answer has the prompt's text or tokens

    @property
    def work(self) -> Work:
        """The certain work of its first sequence, if the request were submitted now."""
        now, n = perf_counter(), self.n_certain
        left, place = self.deadline - now, queue_time(now, self.priority)
        return Work(len(self.prompts[0].ids), n, n, seconds_left=left, queue_time=place)

    @property
    def n_certain(self) -> int:
        """The minimum number of new tokens of each sequence."""
        params = self.params
        may_end_early = (
            not params.ignore_eos or params.stop_token_ids or self.stops or self.grammar is not None
        )
        least = max(params.min_tokens, 1) if may_end_early else params.max_tokens
        return min(least, params.max_tokens)

    @property
    def n_sequences(self) -> int:
        """The number of rows that it takes: prompts times samples, or times beams."""
        return len(self.prompts) * (self.params.n_rows if self.params.beams else self.n)

    @property
    def n_prompt_tokens(self) -> int:
        """The number of prompt tokens, each prompt counted once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def bytes_of_token(self) -> int:
        """The most bytes of log-probabilities for a new token of each sample."""
        n_top = self.params.logprobs
        return 0 if n_top is None else self.n_sequences * _LOGPROB_BYTES * (2 + n_top)

    @property
    def answer_bytes(self) -> int:
        """The most bytes of the answer's log-probabilities, and of prompts that it shows."""
        n_bytes, n_top = self.params.max_tokens * self.bytes_of_token, self.params.prompt_logprobs
        if n_top is not None:
            n_bytes += self.n * self.n_prompt_tokens * _LOGPROB_BYTES * (2 + n_top)
        if self.shows_prompt:
            n_chars = sum(len(prompt.text) for prompt in self.prompts)
            n_bytes += self.n * (n_chars * _CHAR_BYTES + self.n_prompt_tokens * _ID_BYTES)
        return n_bytes

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens that it uses: its prompts, and all that may follow."""
        return self.n_prompt_tokens + self.n_sequences * self.params.max_tokens


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
                request.priority,
                request.n_certain,
                request.deadline,
                constraint=constraint.copy() if constraint else None,
            )
        before = () if request.begins_text else sequence.given_ids
        text = Detokenizer(tokenizer, before, request.kept_ids)
        choices.append(Choice(index, prompt, sequence, text, StopChecker(request.stops)))
    return choices


def sequences_of(choices: list[Choice]) -> list[Sequence]:
    """Return the sequences of choices, each once."""
    return list(dict.fromkeys(choice.sequence for choice in choices))


@dataclass(slots=True, eq=False)
class Completion:
    """An accepted request, whose sequences have consecutive ids; iterate over `deltas`."""

    choices: list[Choice]
    stream: OutputStream

    @property
    def is_waiting(self) -> bool:
        """True while none of its sequences has a place in the batch."""
        return all(choice.sequence.status is SequenceStatus.WAITING for choice in self.choices)

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
        sequences = sequences_of(self.choices)
        return [sequence for sequence in sequences if sequence.params.sample_index == 0]

    @property
    def n_completion_tokens(self) -> int:
        """The number of tokens generated so far."""
        return sum(choice.n_tokens for choice in self.choices)

    @property
    def n_generated(self) -> int:
        """The number of tokens that the engine has generated, also for clients that do not read."""
        return sum(len(one.output_ids) * one.params.n_rows for one in sequences_of(self.choices))

    @property
    def seconds_to_first_token(self) -> float | None:
        """The seconds from arrival to the first token; None before it."""
        sequences = [choice.sequence for choice in self.choices]
        waits = (s.first_token_at - s.arrived_at for s in sequences if s.first_token_at is not None)
        return min(waits, default=None)

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
                    for one in self.choices:  # an error of one choice ends the request
                        one.finish_reason = one.finish_reason or output.finish_reason
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

    model: its name, "" until it is known. body_size: in bytes, once it is read. error: the `reason`
    of the error that it ended in. trace_id: 32 hexadecimal digits. n_embedded: tokens of its texts,
    once their vectors or scores are known. is_background: a batch's line.
    """

    id: str
    arrived: float
    caller: Caller = field(default_factory=Caller)
    model: str = ""
    body_size: int = 0
    completion: Completion | None = None
    n_embedded: int | None = None
    error: str | None = None
    trace_id: str | None = None
    is_background: bool = False

    def priority(self, asked: int) -> int:
        """Return the priority of its sequences, if it asks for `asked`."""
        return BACKGROUND_PRIORITY + asked if self.is_background else asked

"""One request on its way through the engine, in no protocol's words: its choices, their text, how each one ended."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter

from tokenizers import Tokenizer

from server.engine.engine import TokenOutput
from server.engine.grammar.constraints import Constraint, Grammar
from server.engine.sampling import SamplingParams, TokenLogprobs
from server.engine.sequence import FinishReason, Sequence, SequenceStatus, SequenceTimes, queue_time
from server.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    KvasirError,
    UnavailableError,
)
from server.requests.admission import Demand
from server.requests.async_engine import OutputStream
from server.requests.forecast import Work
from server.text.detokenizer import Detokenizer, StopChecker


@dataclass(frozen=True, slots=True)
class Prompt:
    """`places`: where each token begins in the text, as the tokenizer has it; None where nobody has asked it."""

    ids: list[int]
    text: str
    places: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What a client asks for. `n` samples of each prompt; `deadline` in seconds of `perf_counter`.

    priority: lower is earlier. grammar: what each text has to be; None is anything. kept_ids: special tokens that show
    in the text.
    """

    prompts: list[Prompt]
    params: SamplingParams
    request_id: str = ""
    n: int = 1
    stops: tuple[str, ...] = ()
    deadline: float | None = None
    priority: int = 0
    grammar: Grammar | None = None
    kept_ids: frozenset[int] = frozenset()

    @property
    def demand(self) -> Demand:
        """What it asks of the engine, were it submitted now."""
        now = perf_counter()
        left = math.inf if self.deadline is None else self.deadline - now
        work = Work(
            len(self.prompts[0].ids),
            self.n_sure,
            self.n_sure,
            seconds_left=left,
            queue_time=queue_time(now, self.priority),
        )
        n_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return Demand(self.n_sequences, n_tokens, work)

    @property
    def n_sure(self) -> int:
        """New tokens that each sequence needs however its text may end."""
        params = self.params
        may_end = (
            not params.ignore_eos or params.stop_token_ids or self.stops or self.grammar is not None
        )
        return min(max(params.min_tokens, 1) if may_end else params.max_tokens, params.max_tokens)

    @property
    def n_sequences(self) -> int:
        return len(self.prompts) * self.n

    def ending_ids(self, eos_token_ids: Items[int]) -> frozenset[int]:
        """Tokens that end the text: those it names, and the model's unless it ignores them."""
        params = self.params
        return (
            params.stop_token_ids
            if params.ignore_eos
            else params.stop_token_ids.union(eos_token_ids)
        )


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence as the client sees it. `index` is prompt index x n + sample."""

    index: int
    prompt: Prompt
    sequence: Sequence
    text: Detokenizer
    stops: StopChecker
    n_tokens: int = 0
    finish_reason: FinishReason | None = None

    @property
    def stopped_by_string(self) -> bool:
        return self.stops.stopped


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output adds to a choice. `text`: what may be shown now. `offset`: characters generated before it."""

    choice: Choice
    token_id: int | None
    text: str
    offset: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None


def make_choices(
    request: CompletionRequest,
    tokenizer: Tokenizer,
    first_id: int,
    eos_token_ids: Items[int],
    constraint: Constraint | None = None,
) -> list[Choice]:
    """The sequences of a request, with ids from `first_id` on, each with a copy of the constraint."""
    ending_ids = request.ending_ids(eos_token_ids)
    arrived = perf_counter()
    choices = []
    for index in range(request.n_sequences):
        prompt = request.prompts[index // request.n]
        own = replace(request.params, sample_index=index % request.n)
        sequence = Sequence(
            first_id + index,
            prompt.ids,
            own,
            ending_ids,
            SequenceTimes(arrived),
            request.request_id,
        )
        sequence.priority, sequence.n_sure = request.priority, request.n_sure
        sequence.deadline = math.inf if request.deadline is None else request.deadline
        sequence.constraint = constraint.copy() if constraint else None
        text = Detokenizer(tokenizer, prompt.ids, request.kept_ids)
        choices.append(Choice(index, prompt, sequence, text, StopChecker(request.stops)))
    return choices


def draw_seed() -> int:
    return secrets.randbits(64)


@dataclass(slots=True, eq=False)
class Completion:
    """An accepted request. Iterate over `deltas`."""

    choices: list[Choice]
    stream: OutputStream
    started: bool = False  # whether any choice has got a token
    _by_sequence: dict[int, Choice] = field(init=False)

    def __post_init__(self) -> None:
        self._by_sequence = {choice.sequence.id: choice for choice in self.choices}

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def is_waiting(self) -> bool:
        """Whether none of it has a place in the batch yet."""
        return all(choice.sequence.status is SequenceStatus.WAITING for choice in self.choices)

    @property
    def n_prompt_tokens(self) -> int:
        """Each prompt once, however many samples it has."""
        return sum(len(choice.prompt.ids) for choice in self._first_samples)

    @property
    def n_cached_tokens(self) -> int:
        """Those of the prompts' tokens that the prefix cache had when the first sample came."""
        return sum(choice.sequence.n_cached for choice in self._first_samples)

    @property
    def _first_samples(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.sequence.params.sample_index == 0]

    @property
    def n_completion_tokens(self) -> int:
        return sum(choice.n_tokens for choice in self.choices)

    @property
    def seconds_to_first_token(self) -> float | None:
        times = [choice.sequence.times for choice in self.choices]
        return min(
            (t.first_token - t.arrived for t in times if t.first_token is not None), default=None
        )

    async def deltas(self, silence: float | None = None) -> AsyncIterator[list[Delta]]:
        """What is new, until every choice has finished; an empty list after each `silence` seconds without, once begun.

        Raises DeadlineExceededError (nothing was generated), UnavailableError (shutdown), EngineError.
        """
        limit = None
        while not self.is_finished:
            outputs = []
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    outputs = await self.stream.receive()
            ready: list[Delta] = []
            for output in outputs:
                choice = self._by_sequence[output.sequence_id]
                try:
                    if choice.finish_reason is None:
                        ready.append(self._advance(choice, output))
                except KvasirError:
                    for unfinished in self.choices:  # what fails one ends the request
                        unfinished.finish_reason = unfinished.finish_reason or output.finish_reason
                    if ready:  # what came before the failure is the client's
                        yield ready
                    raise
            yield ready
            limit = silence

    def stop(self, choice: Choice) -> None:
        """End a choice whose text has all that was wanted of it; outputs that came with its last ones still show."""
        if choice.finish_reason is None:
            choice.finish_reason = FinishReason.STOP
            self.stream.stop(choice.sequence.id)

    def _advance(self, choice: Choice, output: TokenOutput) -> Delta:
        self._check(choice, output)
        reason, offset, text = output.finish_reason, choice.text.n_chars, ""
        if output.token_id is not None:
            self.started = True
            choice.n_tokens += 1
            if output.token_id not in choice.sequence.ending_ids:  # these are not part of the text
                text = self._show(choice, choice.text.push(output.token_id))
        if reason is not None:
            text += self._show(choice, choice.text.flush())
            text += choice.stops.flush()
        if choice.stops.stopped:
            reason = FinishReason.STOP
            if output.finish_reason is None:
                self.stream.stop(output.sequence_id)
        choice.finish_reason = reason
        return Delta(
            choice, output.token_id, text, offset, output.logprobs, output.prompt_logprobs, reason
        )

    @staticmethod
    def _show(choice: Choice, piece: str) -> str:
        if choice.n_tokens <= choice.sequence.params.min_tokens:
            return piece  # it may not stop yet
        return choice.stops.push(piece)

    def _check(self, choice: Choice, output: TokenOutput) -> None:
        constraint = choice.sequence.constraint
        if output.finish_reason is FinishReason.GRAMMAR and constraint is not None:
            raise InvalidRequestError(
                f"the grammar cannot be followed any further: {constraint.error}",
                param=constraint.param,
            )
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError("the engine failed")
        if output.finish_reason is FinishReason.ABORT:
            raise UnavailableError("the server is shutting down; try again", retry_after=1)
        if output.finish_reason is FinishReason.TIMEOUT and not self.started:
            raise DeadlineExceededError(
                "no token could come before the deadline; allow more time, or try later"
            )

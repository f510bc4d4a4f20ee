"""What clients ask of an engine, in one form for every protocol."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from kvasir.server.engine.adapters.loaded import Adapter
from kvasir.server.engine.encoder.sequence import EncoderSequence, Encoding
from kvasir.server.engine.grammar.constraints import Grammar
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence, queue_time
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.requests.admission.forecast import Work

# Of JSON. A position's log-probabilities are the alternatives, the token's, and a line beside them.
_LOGPROB_BYTES, _CHAR_BYTES, _ID_BYTES = 100, 6, 8
# pooled: a vector of each text; tokens: one of each of its tokens; scores: one of its labels.
Output = Literal["pooled", "tokens", "scores"]
_ENCODER_PARAMS = SamplingParams(max_tokens=0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A client's request: who asks, and its place in the queue.

    deadline: in seconds of `perf_counter`. priority: lower is earlier.
    """

    request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    deadline: float = math.inf
    priority: int = 0

    def _work(self, n_prompt: int, n_new: int) -> Work:
        """Return the work of a sequence with so many certain tokens, if it were submitted now."""
        now = perf_counter()
        left, place = self.deadline - now, queue_time(now, self.priority)
        return Work(n_prompt, n_new, n_new, seconds_left=left, queue_time=place)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt."""

    ids: list[int]
    text: str
    offsets: list[int] | None = None  # where in the text each token begins, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(_Request):
    """A request for `n` samples of each prompt, or for the `n` best texts of a beam search.

    target_prefix: the given beginning of every target of an encoder-decoder. prediction: tokens
    that the answer may have.
    """

    prompts: list[Prompt]
    params: SamplingParams
    n: int = 1
    target_prefix: list[int] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)
    ending_ids: frozenset[int] = frozenset()  # its stop tokens, and the model's unless ignored
    stops: tuple[str, ...] = ()
    cache_salt: bytes = b""  # only prompts of the same salt share the prefix cache
    grammar: Grammar | None = None
    kept_ids: frozenset[int] = frozenset()  # special tokens that are shown in the text
    adapter: Adapter | None = None  # which is in memory until the request has ended
    length_param: str = "max_tokens"  # the field of its maximum, in errors
    begins_text: bool = False  # the text begins with the first new token; else with the prompt
    shows_prompt: bool = False  # the answer has the prompt's text or tokens

    @property
    def work(self) -> Work:
        """The certain work of its first sequence, if the request were submitted now."""
        return self._work(len(self.prompts[0].ids), self.n_certain)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(_Request):
    """A request for the vectors, or the scores, of texts."""

    inputs: list[Encoding]
    output: Output = "pooled"
    adapter: Adapter | None = None  # see CompletionRequest

    @property
    def work(self) -> Work:
        """The work of its first text, if the request were submitted now."""
        return self._work(len(self.inputs[0].ids), 0)

    @property
    def n_sequences(self) -> int:
        """The number of texts."""
        return len(self.inputs)

    @property
    def n_prompt_tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(len(text.ids) for text in self.inputs)

    @property
    def most_tokens(self) -> int:
        """The number of tokens that it uses."""
        return self.n_prompt_tokens

    def make_sequences(self, ids: Iterator[int]) -> list[Sequence]:
        """Make a sequence of each text, numbered by `ids`."""
        arrived = perf_counter()
        return [
            EncoderSequence(
                next(ids),
                list(text.ids),
                _ENCODER_PARAMS,
                frozenset(),
                arrived,
                self.request_id,
                priority=self.priority,
                deadline=self.deadline,
                adapter=self.adapter,
                type_ids=text.type_ids,
                wants_tokens=self.output == "tokens",
            )
            for text in self.inputs
        ]


Request = CompletionRequest | EmbeddingRequest

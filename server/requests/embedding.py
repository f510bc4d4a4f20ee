"""A request for vectors of texts, or for their scores, on its way through the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from kvasir.server.engine.encoder.sequence import EncoderOutput, EncoderSequence, Encoding
from kvasir.server.engine.sampling import Floats, SamplingParams
from kvasir.server.engine.sequence import Sequence, SequenceStatus, queue_time
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.requests.admission.forecast import Work
from kvasir.server.requests.async_engine import OutputStream
from kvasir.server.requests.completion import raise_failure

# pooled: a vector of each text; tokens: one of each of its tokens; scores: one of its labels.
Output = Literal["pooled", "tokens", "scores"]
_PARAMS = SamplingParams(max_tokens=0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A client's request for the vectors, or the scores, of texts."""

    inputs: list[Encoding]
    output: Output = "pooled"
    request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    deadline: float = math.inf  # in seconds of `perf_counter`
    priority: int = 0  # lower is earlier

    @property
    def work(self) -> Work:
        """The work of its first text, if the request were submitted now."""
        now = perf_counter()
        place = queue_time(now, self.priority)
        return Work(len(self.inputs[0].ids), 0, seconds_left=self.deadline - now, queue_time=place)

    @property
    def n_sequences(self) -> int:
        """The number of texts."""
        return len(self.inputs)

    @property
    def n_prompt_tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(len(one.ids) for one in self.inputs)

    def make_sequences(self, ids: Iterator[int]) -> list[Sequence]:
        """Make a sequence of each text, numbered by `ids`."""
        arrived = perf_counter()
        return [
            EncoderSequence(
                next(ids),
                list(one.ids),
                _PARAMS,
                frozenset(),
                arrived,
                self.request_id,
                priority=self.priority,
                deadline=self.deadline,
                type_ids=one.type_ids,
                wants_tokens=self.output == "tokens",
            )
            for one in self.inputs
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """An accepted request, whose sequences have consecutive ids."""

    sequences: list[Sequence]
    stream: OutputStream

    @property
    def is_waiting(self) -> bool:
        """True while none of its texts has begun to run."""
        return all(sequence.status is SequenceStatus.WAITING for sequence in self.sequences)

    async def vectors(self) -> list[Floats]:
        """Wait for all texts; return what was asked for of each, in their order.

        Raises DeadlineExceededError, UnavailableError (shutdown) and EngineError.
        """
        found: dict[int, Floats] = {}
        while len(found) < len(self.sequences):
            for output in await self.stream.receive():
                raise_failure(output.finish_reason)
                assert isinstance(output, EncoderOutput)
                assert output.vectors is not None
                found[output.sequence_id] = output.vectors
        return [found[sequence.id] for sequence in self.sequences]

"""One sequence on its way through the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import numpy as np

from server.engine.grammar.constraints import Constraint
from server.engine.sampling import Occurrences, SamplingParams, TokenLogprobs
from server.engine.speculation import Speculation

LEVEL_SECONDS = 10.0  # of waiting are worth one level of priority


def turn(arrived: float, priority: int) -> float:
    """The moment that decides who is next."""
    return arrived + priority * LEVEL_SECONDS


class SequenceStatus(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"
    TIMEOUT = "timeout"
    ABORT = "abort"  # the client left, or the server is going down
    GRAMMAR = "grammar"  # nothing that may come next would follow its grammar
    ERROR = "error"  # of the engine


@dataclass(slots=True)
class SequenceTimes:
    """Moments of a sequence's life, in seconds of `time.perf_counter()`; None until they happen."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its continuation. Owned by the engine's thread once it has been added."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    ending_ids: frozenset[
        int
    ]  # tokens that end it: its stop ids, and the model's unless it ignores them
    times: SequenceTimes
    request_id: str = ""
    priority: int = 0  # lower is earlier
    n_sure: int = 0  # new tokens that it needs however its text may end
    deadline: float = math.inf  # in seconds of `time.perf_counter()`
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    row: int | None = None
    n_computed: int = 0  # tokens whose keys and values are in the row
    n_cached: int = 0  # those of them that the prefix cache had
    block_keys: list[bytes] = field(
        default_factory=list
    )  # the prefix cache's names of the prompt's blocks
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    occurrences: Occurrences | None = None  # the sampler's, for sequences with penalties
    speculation: Speculation | None = None  # None is one token a step
    constraint: Constraint | None = None  # what its text has to be
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = self.params.generator()

    @property
    def turn(self) -> tuple[float, int]:
        """Whose is lower is earlier. All that wait age alike, so their order never changes, and nobody starves."""
        return turn(self.times.arrived, self.priority), self.id

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def n_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def n_reserved(self) -> int:
        """Positions it may ever need: admission sets them aside, so that nothing running is preempted."""
        return len(self.prompt_ids) + self.params.max_tokens

    @property
    def is_scored(self) -> bool:
        """Whether every position of the prompt wants logits."""
        return self.params.prompt_logprobs is not None

    @property
    def scores(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of its prompt; None when it did not ask for them."""
        return self.prompt_logprobs if self.is_scored else None

    @property
    def last_token_id(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

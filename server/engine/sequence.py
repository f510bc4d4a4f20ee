"""The state of one sequence in the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import numpy as np

from kvasir.server.engine.adapters.loaded import Adapter
from kvasir.server.engine.grammar.constraints import Constraint
from kvasir.server.engine.sampling.beams import BeamSearch
from kvasir.server.engine.sampling.params import Occurrences, SamplingParams, TokenLogprobs
from kvasir.server.engine.sampling.speculation import Speculation, draft_lengths

PRIORITY_LEVEL_SECONDS = 10.0  # waiting time that offsets one level of priority
BACKGROUND_PRIORITY = 10**6  # behind every client, who may name far fewer levels


def queue_time(arrived: float, priority: int) -> float:
    """Return the moment that orders the queue: the earliest is served first."""
    return arrived + priority * PRIORITY_LEVEL_SECONDS


def is_background(priority: int) -> bool:
    """Return whether a priority is that of a batch's line, which yields to requests of clients."""
    return priority >= BACKGROUND_PRIORITY // 2


class SequenceStatus(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"
    TIMEOUT = "timeout"
    ABORT = "abort"  # the client has disconnected, or the server shuts down
    GRAMMAR = "grammar"  # no token may follow under its grammar
    ERROR = "error"  # of the engine


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its continuation, owned by the engine's thread once it has been added.

    With an encoder the prompt is the source, and target_prefix the given beginning of the target.
    ending_ids: its stop tokens, and the model's unless it ignores them. priority: lower is served
    earlier. n_certain: fewest new tokens that it needs. deadline, …_at: of `time.perf_counter()`.
    prediction: tokens that its output may have. adapter: what is added to the model's products.
    rows: one, or one for each beam. n_computed: tokens whose keys and values are in a row, those of
    a source too; n_cached: those of them that came from the prefix cache; is_restored: all of those
    are there. cache_salt, block_names: see BlockCache.names. n_reusable: blocks that need not be
    computed if they are cached; n_found: those of them that were, when last counted while it
    waited. owner: the name of its API key.
    speculation: None is one token a step.
    scores: log-probabilities of the prompt; None unless they were requested.
    """

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    ending_ids: frozenset[int]
    arrived_at: float
    request_id: str = ""
    target_prefix: list[int] = field(default_factory=list)
    cache_salt: bytes = b""
    owner: str = ""
    priority: int = 0
    n_certain: int = 0
    deadline: float = math.inf
    prediction: list[int] = field(default_factory=list)
    adapter: Adapter | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    n_computed: int = 0
    n_cached: int = 0
    is_restored: bool = False
    block_names: list[bytes] = field(default_factory=list)
    n_reusable: int = 0
    n_found: int = 0
    occurrences: Occurrences | None = None
    speculation: Speculation | None = None
    constraint: Constraint | None = None
    generator: np.random.Generator = field(init=False)
    scores: list[TokenLogprobs] | None = field(init=False)
    beams: BeamSearch | None = field(init=False)

    def __post_init__(self) -> None:
        self.generator = self.params.generator()
        self.scores = None if self.params.prompt_logprobs is None else []
        self.beams = None
        if self.params.beams is not None:
            n_given, longest = len(self.target_prefix), self.params.max_tokens
            self.beams = BeamSearch(self.params.beams, self.ending_ids, n_given, longest)

    @property
    def reusable_names(self) -> list[bytes]:
        """The names of the blocks that need not be computed if they are cached."""
        return self.block_names[: self.n_reusable]

    @property
    def queue_key(self) -> tuple[float, int]:
        """Order in the queue. It is constant, because all who wait age alike; nobody starves."""
        return queue_time(self.arrived_at, self.priority), self.id

    @property
    def prefix_salt(self) -> bytes:
        """The salt of its blocks' names: keys and values are those of its adapter's content."""
        own = b"" if self.adapter is None else b"adapter" + self.adapter.digest
        return own + self.cache_salt

    @property
    def is_background(self) -> bool:
        """True for a line of a batch."""
        return is_background(self.priority)

    @property
    def row(self) -> int | None:
        """Its row of the KV cache, the first of several; None while it has none."""
        return self.rows[0] if self.rows else None

    @property
    def given_ids(self) -> list[int]:
        """The tokens before the output in the same text."""
        return self.target_prefix or self.prompt_ids

    @property
    def n_given(self) -> int:
        """The number of tokens that are computed before the first new one."""
        return len(self.prompt_ids) + len(self.target_prefix)

    @property
    def n_after_prompt(self) -> int:
        """The most tokens that may follow the prompt."""
        return len(self.target_prefix) + self.params.max_tokens

    @property
    def token_ids(self) -> list[int]:
        """Given tokens and output."""
        return self.given_ids + self.output_ids

    @property
    def is_scored(self) -> bool:
        """True if every position of the prompt wants logits."""
        return self.scores is not None

    @property
    def hit_rate(self) -> float:
        """See Speculation; 0 where nothing is drafted."""
        is_slow = self.constraint is not None and self.constraint.is_slow
        return 0.0 if self.speculation is None or is_slow else self.speculation.hit_rate

    @property
    def last_token_id(self) -> int:
        """The newest token."""
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]


def draft(sequences: list[Sequence], *, in_one_run: bool) -> list[list[int]]:
    """Return tokens to check for each sequence of a step, none where they do not pay.

    in_one_run: see draft_lengths.
    """
    rates = [s.hit_rate for s in sequences]
    if not any(rates):
        return [[] for _ in sequences]
    rooms = [s.params.max_tokens - len(s.output_ids) - 1 for s in sequences]  # a token follows
    lengths = draft_lengths(rates, rooms, in_one_run=in_one_run)
    return [
        s.speculation.draft(length) if s.speculation else []
        for s, length in zip(sequences, lengths, strict=True)
    ]

"""One step's work, which the scheduler hands to a runner, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from kvasir.server.engine.kv.store import KVStore
from kvasir.server.engine.sequence import Sequence, SequenceStatus

StepKind = Literal["decode", "mixed", "prefill"]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens [start, start + count) of a sequence; the last `n_logits` of them want logits.

    In a beam search each of its texts has a token there, and all want logits or none.
    draft: proposed tokens, which follow the sequence's last one as if they were its own.
    """

    sequence: Sequence
    start: int
    count: int
    n_logits: int
    draft: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.count

    @property
    def row(self) -> int:
        """The sequence's row of the KV cache, the first of several."""
        return self.sequence.rows[0]

    @property
    def begins_prompt(self) -> bool:
        """True if it starts where the prefix cache ended."""
        return self.start == self.sequence.n_cached

    @property
    def completes_prompt(self) -> bool:
        """True if it ends with the prompt."""
        return self.end == len(self.sequence.prompt_ids)

    @property
    def yields_token(self) -> bool:
        """True if a new token is sampled after it."""
        sequence = self.sequence
        return self.end >= sequence.n_given and sequence.params.max_tokens > 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens to run."""
        sequence = self.sequence
        if sequence.status is SequenceStatus.RUNNING:
            return [sequence.last_token_id, *self.draft]
        return sequence.prompt_ids[self.start : self.end]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The chunks of one step. A sequence with a draft is not among the decodes.

    window: the holder of each row from 0 to the last that decodes, and of the next row if it has
    one, None for a free row. Every prefill except the last completes its prompt, or all but a rest
    after a block (see `KVRows.cut`), and wants at most one logit.
    """

    decodes: list[Chunk] = field(default_factory=list)
    window: list[Sequence | None] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    drafts: list[Chunk] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, in the order of their logits."""
        return [*self.decodes, *self.prefills, *self.drafts]


class Window:
    """The holders of rows, up to the last row that has one; None for a free row."""

    def __init__(self) -> None:
        self.holders: list[Sequence | None] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All holders, by their first row."""
        return list(dict.fromkeys(filter(None, self.holders)))

    def hold(self, row: int, sequence: Sequence) -> None:
        """Note who holds a row."""
        self.holders.extend([None] * (row + 1 - len(self.holders)))
        self.holders[row] = sequence

    def clear(self, row: int) -> None:
        """Remove a row's holder, and free rows at the end."""
        self.holders[row] = None
        while self.holders and self.holders[-1] is None:
            self.holders.pop()

    def fill_hole(self, kv: KVStore) -> None:
        """Move the last row into a hole if most rows are free: one move a step.

        A hole costs a step next to nothing, and a move as much as a short step.
        """
        if self.holders.count(None) <= len(self.holders) // 2:
            return
        source, last = len(self.holders) - 1, self.holders[-1]
        assert last is not None
        target = kv.move(source, last.n_computed)
        if target is not None:
            last.rows[last.rows.index(source)] = target
            self.hold(target, last)
            self.clear(source)


class PromptPart(NamedTuple):
    """Tokens [start, start + n_computed) of a sequence's prompt, which has n_tokens."""

    sequence_id: int
    start: int
    n_computed: int
    n_tokens: int
    arrived_at: float

    @classmethod
    def of(cls, chunk: Chunk) -> Self:
        """Return what a chunk computed."""
        sequence = chunk.sequence
        n_tokens, arrived = len(sequence.prompt_ids), sequence.arrived_at
        return cls(sequence.id, chunk.start, chunk.count, n_tokens, arrived)


@dataclass(frozen=True, slots=True)
class StepStats:
    """The figures of one step."""

    n_decode: int  # sequences that were continued
    n_prefill_tokens: int
    prefill_capacity: int  # prompt tokens that would have filled the step
    n_queried: int  # tokens of the prompts that were looked up in the prefix cache
    n_cached: int  # those that it had
    n_drafted: int
    n_accepted: int  # draft tokens that were right
    seconds: float
    n_before: float = 0.0  # tokens before one of a prompt's, the mean
    slowdown: float = 0.0  # share by which each of them slows it
    started: float = 0.0  # of the engine's clock
    prompts: tuple[PromptPart, ...] = ()  # computed in the step
    streams: tuple[int, ...] = ()  # the ids of sequences that were continued

    @property
    def kind(self) -> StepKind:
        """The work of the step."""
        if not self.n_prefill_tokens:
            return "decode"
        return "mixed" if self.n_decode else "prefill"

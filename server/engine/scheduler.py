"""Which tokens run next: every running sequence once, beside a bounded number of prompt tokens.

Iteration-level scheduling (Orca, OSDI '22) with chunked prefill (Sarathi-Serve, OSDI '24): prompts never stall a
stream. First come, first served, but for priorities, which age. A sequence that holds a row has its memory too, so
nothing that runs is preempted.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from time import perf_counter

from server.engine.kv.blocks import KVBlocks
from server.engine.kv.rows import KVRows
from server.engine.prefix_cache import PrefixCache
from server.engine.sequence import FinishReason, Sequence, SequenceStatus

_MOST_CHUNKS = (
    8  # in a step: each may be a run of its own, which reads every weight however short it is
)
_COPIES = 16  # tokens that the prefix cache copies in the time in which the model runs one; 20 to 60 were measured


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence; the last `n_logits` of them want logits.

    draft: guesses, which follow the sequence's last token as if they were its own, and are checked.
    """

    sequence: Sequence
    start: int
    count: int
    n_logits: int
    draft: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def begins_prompt(self) -> bool:
        """Whether it starts where the prefix cache left off."""
        return self.start == self.sequence.n_cached

    @property
    def completes_prompt(self) -> bool:
        return self.end == len(self.sequence.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        sequence = self.sequence
        if sequence.status is SequenceStatus.RUNNING:
            return [sequence.last_token_id, *self.draft]
        return sequence.prompt_ids[self.start : self.end]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. `window` is what sits in rows 0..n-1 of the decode run, None for a hole.

    Every prefill but the last completes its prompt; only the last may want logits of more than one token. Sequences
    with a draft are not among the decodes; they come last, each in a run of its own.
    """

    decodes: list[Chunk]
    window: list[Sequence | None]
    prefills: list[Chunk]
    drafts: list[Chunk] = field(default_factory=list)


class Scheduler:
    """Waiting, prefilling, running: who holds which row, and what each step runs.

    cache: of prompts; blocks are their own. chunk_size: most prompt tokens in a step. scoring_chunk_size: most of a
    prompt whose every position wants logits, whose buffer is bounded.
    """

    def __init__(
        self,
        rows: KVRows | KVBlocks,
        cache: PrefixCache | KVBlocks,
        *,
        chunk_size: int,
        scoring_chunk_size: int,
    ) -> None:
        self.rows = rows
        self.cache = cache
        self.chunk_size = chunk_size
        self.scoring_chunk_size = scoring_chunk_size
        self.waiting: list[Sequence] = []  # in the order of their turns
        self._window: list[Sequence | None] = []  # by row: whoever holds it

    @property
    def held(self) -> list[Sequence]:
        """Sequences that hold a row, by row."""
        return [sequence for sequence in self._window if sequence is not None]

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.held if sequence.status is SequenceStatus.RUNNING]

    @property
    def prefilling(self) -> Sequence | None:
        """Whose prompt is not finished: between two steps there is one at most."""
        return next((s for s in self.held if s.status is SequenceStatus.PREFILLING), None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._window)

    def add(self, sequence: Sequence) -> None:
        sequence.block_keys = self.cache.keys(sequence.prompt_ids)
        insort(self.waiting, sequence, key=lambda waiting: waiting.turn)

    def schedule(self) -> Batch:
        prefills = self._next_chunks()
        if not self.waiting:
            self._fill_a_hole()
        running = self.running
        decodes: list[Chunk] = []
        drafts: list[Chunk] = []
        for sequence in running:
            draft = (
                sequence.speculation.draft(sequence, len(running)) if sequence.speculation else []
            )
            count = 1 + len(draft)
            (drafts if draft else decodes).append(
                Chunk(sequence, sequence.n_computed, count, count, draft)
            )
        window = self._window[: self._window.index(decodes[-1].sequence) + 1] if decodes else []
        return Batch(decodes, window, prefills, drafts)

    def computed(self, chunk: Chunk) -> None:
        """Note that a chunk's keys and values are in its row."""
        sequence = chunk.sequence
        sequence.n_computed = chunk.end
        if sequence.status is not SequenceStatus.PREFILLING:
            return
        assert sequence.row is not None
        names = sequence.block_keys[: chunk.end // self.cache.block_size]
        self.cache.computed(sequence.row, chunk.start, chunk.end, names)
        if chunk.completes_prompt:
            self.rows.end_prompt(sequence.row)
            sequence.status = SequenceStatus.RUNNING

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state it is; its row, if it has one, is free at once."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        if sequence.row is not None:
            self._window[sequence.row] = None
            self.rows.free(sequence.row)
            sequence.row = None
            self._trim()
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.times.finished = perf_counter()

    def _next_chunks(self) -> list[Chunk]:
        """As many prompt tokens as a step may run, in the order of their turns; a scored prompt ends the list."""
        chunks: list[Chunk] = []
        room = self.chunk_size
        sequence = self.prefilling or self._admit(room, chunks)
        while sequence is not None:
            chunk = self._next_chunk(sequence, room)
            chunks.append(chunk)
            if sequence.is_scored or not chunk.completes_prompt:
                break
            room -= self._cost(chunk)
            sequence = self._admit(room, chunks)
        return chunks

    def _cost(self, chunk: Chunk) -> int:
        """What a chunk takes of a step's room: over blocks its tokens, over rows also a run and what is copied."""
        if not self.rows.runs_apart:
            return chunk.count
        n_copied = chunk.sequence.n_cached if chunk.begins_prompt else 0
        return max(chunk.count, self.chunk_size // _MOST_CHUNKS) + n_copied // _COPIES

    def _admit(self, room: int, chunks: list[Chunk]) -> Sequence | None:
        """Give the next in line a row, with what the cache has of its prompt; None where it has to wait.

        Beside `chunks` there must be room for two of its tokens, and it waits for a block that one of them computes.
        """
        sequence = self.waiting[0] if self.waiting else None
        if (
            sequence is None
            or room < min(2, len(sequence.prompt_ids))
            or self._is_computed_by(chunks, sequence)
        ):
            return None
        admitted = self.cache.admit(
            len(sequence.prompt_ids), sequence.params.max_tokens, self._reusable(sequence)
        )
        if admitted is None:
            return None
        row, sequence.n_cached = admitted
        del self.waiting[0]
        self._place(sequence, row)
        sequence.status = SequenceStatus.PREFILLING
        sequence.times.scheduled = perf_counter()
        sequence.n_computed = sequence.n_cached
        return sequence

    def _is_computed_by(self, chunks: list[Chunk], sequence: Sequence) -> bool:
        """Whether one of the chunks computes the first block that the cache lacks: a step later it can be copied."""
        keys, size = self._reusable(sequence), self.cache.block_size
        missing = keys[self.cache.count(keys) :][:1]
        return any(
            key in c.sequence.block_keys[c.start // size : c.end // size]
            for key in missing
            for c in chunks
        )

    def _reusable(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks that need not run: at least two tokens must, and all of a prompt that is scored."""
        n_tokens = 0 if sequence.is_scored else len(sequence.prompt_ids) - 2
        return sequence.block_keys[: max(0, n_tokens) // self.cache.block_size]

    def _next_chunk(self, sequence: Sequence, room: int) -> Chunk:
        n_prompt = len(sequence.prompt_ids)
        start = sequence.n_computed
        end = min(
            start + (min(room, self.scoring_chunk_size) if sequence.is_scored else room), n_prompt
        )
        if end - start == 1 and start > 0 and self.rows.runs_apart:
            start -= 1  # one-token runs take another kernel: begin a token earlier and write the same bits again
        last = int(end == n_prompt and sequence.params.max_tokens > 0)
        return Chunk(sequence, start, end - start, end - start if sequence.is_scored else last)

    def _fill_a_hole(self) -> None:
        """Shrink a decode window that is mostly holes by moving its last row into one: one move a step.

        A hole costs a step next to nothing, and a move as much as a short step.
        """
        if self._window.count(None) <= len(self._window) // 2:
            return
        last = self._window[-1]
        assert last is not None
        assert last.row is not None
        source = last.row
        target = self.rows.move(source, last.n_computed)
        if target is None:
            return
        self._window[source] = None
        self._place(last, target)
        self._trim()

    def _place(self, sequence: Sequence, row: int) -> None:
        self._window.extend([None] * (row + 1 - len(self._window)))
        self._window[row] = sequence
        sequence.row = row

    def _trim(self) -> None:
        while self._window and self._window[-1] is None:
            self._window.pop()

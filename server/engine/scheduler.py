"""The choice of what runs next: every running sequence, and a bounded number of prompt tokens.

Iteration-level scheduling (Orca, OSDI '22) with chunked prefill (Sarathi-Serve, OSDI '24): prompts
never stall a stream. Sequences are served in the order of arrival, shifted by priorities, which
age. A sequence that holds a row has all its memory, too, so nothing that runs is preempted.
"""

from __future__ import annotations

from bisect import insort
from time import perf_counter

from server.engine.batch import Chunk, StepBatch
from server.engine.kv.store import KVStore
from server.engine.sequence import Sequence, SequenceStatus
from server.engine.step_capacity import StepCapacity

_MIN_PREFILL = 2  # tokens of a prompt that run even where the prefix cache has all


class Scheduler:
    """The waiting, prefilling and running sequences, and their rows of the KV cache.

    scoring_chunk_size: most of a prompt whose every position wants logits, as their buffer is
    bounded. prefill_capacity: prompt tokens that would have filled the last step with prompts.
    """

    def __init__(self, kv: KVStore, capacity: StepCapacity, *, scoring_chunk_size: int) -> None:
        self.kv = kv
        self.capacity = capacity
        self.chunk_size = self.prefill_capacity = capacity.chunk_size
        self.scoring_chunk_size = scoring_chunk_size
        self.waiting: list[Sequence] = []  # in the order of their queue keys
        self._window: list[Sequence | None] = []  # the holder of each row

    @property
    def held(self) -> list[Sequence]:
        """Sequences that hold a row, by row."""
        return [sequence for sequence in self._window if sequence is not None]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.block_names = self.kv.cache.names(sequence.prompt_ids, sequence.cache_salt)
        insort(self.waiting, sequence, key=lambda waiting: waiting.queue_key)

    def schedule(self) -> StepBatch:
        """Choose the chunks of the next step, and admit sequences for them."""
        prefills = self._schedule_prefills()
        if not self.waiting:
            self._fill_hole()
        running = [s for s in self.held if s.status is SequenceStatus.RUNNING]
        decodes: list[Chunk] = []
        drafts: list[Chunk] = []
        for sequence in running:
            speculation = sequence.speculation
            draft = speculation.draft(sequence, len(running)) if speculation else []
            count = 1 + len(draft)
            chunk = Chunk(sequence, sequence.n_computed, count, count, draft)
            (drafts if draft else decodes).append(chunk)
        window = self._window[: decodes[-1].row + 2] if decodes else []
        return StepBatch(decodes, window, prefills, drafts)

    def record(self, chunk: Chunk, n_tokens: int) -> None:
        """Note that the first `n_tokens` of a chunk are computed and valid."""
        sequence = chunk.sequence
        sequence.n_computed = chunk.start + n_tokens
        if sequence.status is SequenceStatus.PREFILLING:
            self.kv.record_prefill(chunk.row, chunk.start, chunk.end, sequence.block_names)
            if chunk.completes_prompt:
                sequence.status = SequenceStatus.RUNNING

    def record_step(self, batch: StepBatch, seconds: float, decode_seconds: float) -> None:
        """Note the seconds of a step, and of its decodes if they ran alone, else 0."""
        n_decode = len(batch.decodes) + len(batch.drafts)
        prompts = [(chunk.count, chunk.start) for chunk in batch.prefills]
        self.capacity.record(seconds, n_decode, decode_seconds, prompts)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any state; its row, if it has one, is free at once."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        if sequence.row is not None:
            self.kv.free(sequence.row)
            self._clear(sequence.row)
            sequence.row = None
        sequence.status = SequenceStatus.FINISHED
        sequence.finished_at = perf_counter()

    def _schedule_prefills(self) -> list[Chunk]:
        """Cut chunks from prompts in order until the step is full; a scored prompt ends it."""
        chunks: list[Chunk] = []
        room = self.chunk_size
        has_streams = any(s.status is SequenceStatus.RUNNING for s in self.held)
        if has_streams and self.capacity.is_stale:
            return []
        # At most one sequence has an unfinished prompt between two steps.
        sequence = next((s for s in self.held if s.status is SequenceStatus.PREFILLING), None)
        sequence = sequence or self._admit(room, chunks)
        if sequence is not None and has_streams:
            room = self.capacity.beside_streams(sequence.n_computed)
        self.prefill_capacity = room
        while sequence is not None:
            limit = min(room, self.scoring_chunk_size) if sequence.is_scored else room
            end = min(sequence.n_computed + limit, len(sequence.prompt_ids))
            # A short rest starts earlier and writes the same bits again.
            start = max(0, min(sequence.n_computed, end - self.kv.min_chunk))
            count, is_last = end - start, end == len(sequence.prompt_ids)
            n_logits = int(is_last and sequence.params.max_tokens > 0)
            chunk = Chunk(sequence, start, count, count if sequence.is_scored else n_logits)
            chunks.append(chunk)
            if sequence.is_scored or not is_last:
                break
            room -= self._cost(chunk)
            sequence = self._admit(room, chunks)
        return chunks

    def _cost(self, chunk: Chunk) -> int:
        """Return the share of a step that a chunk takes, in tokens."""
        n_copied = chunk.sequence.n_cached if chunk.begins_prompt else 0
        return self.kv.chunk_cost(chunk.count, n_copied, self.chunk_size)

    def _admit(self, room: int, chunks: list[Chunk]) -> Sequence | None:
        """Admit the next sequence of the queue; None if it has to wait.

        It waits for a row, for a step with room for two of its tokens, and for a block that one of
        `chunks` computes: a step later that can be reused.
        """
        if not self.waiting:
            return None
        sequence, size = self.waiting[0], self.kv.cache.block_size
        n_prompt = len(sequence.prompt_ids)
        if room < min(_MIN_PREFILL, n_prompt):
            return None
        n_reusable = 0 if sequence.is_scored else max(0, n_prompt - _MIN_PREFILL) // size
        names = sequence.block_names[:n_reusable]
        missing = names[self.kv.cache.count(names) :][:1]
        computed = (c.sequence.block_names[c.start // size : c.end // size] for c in chunks)
        if missing and any(missing[0] in names for names in computed):
            return None
        admitted = self.kv.admit(n_prompt, sequence.params.max_tokens, names)
        if admitted is None:
            return None
        del self.waiting[0]
        row, sequence.n_cached = admitted
        self._place(sequence, row)
        sequence.status = SequenceStatus.PREFILLING
        sequence.scheduled_at = perf_counter()
        sequence.n_computed = sequence.n_cached
        return sequence

    def _fill_hole(self) -> None:
        """Move the last row of a mostly empty decode window into a hole: one move a step.

        A hole costs a step next to nothing, and a move as much as a short step.
        """
        movable = self.kv.movable
        if movable is None or self._window.count(None) <= len(self._window) // 2:
            return
        source, last = len(self._window) - 1, self._window[-1]
        assert last is not None
        target = movable.move(source, last.n_computed)
        if target is not None:
            self._place(last, target)
            self._clear(source)

    def _place(self, sequence: Sequence, row: int) -> None:
        self._window.extend([None] * (row + 1 - len(self._window)))
        self._window[row] = sequence
        sequence.row = row

    def _clear(self, row: int) -> None:
        """Remove a row's holder, and free rows at the end of the window."""
        self._window[row] = None
        while self._window and self._window[-1] is None:
            self._window.pop()

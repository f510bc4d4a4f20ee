"""The choice of what runs next: every running sequence, and a bounded number of prompt tokens.

Iteration-level scheduling (Orca, OSDI '22) with chunked prefill (Sarathi-Serve, OSDI '24): prompts
never stall a stream, nor, by their order (`prompt_order.py`), each other. A sequence that holds a
row has all its memory, too, so nothing that runs is preempted, except sequences in the background:
beside those of clients few may run, and the others end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.batch import Chunk, StepBatch, Window
from kvasir.server.engine.kv.store import KVStore
from kvasir.server.engine.prompt_order import PromptOrder, seconds_left, tokens_done
from kvasir.server.engine.sequence import Sequence, SequenceStatus, draft
from kvasir.server.engine.step_capacity import COPIED_PER_COMPUTED, StepCapacity, StepRoom

_MIN_PREFILL = 2  # tokens of a prompt that run even where the prefix cache has all
_LONG = 4  # chunks left of a prompt whose end one step more hardly delays
# Beside streams of clients: streams for each that runs in the background beside the first, and
# steps for each that computes a prompt in the background. So fewer than 1 % of steps do.
_STREAMS_PER_BACKGROUND = 8
_STEPS_PER_BACKGROUND = 128


class Scheduler:
    """The waiting, prefilling and running sequences, and their rows of the KV cache.

    scoring_chunk_size: most of a prompt whose every position wants logits, as their buffer is
    bounded. prefill_capacity: prompt tokens that would have filled the last step with prompts.
    on_blocks: told of a sequence for which the prefix cache may have changed.
    """

    def __init__(self, kv: KVStore, capacity: StepCapacity, *, scoring_chunk_size: int) -> None:
        self.kv = kv
        self.capacity = capacity
        self.chunk_size = self.prefill_capacity = capacity.chunk_size
        self.scoring_chunk_size = scoring_chunk_size
        self.on_blocks: Callable[[Sequence], None] = lambda _: None
        self.waiting: list[Sequence] = []  # the oldest first, by their queue keys
        self.order = PromptOrder(self._seconds_left)
        self._window = Window()
        self._is_crowded = False  # no room for a client's sequence in the last step
        self._copied_share = 0  # of the last step, in tokens
        self._n_steps = 0  # with streams of clients, since a prompt in the background

    @property
    def held(self) -> list[Sequence]:
        """Sequences that hold a row, by their first."""
        return self._window.sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.block_names = self.kv.cache.names(sequence.prompt_ids, sequence.prefix_salt)
        n_tokens = 0 if sequence.is_scored else max(0, len(sequence.prompt_ids) - _MIN_PREFILL)
        n_blocks = n_tokens // self.kv.cache.block_size
        sequence.n_reusable = min(len(sequence.block_names), n_blocks)
        insort(self.waiting, sequence, key=lambda waiting: waiting.queue_key)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, if it has come that far."""
        with suppress(ValueError):
            self.waiting.remove(sequence)

    def preempted(self) -> list[Sequence]:
        """Return the sequences in the background that must end before the next step."""
        background = sorted(
            (s for s in self.held if s.is_background), key=lambda held: held.queue_key
        )
        client_waits = bool(self.waiting) and not self.waiting[0].is_background
        n_kept = min(self._most_in_background, len(background) - (self._is_crowded & client_waits))
        self._is_crowded = False
        return background[max(0, n_kept) :]

    @property
    def _most_in_background(self) -> int:
        """The number of sequences that may run in the background beside those of clients."""
        n_clients = sum(not sequence.is_background for sequence in self.held)
        most = 1 + n_clients // _STREAMS_PER_BACKGROUND
        return most if n_clients else self.kv.max_num_seqs

    def schedule(self, now: float) -> StepBatch:
        """Choose the chunks of the step that begins now, and admit sequences for them."""
        self._copied_share = 0
        prefills = self._schedule_prefills(now)
        if not self.waiting or self.waiting[0].is_background:
            self._window.fill_hole(self.kv)
        running = [s for s in self.held if s.status is SequenceStatus.RUNNING]
        decodes: list[Chunk] = []
        drafts: list[Chunk] = []
        drafted = draft(running, in_one_run=self.kv.steps_are_runs)
        for sequence, tokens in zip(running, drafted, strict=True):
            count = 1 + len(tokens)
            n_logits = count if sequence.beams is None else len(sequence.beams.running)
            if sequence.n_computed + count < sequence.n_given:  # of a target's beginning
                n_logits = 0
            chunk = Chunk(sequence, sequence.n_computed, count, n_logits, tokens)
            (drafts if tokens else decodes).append(chunk)
        window = self._window.holders[: decodes[-1].row + 2] if decodes else []
        return StepBatch(decodes, window, prefills, drafts)

    def record(self, chunk: Chunk, n_tokens: int) -> None:
        """Note that the first `n_tokens` of a chunk are computed and valid."""
        sequence = chunk.sequence
        sequence.n_computed = chunk.start + n_tokens
        if sequence.status is SequenceStatus.PREFILLING:
            self.kv.record_prefill(chunk.row, chunk.start, chunk.end, sequence.block_names)
            self.on_blocks(sequence)
            if chunk.completes_prompt:
                sequence.status = SequenceStatus.RUNNING

    def record_step(self, batch: StepBatch, seconds: float, decode_seconds: float) -> None:
        """Note the seconds of a step, and of its decodes if they ran alone, else 0."""
        n_decode = len(batch.decodes) + len(batch.drafts)
        prompts = [(chunk.count, chunk.start) for chunk in batch.prefills]
        if prompts and self._copied_share:
            prompts.append((self._copied_share, 0))
        self.capacity.record(seconds, n_decode, decode_seconds, prompts)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any state; its rows, if it has any, are free at once."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        for row in sequence.rows:
            self.kv.free(row)
            self._window.clear(row)
        sequence.rows = []
        sequence.status = SequenceStatus.FINISHED
        sequence.finished_at = perf_counter()

    def _schedule_prefills(self, now: float) -> list[Chunk]:
        """Cut chunks from prompts in their order until the step is full.

        The first chunk has its least size in any case; others have to fit.
        """
        unfinished = [s for s in self.held if s.status is SequenceStatus.PREFILLING]
        running = SequenceStatus.RUNNING
        has_streams = any(s.status is running and not s.is_background for s in self.held)
        self._n_steps = self._n_steps + 1 if has_streams else _STEPS_PER_BACKGROUND
        self._is_crowded = not self.kv.free_rows
        prompts = unfinished if self._is_crowded else [*unfinished, *self.waiting]
        if not prompts or (has_streams and self.capacity.is_stale):
            return []
        oldest = min(prompts[: len(unfinished) + 1], key=lambda prompt: prompt.queue_key)
        chunks: list[Chunk] = []
        begun: list[Sequence] = []  # whose prompts the step computes or copies
        room, may_admit = self.capacity.room(has_streams=has_streams), True
        for place in self.order.first_to_last(prompts):
            sequence = self._maker(place, unfinished + begun) or place
            if sequence in begun:
                continue
            if begun and not self._fits(sequence, room):
                break
            if chunks and not has_streams and self._delays(sequence, chunks[-1]):
                break
            if sequence.status is SequenceStatus.WAITING:
                may_admit = may_admit and self._admit(sequence, begun)
            if not sequence.rows or (sequence.is_background and not self._is_due):
                continue
            if not begun:
                self.order.begins_with(place, oldest)
            if has_streams and sequence.is_background:
                self._n_steps = 0
            chunk = self._next_chunk(sequence, room, is_first=not begun, has_streams=has_streams)
            begun.append(sequence)
            if chunk is not None:
                chunks.append(chunk)
                if chunk.completes_prompt and not sequence.is_scored:
                    self.order.completes(sequence, now)
        return chunks

    def _next_chunk(
        self, sequence: Sequence, room: StepRoom, *, is_first: bool, has_streams: bool
    ) -> Chunk | None:
        """Return a prompt's next chunk, or None if copying what is cached takes its time.

        Without streams nothing is gained by copying in slices. A scored prompt, and one that goes
        on in the next step, leave no room for others.
        """
        n_left, copied = len(sequence.prompt_ids) - sequence.n_computed, 0
        if not sequence.is_restored:
            limit = room.limit(0, n_left, is_first=is_first) if has_streams else n_left
            copied = self._restore(sequence, limit)
            n_left -= copied
            copied //= COPIED_PER_COMPUTED
            self._copied_share += copied
            if has_streams:
                room.take(0, 0, copied)
                copied = 0
            if not sequence.is_restored:
                return None
        limit = room.limit(sequence.n_computed, n_left, is_first=is_first)
        chunk = self._cut(sequence, limit)
        if is_first:
            self.prefill_capacity = limit + self._copied_share
        if sequence.is_scored or (n_left > limit and not chunk.completes_prompt):
            room.tokens = 0
        else:
            share = self.kv.step_share(chunk.count, self.chunk_size)
            room.take(chunk.count, chunk.start, share + copied)
        return chunk

    def _restore(self, sequence: Sequence, limit: int) -> int:
        """Copy what the prefix cache has of a prompt in the time of computing `limit` tokens.

        Returns the number of tokens. The next steps go on, until there are no more.
        """
        n_done, names = sequence.n_computed, sequence.reusable_names
        most = limit * COPIED_PER_COMPUTED
        n_new = min(self.kv.restore(row, names, n_done, most) for row in sequence.rows) - n_done
        self.on_blocks(sequence)
        sequence.n_cached = sequence.n_computed = n_done + n_new
        sequence.is_restored = n_new + self.kv.cache.block_size <= most or not n_new
        return n_new

    def _cut(self, sequence: Sequence, limit: int) -> Chunk:
        """Return a chunk of at most `limit` tokens, or of as few as may run at once."""
        limit = min(limit, self.scoring_chunk_size) if sequence.is_scored else limit
        n_done, n_prompt = sequence.n_computed, len(sequence.prompt_ids)
        start, end = self.kv.cut(sequence.rows[0], n_done, limit, n_prompt)
        n_logits = int(end == sequence.n_given and sequence.params.max_tokens > 0)
        count = end - start
        return Chunk(sequence, start, count, count if sequence.is_scored else n_logits)

    def _fits(self, sequence: Sequence, room: StepRoom) -> bool:
        """Return whether a step has room for the shortest chunk of a prompt."""
        n_prompt, n_done = len(sequence.prompt_ids), sequence.n_computed
        shortest = min(max(_MIN_PREFILL, self.kv.min_chunk), n_prompt)
        return room.limit(n_done, n_prompt - n_done, is_first=False) >= shortest

    def _delays(self, sequence: Sequence, chunk: Chunk) -> bool:
        """Return whether a first token would wait for a part of a prompt that goes on for long.

        One in the background goes on beside others, as no turn of the oldest is its own.
        """
        n_left = len(sequence.prompt_ids) - tokens_done(sequence, self.kv.cache.block_size)
        is_long = n_left >= _LONG * self.chunk_size
        return chunk.yields_token and is_long and not sequence.is_background

    def _seconds_left(self, sequences: list[Sequence]) -> NDArray[np.float64]:
        return seconds_left(sequences, self.kv.cache, self.capacity.cost)

    def _maker(self, sequence: Sequence, unfinished: list[Sequence]) -> Sequence | None:
        """Return the unfinished prompt that computes the next block of one that waits.

        That one is computed in its place: once it has come so far, the block can be reused.
        """
        if sequence.status is not SequenceStatus.WAITING or not unfinished:
            return None
        names, size = sequence.reusable_names, self.kv.cache.block_size
        missing = names[self.kv.cache.count(names) :][:1]
        for maker in unfinished if missing else ():
            is_client = sequence.is_background or not maker.is_background
            if is_client and missing[0] in maker.block_names[maker.n_computed // size :]:
                return maker
        return None

    @property
    def _is_due(self) -> bool:
        """True if a prompt in the background may run in this step."""
        return self._n_steps >= _STEPS_PER_BACKGROUND

    def _admit(self, sequence: Sequence, begun: list[Sequence]) -> bool:
        """Give a waiting sequence its rows; return False if it has to wait for them.

        In the background it also waits for others, see `_may_begin`.
        """
        if sequence.is_background and not self._may_begin(begun):
            return False
        names = sequence.reusable_names
        for _ in range(sequence.params.n_rows):
            admitted = self.kv.admit(len(sequence.prompt_ids), sequence.n_after_prompt, names)
            self.on_blocks(sequence)
            if admitted is None:
                self._is_crowded = not sequence.is_background
                for row in sequence.rows:
                    self.kv.free(row)
                sequence.rows = []
                return False
            row, sequence.n_cached = admitted
            sequence.rows.append(row)
        self.waiting.remove(sequence)
        for row in sequence.rows:
            self._window.hold(row, sequence)
        sequence.status = SequenceStatus.PREFILLING
        sequence.scheduled_at = perf_counter()
        sequence.n_computed = sequence.n_cached
        return True

    def _may_begin(self, begun: list[Sequence]) -> bool:
        """Return whether a sequence may begin in the background, beside those of the step."""
        background = [sequence for sequence in self.held if sequence.is_background]
        return (
            self._is_due
            and len(background) < self._most_in_background
            and all(s in begun for s in background if s.status is SequenceStatus.PREFILLING)
        )

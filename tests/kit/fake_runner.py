"""A model that is a function of the token ids, as a Runner whose steps a test can hold.

It keeps token ids in real rows of the KV cache and reads the prefix back from them, so a wrongly
moved, shared or overwritten row shows in the tokens.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np

from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.kv.rows import KVRows
from kvasir.server.engine.sampling.logits import Logits
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.sequence import SequenceStatus

TIMEOUT = 120.0  # seconds until a test that waits in vain fails, on a busy machine
_FORCED = 50.0  # a logit that wins


class FakeRunner:
    """Logits at a position are drawn from a generator keyed by a hash of the tokens up to it.

    Like the real model, it must not get a chunk of one token unless that is the whole prompt.

    budget_tokens: None is enough for all rows. int8: round running rows; for ids below 128.
    next_token: returns the id to make likeliest after a prefix, or None to leave the logits.
    error: raised by the next run, when set.
    """

    max_source_len = None
    drafts_exactly = False

    def __init__(
        self,
        vocab_size: int,
        *,
        max_model_len: int = 64,
        max_num_seqs: int = 4,
        budget_tokens: int | None = None,
        int8: bool = False,
        next_token: Callable[[list[int]], int | None] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        if budget_tokens is None:
            budget_tokens = 5 * max_num_seqs * max_model_len
        self.kv = KVRows(
            KVShape(1, 1, 1),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            budget_tokens=budget_tokens,
            dtype=np.int8 if int8 else np.float32,
        )
        self.decode_seconds = 0.0
        self.next_token = next_token
        self.error: BaseException | None = None
        # (decodes and drafts, prefill tokens) of every run
        self.batches: list[tuple[int, int]] = []
        self._permits: int | None = None  # runs that may pass; None is all
        self._held = False
        self._changed = threading.Condition()

    def hold(self) -> None:
        """Let no run pass until `allow` or `release`."""
        with self._changed:
            self._permits = 0

    def allow(self, runs: int = 1) -> None:
        with self._changed:
            self._permits = (self._permits or 0) + runs
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def fail(self) -> None:
        """Let the next runs raise."""
        self.error = RuntimeError("a kernel failed")
        self.release()

    def wait_until_held(self) -> None:
        """Return when a run waits and no permit is left."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held and self._permits == 0, TIMEOUT)

    def run(self, batch: StepBatch) -> Logits:
        self._pass_gate()
        if self.error is not None:
            raise self.error
        n_decode = len(batch.decodes) + len(batch.drafts)
        self.batches.append((n_decode, sum(chunk.count for chunk in batch.prefills)))
        assert all(
            chunk.count >= min(2, len(chunk.sequence.prompt_ids)) for chunk in batch.prefills
        ), "other bits"
        self._scribble(batch)
        rows = [row for chunk in batch.chunks for row in self._run_chunk(chunk)]
        return Logits.of(np.array(rows, dtype=np.float32).reshape(-1, self.vocab_size))

    def logits(self, prefix: list[int]) -> Floats:
        """The oracle: logits [vocab] of the token that follows `prefix`."""
        digest = hashlib.blake2b(
            np.array(prefix, dtype=np.int64).tobytes(), digest_size=16
        ).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        row = generator.standard_normal(self.vocab_size, dtype=np.float32) * 3
        forced = self.next_token(prefix) if self.next_token else None
        if forced is not None:
            row[forced] = _FORCED
        return row

    def greedy(self, prompt_ids: list[int], n: int) -> list[int]:
        """The oracle: the n likeliest tokens that follow, one after the other."""
        ids = list(prompt_ids)
        for _ in range(n):
            ids.append(int(self.logits(ids).argmax()))
        return ids[len(prompt_ids) :]

    def _pass_gate(self) -> None:
        with self._changed:
            self._held = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permits is None or self._permits > 0)
            self._held = False
            if self._permits is not None:
                self._permits -= 1

    def _scribble(self, batch: StepBatch) -> None:
        """Write one token past the end of the rows that do not decode, as the decode run does."""
        decoding = {chunk.sequence for chunk in batch.decodes}
        for row, sequence in enumerate(batch.window):
            if sequence not in decoding:
                self.kv.running.array[0, row, 0, sequence.n_computed if sequence else 0, 0] = -1

    def _run_chunk(self, chunk: Chunk) -> list[Floats]:
        row = chunk.row
        if chunk.sequence.status is SequenceStatus.RUNNING:
            cache = self.kv.running.array[0, row, 0, :, 0]  # [n_positions]
        else:
            cache = self.kv.prompts.array[0, self.kv.prompt_row(row), 0, :, 0]
        cache[chunk.start : chunk.end] = [*chunk.sequence.token_ids, *chunk.draft][
            chunk.start : chunk.end
        ]
        ids: list[int] = cache[: chunk.end].astype(np.int64).tolist()
        return [self.logits(ids[: p + 1]) for p in range(chunk.end - chunk.n_logits, chunk.end)]

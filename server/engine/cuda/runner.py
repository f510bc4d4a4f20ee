"""The model on CUDA: a batch is one run of packed tokens over blocks of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from server.engine.kv.blocks import KVBlocks
from server.engine.sampling import Floats, SamplingParams
from server.engine.scheduler import Batch, Chunk
from server.engine.sequence import Sequence, SequenceTimes

Inputs = Mapping[str, NDArray[Any]]


class PagedModel(Protocol):
    """A graph and its blocks: `server.engine.session.CudaModel`, or numpy in tests."""

    def run(self, inputs: Inputs) -> Floats:
        """Logits [rows, vocab]. inputs: what `export.paged_graph` tables, without the blocks."""
        ...


class PagedRunner:
    """Decodes, chunks of prompts and drafts of all sequences in one run."""

    def __init__(
        self, model: PagedModel, blocks: KVBlocks, *, max_model_len: int, vocab_size: int
    ) -> None:
        self.rows = blocks
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_seconds = 0.0  # spent inside ONNX Runtime so far
        self._model = model

    def warm_up(self, n_tokens: int = 1) -> None:
        """Run a chunk of so many tokens and a decode step, so that the first request pays for neither."""
        admitted = self.rows.admit(n_tokens, 1, [])
        assert admitted is not None
        params = SamplingParams(max_tokens=1)
        first = Sequence(
            -1, [0] * n_tokens, params, frozenset(), SequenceTimes(0.0), row=admitted[0]
        )
        self._run([Chunk(first, start=0, count=n_tokens, n_logits=1)], [first.prompt_ids])
        self._run([Chunk(first, start=n_tokens, count=1, n_logits=1)], [[0]])
        self.rows.free(admitted[0])

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocab]: a row per decode, then each prefill's, then each draft's, in order."""
        chunks = [*batch.decodes, *batch.prefills, *batch.drafts]
        return self._run(chunks, [chunk.token_ids for chunk in chunks])

    def _run(self, chunks: list[Chunk], token_ids: list[list[int]]) -> Floats:
        inputs, n_logits = self._pack(chunks, token_ids)
        started = perf_counter()
        logits = self._model.run(inputs)
        self.model_seconds += perf_counter() - started
        return logits[:n_logits]

    def _pack(self, chunks: list[Chunk], token_ids: list[list[int]]) -> tuple[Inputs, int]:
        rows = [_row(chunk) for chunk in chunks]
        starts = np.cumsum([0, *(chunk.count for chunk in chunks)], dtype=np.int32)
        longest = max(chunk.end for chunk in chunks)
        wanted = [
            np.arange(end - chunk.n_logits, end)
            for chunk, end in zip(chunks, starts[1:].tolist(), strict=True)
        ]
        logits_indices = np.concatenate(wanted).astype(np.int64)
        inputs = {
            "input_ids": np.concatenate(token_ids).astype(np.int64),
            "position_ids": np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]),
            "cumulative_sequence_length": starts,
            "past_seqlens": np.array([chunk.start for chunk in chunks], dtype=np.int32),
            "block_table": self.rows.table[rows, : -(-longest // self.rows.block_size)],
            "slot_mapping": np.concatenate(
                [
                    self.rows.slots(row, chunk.start, chunk.end)
                    for row, chunk in zip(rows, chunks, strict=True)
                ]
            ),
            # Upper bounds, and a lower one, without which long contexts of few sequences are not split over the GPU.
            "attention_metadata": np.array(
                [max(chunk.count for chunk in chunks), longest, longest], dtype=np.int32
            ),
            # A product of no rows is not put to the test: a row that nobody asked for is dropped again.
            "logits_indices": logits_indices
            if len(logits_indices)
            else np.zeros(1, dtype=np.int64),
        }
        return inputs, len(logits_indices)


def _row(chunk: Chunk) -> int:
    assert chunk.sequence.row is not None
    return chunk.sequence.row

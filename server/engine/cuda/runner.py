"""The model on CUDA: a batch is one run of packed tokens over blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from server.engine.batch import StepBatch
from server.engine.kv.blocks import KVBlocks
from server.engine.sampling import Floats

Inputs = Mapping[str, NDArray[Any]]


class PagedModel(Protocol):
    """A graph and its blocks: `DeviceModel`, or numpy in tests."""

    def run(self, inputs: Inputs) -> Floats:
        """Return logits [rows, vocab]. inputs: as in `export.paged_graph`, without the blocks."""


class PagedRunner:
    """A runner of decodes, chunks of prompts and drafts of all sequences in one run."""

    max_source_len = None

    def __init__(
        self, model: PagedModel, blocks: KVBlocks, *, max_model_len: int, vocab_size: int
    ) -> None:
        self.kv = blocks
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_seconds = 0.0  # spent in ONNX Runtime so far
        self.decode_seconds = 0.0
        self._model = model

    def run(self, batch: StepBatch) -> Floats:
        """See Runner."""
        chunks = batch.chunks
        starts = np.cumsum([0, *(chunk.count for chunk in chunks)], dtype=np.int32)
        longest = max(chunk.end for chunk in chunks)
        indices = [
            index
            for chunk, end in zip(chunks, starts[1:].tolist(), strict=True)
            for index in range(end - chunk.n_logits, end)
        ]
        rows = [chunk.row for chunk in chunks]
        slots = [self.kv.slots(chunk.row, chunk.start, chunk.end) for chunk in chunks]
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        # Upper bounds of chunks and contexts, and a lower bound of the longest context, without
        # which long contexts of few sequences are not split over the GPU.
        metadata = [max(chunk.count for chunk in chunks), longest, longest]
        inputs: Inputs = {
            "input_ids": np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64),
            "position_ids": np.concatenate(positions),
            "cumulative_sequence_length": starts,
            "past_seqlens": np.array([chunk.start for chunk in chunks], dtype=np.int32),
            "block_table": self.kv.table[rows, : -(-longest // self.kv.block_size)],
            "slot_mapping": np.concatenate(slots),
            "attention_metadata": np.array(metadata, dtype=np.int32),
            # The graph is never asked for no logits: a row that no chunk wants is dropped.
            "logits_indices": np.array(indices or [0], dtype=np.int64),
        }
        started = perf_counter()
        logits = self._model.run(inputs)
        seconds = perf_counter() - started
        self.model_seconds += seconds
        self.decode_seconds += 0.0 if batch.prefills else seconds
        return logits

"""The model on a GPU: a batch is one run of packed tokens over blocks of the KV cache."""

from __future__ import annotations

from itertools import chain
from time import perf_counter

import numpy as np

from kvasir.model.directory import INVERSE_TEMPERATURES_INPUT
from kvasir.server.engine.adapters.loaded import GraphAdapters
from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.gpu.graphs import Inputs
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.model_runner import group_neighbours
from kvasir.server.engine.sampling.logits import Logits

_DENSE_TOKENS = 2**14  # of one layer: 64 MiB at 8 heads of 128 channels in 16 bits


class PagedRunner:
    """A runner of decodes, chunks of prompts and drafts of all sequences in one run.

    rounds_kv: keys and values have 8 bits. A run of more than decodes makes them dense floats,
    [sequences, tokens of the longest], so decodes run apart, and the others in small groups.
    drafts_exactly: see Runner. adapters: how the graph takes them, if it does.
    """

    max_source_len = None

    def __init__(
        self,
        model: DeviceModel,
        blocks: KVBlocks,
        *,
        max_model_len: int,
        vocab_size: int,
        rounds_kv: bool = False,
        drafts_exactly: bool = False,
        adapters: GraphAdapters | None = None,
    ) -> None:
        self.kv = blocks
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_seconds = 0.0  # spent in ONNX Runtime so far
        self.decode_seconds = 0.0
        self.model = model
        self.drafts_exactly = drafts_exactly
        self.adapters = adapters
        self._rounds_kv = rounds_kv

    def run(self, batch: StepBatch) -> Logits:
        """See Runner."""
        if not self._rounds_kv:
            return self._run(batch.chunks, 0, decodes=not batch.prefills)
        groups, n_done = group_neighbours([*batch.prefills, *batch.drafts], _fits_dense), 0
        for chunks in [batch.decodes, *groups] if batch.decodes else groups:
            decodes = chunks is batch.decodes or not batch.prefills
            logits = self._run(chunks, n_done, decodes=decodes)
            n_done += sum(chunk.n_logits for chunk in chunks)
        return logits

    def _run(self, chunks: list[Chunk], first_row: int, *, decodes: bool) -> Logits:
        """Run a part of a step. decodes: its time is that of decodes and drafts."""
        counts = np.array([chunk.count for chunk in chunks])
        n_logits = np.array([chunk.n_logits for chunk in chunks])
        past = np.array([chunk.start for chunk in chunks])
        rows = np.array([chunk.row for chunk in chunks])
        ends = counts.cumsum()
        longest = int((past + counts).max())
        # A token's place in the run, less that of its chunk's first, plus that one's position.
        positions = np.arange(ends[-1]) + np.repeat(past - ends + counts, counts)
        indices = np.arange(n_logits.sum()) + np.repeat(ends - n_logits.cumsum(), n_logits)
        ids = chain.from_iterable(chunk.token_ids for chunk in chunks)
        temperatures = [chunk.sequence.params.temperature or 1.0 for chunk in chunks]
        inverse = np.repeat(1 / np.array(temperatures), n_logits).astype(np.float32)[:, None]
        # Upper bounds of chunks and contexts, and a lower bound of the longest context, without
        # which long contexts of few sequences are not split over the GPU.
        metadata = [counts.max(), longest, longest]
        inputs: Inputs = {
            "input_ids": np.fromiter(ids, np.int64, ends[-1]),
            "position_ids": positions,
            "cumulative_sequence_length": np.array([0, *ends], dtype=np.int32),
            "past_seqlens": past.astype(np.int32),
            "block_table": self.kv.table[rows, : -(-longest // self.kv.block_size)],
            "slot_mapping": self.kv.slots(np.repeat(rows, counts), positions),
            "attention_metadata": np.array(metadata, dtype=np.int32),
            # The graph is never asked for no logits; nobody reads a row that no chunk wants.
            "logits_indices": indices if len(indices) else np.zeros(1, dtype=np.int64),
            INVERSE_TEMPERATURES_INPUT: inverse if len(indices) else np.ones((1, 1), np.float32),
        }
        if self.adapters is not None:
            of_chunks = [chunk.sequence.adapter for chunk in chunks]
            inputs = {**inputs, **self.adapters.inputs(of_chunks, counts)}
        started = perf_counter()
        logits = self.model.run(inputs, first_row)
        seconds = perf_counter() - started
        self.model_seconds += seconds
        self.decode_seconds += seconds if decodes else 0.0
        return logits


def _fits_dense(chunks: list[Chunk]) -> bool:
    """Return whether chunks times the longest one's tokens stay within _DENSE_TOKENS."""
    return len(chunks) * max(chunk.end for chunk in chunks) <= _DENSE_TOKENS

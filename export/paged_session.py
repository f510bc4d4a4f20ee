"""The exported CUDA graph for `export.verify`, which asks for rows: they are packed into blocks, run by run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.bundle import KV_BLOCK_SIZE
from model.config import DecoderConfig
from server.engine.cuda.runner import PagedModel

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class PagedSession:
    """As `export.verify.GraphSession`. make_model: the graph with so many blocks, which a GPU holds, or numpy."""

    rounds_cache = False

    def __init__(
        self,
        config: DecoderConfig,
        make_model: Callable[[int], PagedModel],
        block_size: int = KV_BLOCK_SIZE,
    ) -> None:
        self._vocab_size = config.vocab_size
        self._make_model = make_model
        self._block_size = block_size

    @staticmethod
    def require() -> None:
        """Raises NoDeviceError where there is no hope of a GPU."""
        from server.engine.cuda.session import require_cuda  # noqa: PLC0415  imports ONNX Runtime

        require_cuda()

    @classmethod
    def open(cls, path: Path, config: DecoderConfig) -> PagedSession:
        """On the GPU. Raises NoDeviceError where there is none."""
        from server.engine.cuda.session import DeviceModel, open_cuda_session  # noqa: PLC0415  loads CUDA's libraries

        session = open_cuda_session(path)
        return cls(config, lambda n_blocks: DeviceModel(session, n_blocks))

    def clear(self, batch: int, n_positions: int) -> None:
        n_each = -(-n_positions // self._block_size)
        self._model = self._make_model(batch * n_each)
        self._table = np.arange(batch * n_each, dtype=np.int32).reshape(batch, n_each)[::-1]

    def run(
        self, tokens: Ids, lengths: Sequence[int], *, decode: bool = False, with_logits: bool = True
    ) -> Floats:
        """Append tokens [batch, sequence], of which row b then holds lengths[b]; logits [batch, sequence, vocab].

        What pads a row on the right is not run, and has logits of 0. decode: of no consequence here.
        """
        del decode
        starts = np.maximum(np.array(lengths) - tokens.shape[1], 0)
        counts = np.array(lengths) - starts
        real = np.arange(tokens.shape[1]) < counts[:, None]  # [batch, sequence]
        positions = (starts[:, None] + np.arange(tokens.shape[1]))[real]
        rows = np.nonzero(real)[0]
        slots = (
            self._table[rows, positions // self._block_size] * self._block_size
            + positions % self._block_size
        )
        logits = self._model.run(
            {
                "input_ids": tokens[real],
                "position_ids": positions,
                "cumulative_sequence_length": np.cumsum([0, *counts], dtype=np.int32),
                "past_seqlens": starts.astype(np.int32),
                "block_table": self._table,
                "slot_mapping": slots.astype(np.int32),
                "attention_metadata": np.array(
                    [counts.max(), max(lengths), max(lengths)], dtype=np.int32
                ),
                "logits_indices": np.arange(len(rows) if with_logits else 1),
            }
        )
        shaped = np.zeros((*tokens.shape, self._vocab_size), dtype=np.float32)
        if with_logits:
            shaped[real] = logits
        return shaped

    def run_in_chunks(self, tokens: Ids, ends: Sequence[int]) -> Iterator[Floats]:
        """One row, from empty, cut at `ends`; each chunk's logits [tokens, vocab]."""
        self.clear(1, len(tokens))
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield self.run(tokens[None, start:end], [end])[0]

"""The graph in one session, its rows packed into blocks: by GPUs, or operators of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvasir.export.verification.segments import Case
from kvasir.export.verification.verify import VerificationError
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import INVERSE_TEMPERATURES_INPUT, KV_BLOCK_SIZE, Device
from kvasir.model.platform.progress import Progress, no_progress, with_progress
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.gpu.session import BACKENDS
from kvasir.server.engine.packed import find_packed_model
from kvasir.server.engine.sampling.logits import Candidates

__all__ = ["PagedSession", "require_device"]

_SUM_ERROR = 1e-3  # of a logarithm

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def require_device(device: Device) -> None:
    """Raise NoDeviceError where there is no such GPU."""
    BACKENDS[device].require()


class PagedSession:
    """A graph of `export.graphs.paged`; make_model: returns it with so many blocks."""

    def __init__(
        self,
        config: TransformerConfig,
        make_model: Callable[[int], DeviceModel],
        block_size: int = KV_BLOCK_SIZE,
    ) -> None:
        self._vocab_size = config.vocab_size
        self._make_model = make_model
        self._block_size = block_size

    @classmethod
    def open(cls, path: Path, config: TransformerConfig, device: Device = "cuda") -> PagedSession:
        """Load a graph onto the GPU. Raises NoDeviceError where there is none."""
        backend = BACKENDS[device]
        session = backend.open_session(path)
        return cls(config, partial(DeviceModel, session, bind_blocks=backend.bind_blocks))

    @classmethod
    def find(cls, path: Path, config: TransformerConfig) -> PagedSession | None:
        """Load a graph over rows for operators of our own; None if they do not compute it."""
        found = find_packed_model(path, config)
        return None if found is None else cls(config, *found)

    def logits(self, cases: Sequence[Case], progress: Progress = no_progress) -> Iterator[Floats]:
        """Yield the logits [wanted, vocab] of each step of all cases."""
        for case in with_progress(cases, "computing in ONNX Runtime", progress):
            self.clear(*case.rows.shape)
            for step in case.steps:
                tokens = step.inputs(case.rows)["input_ids"]
                logits = self.run(tokens, step.lengths, with_logits=bool(len(step.wanted)))
                yield logits.reshape(-1, logits.shape[-1])[np.array(step.wanted, dtype=np.int64)]

    def clear(self, batch: int, n_positions: int) -> None:
        """Start with `batch` empty rows of `n_positions` positions."""
        n_each = -(-n_positions // self._block_size)
        self._model = self._make_model(batch * n_each)
        self._table = np.arange(batch * n_each, dtype=np.int32).reshape(batch, n_each)[::-1]

    def run(self, tokens: Ids, lengths: Sequence[int], *, with_logits: bool = True) -> Floats:
        """Append tokens [batch, sequence]; row b then holds lengths[b].

        Returns the logits of all; padding on the right has logits of 0.
        """
        sequence, size = tokens.shape[1], self._block_size
        starts = np.maximum(np.array(lengths) - sequence, 0)
        counts = np.array(lengths) - starts
        real = np.arange(sequence) < counts[:, None]  # [batch, sequence]
        positions = (starts[:, None] + np.arange(sequence))[real]
        rows = np.nonzero(real)[0]
        slots = self._table[rows, positions // size] * size + positions % size
        longest = max(lengths)
        logits = self._model.run(
            {
                "input_ids": tokens[real],
                "position_ids": positions,
                "cumulative_sequence_length": np.cumsum([0, *counts], dtype=np.int32),
                "past_seqlens": starts.astype(np.int32),
                "block_table": self._table,
                "slot_mapping": slots.astype(np.int32),
                "attention_metadata": np.array([counts.max(), longest, longest], dtype=np.int32),
                "logits_indices": (wanted := np.arange(len(rows) if with_logits else 1)),
                INVERSE_TEMPERATURES_INPUT: np.ones((len(wanted), 1), dtype=np.float32),
            }
        )
        shaped = np.zeros((*tokens.shape, self._vocab_size), dtype=np.float32)
        if with_logits:
            shaped[real] = real_logits = logits[:]
            if logits.candidates is not None:
                _check(logits.candidates, real_logits[-1])
        return shaped


def _check(candidates: Candidates, row: Floats) -> None:
    """Raise VerificationError if the last candidates are not those of `row`, the last logits."""
    ids, largest, *totals = (field[-1] for field in candidates)
    total = np.logaddexp.reduce(row, dtype=np.float64)
    if (
        np.isfinite(total)
        and not (  # other logits are found to be wrong themselves
            len(set(ids.tolist())) == len(ids)
            and np.array_equal(row.take(ids, mode="clip"), largest)
            and np.array_equal(-np.sort(-row)[: len(ids)], largest)
            and np.allclose(totals, [total, total - row.max()], rtol=0.0, atol=_SUM_ERROR)
        )
    ):
        message = "the candidates that the graph chooses are not the likeliest of its logits"
        raise VerificationError(f"{message}; it must not be served")

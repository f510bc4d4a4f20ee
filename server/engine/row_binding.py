"""The inputs and outputs of a run over rows, bound to raw addresses."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir.model.directory import DECODE_INPUT, NEW_TOKENS_INPUT, present_name
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.kv.memory import RowMemory
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.session import kv_inputs, state_inputs


class RowBinding:
    """The inputs and outputs of one shape of run over `batch` rows from `row` on, bound once.

    A graph with int8 rows has inputs for rows of both types, and `decode` selects which it uses;
    the others get a placeholder. input_ids, position_ids: int64 [at least batch * sequence]. n_new:
    int64 [batch], see `StepInputs`; without recurrent layers nothing reads it.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        memory: RowMemory,
        row: int,
        batch: int,
        capacity: int,
    ) -> None:
        self._session = session
        self._n_positions = memory.n_positions
        self._batch = batch
        self._io = session.io_binding()
        self._bound: tuple[int, int, int] | None = None
        self.input_ids = np.zeros(capacity, dtype=np.int64)
        self.position_ids = np.zeros(capacity, dtype=np.int64)
        self._logits_indices = np.zeros(capacity, dtype=np.int64)
        self._seqlens_k = np.zeros(batch, dtype=np.int32)
        self.n_new = np.zeros(batch, dtype=np.int64)
        self._total = np.zeros((), dtype=np.int32)
        self._bind_input("seqlens_k", self._seqlens_k, (batch,))
        self._bind_input("total_sequence_length", self._total, ())
        self._decode = np.array(memory.dtype == np.int8)
        if any(value.name == DECODE_INPUT for value in session.get_inputs()):
            self._bind_input(DECODE_INPUT, self._decode, ())
        n_head, _, head_dim = memory.row_shape
        self._placeholder = np.zeros((1, n_head, 1, head_dim), dtype=np.float32)
        for kv in kv_inputs(session):
            if kv.itemsize == memory.dtype.itemsize:
                shape = (batch, *memory.row_shape)
                address = memory.address(kv.block, row)
                self._io.bind_output(kv.present, "cpu", 0, kv.element_type, shape, address)
            else:
                shape, address = self._placeholder.shape, self._placeholder.ctypes.data
                self._io.bind_output(kv.present, "cpu")
            self._io.bind_input(kv.name, "cpu", 0, kv.element_type, shape, address)
        if memory.states:
            self._bind_input(NEW_TOKENS_INPUT, self.n_new, (batch,))
        # Past and present are the same memory here, too: it is read before it is written.
        for name, state in zip(state_inputs(session), memory.states, strict=True):
            bound = "cpu", 0, np.float32, (batch, *state.shape[1:]), state[row].ctypes.data
            self._io.bind_input(name, *bound)
            self._io.bind_output(present_name(name), *bound)

    def take(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Bind further inputs of the next run."""
        for name, array in inputs.items():
            self._io.bind_cpu_input(name, array)

    def run(
        self, ends: list[int], sequence: int, indices: list[int], logits: Floats, first_logit: int
    ) -> float:
        """Run `sequence` tokens of each row, and return the model's seconds.

        ends: each row's number of tokens after the run. indices: the tokens that want logits, which
        are written to `logits` [n, vocab] from row `first_logit` on.
        """
        longest = max(ends)
        if longest > self._n_positions:  # ONNX Runtime would silently write past the row
            raise ValueError(f"a row of {self._n_positions} positions cannot hold {longest} tokens")
        self._seqlens_k[:] = ends
        self._seqlens_k -= 1
        self._total[()] = longest
        n_logits = len(indices)
        self._logits_indices[:n_logits] = indices
        shape = (sequence, n_logits, first_logit)
        if shape != self._bound:
            rows = logits[first_logit : first_logit + n_logits]
            self._bind_input("input_ids", self.input_ids, (self._batch, sequence))
            self._bind_input("position_ids", self.position_ids, (self._batch, sequence))
            self._bind_input("logits_indices", self._logits_indices, (n_logits,))
            self._io.bind_output("logits", "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
            self._bound = shape
        started = perf_counter()
        self._session.run_with_iobinding(self._io)
        return perf_counter() - started

    def _bind_input(self, name: str, buffer: NDArray[Any], shape: tuple[int, ...]) -> None:
        self._io.bind_input(name, "cpu", 0, buffer.dtype.type, shape, buffer.ctypes.data)

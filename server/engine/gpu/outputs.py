"""The outputs of runs on a GPU, which stay there but for what somebody reads."""

from __future__ import annotations

import numpy as np

from kvasir.model.directory import CANDIDATES_OUTPUT
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.gpu.cuda_runtime import CudaStream
from kvasir.server.engine.sampling.logits import Candidates, Logits
from kvasir.server.engine.sampling.params import Floats


class DeviceOutputs:
    """A session's outputs of at most n_rows rows, at addresses that stay the same."""

    def __init__(
        self, session: onnxruntime.InferenceSession, stream: CudaStream, n_rows: int
    ) -> None:
        self._outputs = {
            value.name: _Output(value.name, stream, n_rows, int(value.shape[-1]))
            for value in session.get_outputs()
            if value.name in ("logits", CANDIDATES_OUTPUT)
        }

    def bind(self, binding: onnxruntime.IOBinding, first_row: int, n_rows: int) -> None:
        """Bind the outputs of a run that writes `n_rows` rows from `first_row` on."""
        for output in self._outputs.values():
            output.bind(binding, first_row, n_rows)

    def take(self, n_rows: int) -> Logits:
        """Copy the candidates of all rows, and return those and what reads logits."""
        packed = self._outputs.get(CANDIDATES_OUTPUT)
        candidates = None if packed is None else Candidates.unpack(packed.read(0, n_rows))
        return Logits(n_rows, self._outputs["logits"].read, candidates)


class _Output:
    """One output, [n_rows, size] floats, on the device and as far as it is read on this machine."""

    def __init__(self, name: str, stream: CudaStream, n_rows: int, size: int) -> None:
        self.name = name
        self._stream = stream
        n_bytes = 4 * n_rows * size
        self._there, self._here = stream.device_buffer(n_bytes), stream.pinned_buffer(n_bytes)
        self._rows: Floats = self._here.array.view(np.float32).reshape(n_rows, size)

    def bind(self, binding: onnxruntime.IOBinding, first_row: int, n_rows: int) -> None:
        wanted = self._rows[first_row : first_row + n_rows]
        if len(wanted) < n_rows:  # ONNX Runtime would silently write past the end
            raise ValueError(f"no room for {n_rows} rows of logits from {first_row} on")
        address = self._there.address + first_row * self._rows.strides[0]
        binding.bind_output(self.name, self._stream.device, 0, np.float32, wanted.shape, address)

    def read(self, start: int, stop: int) -> Floats:
        rows, offset = self._rows[start:stop], start * self._rows.strides[0]
        self._stream.copy(self._here.address + offset, self._there.address + offset, rows.nbytes)
        self._stream.synchronize()
        return rows

"""A graph and its blocks of the KV cache on a GPU: ids go in, logits come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from kvasir.model.directory import CANDIDATES_OUTPUT, INVERSE_TEMPERATURES_INPUT
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.gpu.cuda import bind_blocks_at, bind_cuda_blocks
from kvasir.server.engine.gpu.cuda_runtime import CudaStream, DeviceBuffer
from kvasir.server.engine.gpu.graphs import DecodeGraphs, Inputs, without_graph
from kvasir.server.engine.gpu.outputs import DeviceOutputs
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.sampling.logits import Candidates, Logits
from kvasir.server.engine.session import KVInput, kv_inputs


class DeviceModel:
    """A graph over blocks, which stay on a device.

    bind_blocks: see `bind_cuda_blocks`. outputs: keeps what comes out; None copies all logits.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        n_blocks: int,
        bind_blocks: Callable[[onnxruntime.IOBinding, KVInput, int], object] = bind_cuda_blocks,
        outputs: DeviceOutputs | None = None,
    ) -> None:
        self._session = session
        self._io = session.io_binding()
        self._names = {value.name for value in session.get_inputs()}
        self._outputs = outputs
        self._n_blocks = n_blocks
        self._blocks = [bind_blocks(self._io, kv, n_blocks) for kv in kv_inputs(session)]
        self._options = without_graph()
        self.graphs: DecodeGraphs | None = None

    def capture(self, stream: CudaStream, blocks: KVBlocks) -> None:
        """Run decodes as CUDA graphs from now on, in a session that can capture on the stream."""
        assert self._outputs is not None, "a graph writes to fixed addresses"
        inputs, n_blocks = kv_inputs(self._session), self._n_blocks
        # Not `self`, which would be a cycle, whose memory stays.
        held = cast("list[DeviceBuffer]", self._blocks)

        def bind(binding: onnxruntime.IOBinding) -> None:
            for kv, buffer in zip(inputs, held, strict=True):
                bind_blocks_at(buffer.address, binding, kv, n_blocks, stream.device)

        max_num_seqs, max_blocks = blocks.table.shape
        self.graphs = DecodeGraphs(
            self._session,
            stream,
            bind,
            self._outputs,
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            block_size=blocks.block_size,
        )

    def run(self, inputs: Inputs, first_row: int = 0) -> Logits:
        """Run a part of a step, whose logits follow `first_row` rows of parts that ran before.

        Returns the logits of all. inputs: as in `export.graphs.paged`, without the blocks. Without
        `outputs` a step has one part.
        """
        if self.graphs is not None and not first_row:
            return self.graphs.run(inputs, self._run)
        return self._run(inputs, first_row)

    def _run(self, inputs: Inputs, first_row: int = 0) -> Logits:
        for name, array in inputs.items():
            if name in self._names:
                self._io.bind_cpu_input(name, np.ascontiguousarray(array))
        if self._outputs is None:
            has_candidates = INVERSE_TEMPERATURES_INPUT in self._names
            for name in ("logits", *[CANDIDATES_OUTPUT] * has_candidates):  # in the blocks' order
                self._io.bind_output(name, "cpu")
            self._session.run_with_iobinding(self._io, self._options)
            logits, *packed = self._io.get_outputs()[len(self._blocks) :]
            candidates = Candidates.unpack(packed[0].numpy()) if packed else None
            return Logits.of(logits.numpy(), candidates)
        n_rows = len(inputs["logits_indices"])
        self._outputs.bind(self._io, first_row, n_rows)
        self._session.run_with_iobinding(self._io, self._options)
        return self._outputs.take(first_row + n_rows)

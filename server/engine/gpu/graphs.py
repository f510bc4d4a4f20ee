"""Decodes as CUDA graphs: a step's kernels are recorded once and launched together afterwards.

A replay runs the recorded kernels on the recorded addresses. ONNX Runtime looks at no binding, no
shape and no input on the CPU again, so everything that changes lies in fixed buffers on the device,
and what the kernels were told on the CPU must hold for all steps of the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.model.directory import INVERSE_TEMPERATURES_INPUT
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.gpu.cuda_runtime import CudaStream
from kvasir.server.engine.gpu.outputs import DeviceOutputs
from kvasir.server.engine.sampling.logits import Logits
from kvasir.server.engine.sampling.params import Floats

logger = logging.getLogger("kvasir")

Array = NDArray[Any]
Inputs = Mapping[str, Array]

_ALIGNMENT = 256  # of a buffer's parts
_DTYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
_METADATA = "attention_metadata"  # the input on the CPU
_EAGER = -1  # the graph id of runs that are neither captured nor replayed
# Runs before a capture, which may allocate nothing: ONNX Runtime notes the sizes of what it needs
# in the first, and allocates that at once in the second.
_RUNS_BEFORE = 2
# Largest difference of logits between a graph and a run without, in standard deviations. Kernels
# may differ, so it is that of bfloat16 from PyTorch; a wrong input gives 1 and more.
_TOLERANCE = 0.25
_ids = count(1)  # of all graphs of the process: a session never forgets one, nor its addresses


class Bucket(NamedTuple):
    """The steps of one graph: of up to `n_rows` sequences of up to `width` blocks.

    shortest: the fewest tokens that the longest of them has.
    """

    n_rows: int
    width: int
    shortest: int


class _Graph(NamedTuple):
    binding: onnxruntime.IOBinding
    options: onnxruntime.RunOptions
    n_copied: int  # bytes from the buffer's start on that its inputs take
    table: Array  # [n_rows, width], in the pinned buffer


def row_bucket(n_rows: int, most: int) -> int:
    """Return 1, 2, 4, 8, 16, 24, 32, …, or `most`: at least n_rows."""
    size = 1 << (n_rows - 1).bit_length() if n_rows <= 8 else -(-n_rows // 8) * 8
    return min(size, most)


def width_bucket(n_blocks: int, most: int) -> tuple[int, int]:
    """Return 2, 4, 8, …, or `most`: at least n_blocks; and the width before it, or 0.

    Attention is split over the GPU from more than 512 tokens on, which are the first two blocks.
    """
    width = max(2, 1 << (n_blocks - 1).bit_length())
    return min(width, most), 0 if width <= 2 else width // 2


class DecodeGraphs:
    """The CUDA graphs of a session, captured when a step first needs one.

    A capture takes about as long as a chunk of a prompt, and few of all buckets are ever needed, so
    none is made before. The first step of each graph runs without it as well: where their results
    differ, or ONNX Runtime cannot capture, all later steps run without graphs.

    ONNX Runtime keeps graphs for the thread that captured them, so one thread runs all steps. No
    other thread of the process may call CUDA during a capture.

    bind_blocks: binds keys and values. max_num_seqs, max_blocks: of a step, and of a sequence.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        stream: CudaStream,
        bind_blocks: Callable[[onnxruntime.IOBinding], None],
        outputs: DeviceOutputs,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
    ) -> None:
        self._session, self._stream = session, stream
        self._bind_blocks, self._outputs = bind_blocks, outputs
        self._max_num_seqs, self._max_blocks = max_num_seqs, max_blocks
        self._block_size = block_size
        self._graphs: dict[Bucket, _Graph] = {}
        self.is_usable = True
        self.bytes_each = 0  # of the device's memory that the largest graph so far has taken
        inputs = {value.name: value for value in session.get_inputs()}
        sizes = dict.fromkeys(
            (
                *("input_ids", "position_ids", "past_seqlens", "slot_mapping", "logits_indices"),
                INVERSE_TEMPERATURES_INPUT,
            ),
            max_num_seqs,
        )
        sizes["cumulative_sequence_length"] = max_num_seqs + 1
        sizes["block_table"] = max_num_seqs * max_blocks  # last, because a copy ends in it
        self._offsets, n_bytes = dict[str, int](), 0
        self._dtypes = {n: np.dtype(_DTYPES[inputs[n].type]) for n in sizes if n in inputs}
        for name, dtype in self._dtypes.items():
            self._offsets[name] = n_bytes
            n_bytes += -(-sizes[name] * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._host, self._device = stream.pinned_buffer(n_bytes), stream.device_buffer(n_bytes)
        self._values = {name: self._view(name, sizes[name]) for name in self._dtypes}
        for name in ("cumulative_sequence_length", "logits_indices"):  # of one token a row
            self._values[name][:] = np.arange(sizes[name])

    @property
    def reserve(self) -> int:
        """Bytes of the device's memory that the graphs of all buckets may take."""
        n_rows = len({row_bucket(n + 1, self._max_num_seqs) for n in range(self._max_num_seqs)})
        n_widths = len({width_bucket(n + 1, self._max_blocks) for n in range(self._max_blocks)})
        return self.bytes_each * n_rows * n_widths

    def run(self, inputs: Inputs, eager: Callable[[Inputs], Logits]) -> Logits:
        """Run the first part of a step; see DeviceModel.

        eager: runs the same without a graph, as all that is more than a token of each sequence.
        """
        n_rows = len(inputs["past_seqlens"])
        n_tokens, n_logits = len(inputs["input_ids"]), len(inputs["logits_indices"])
        if not (self.is_usable and n_tokens == n_logits == n_rows):
            return eager(inputs)
        width, before = width_bucket(inputs["block_table"].shape[1], self._max_blocks)
        n_padded = row_bucket(n_rows, self._max_num_seqs)
        bucket = Bucket(n_padded, width, before * self._block_size + 1)
        graph = self._graphs.get(bucket)
        return self._replay(graph, inputs) if graph else self._run_first(bucket, inputs, eager)

    def _run_first(
        self, bucket: Bucket, inputs: Inputs, eager: Callable[[Inputs], Logits]
    ) -> Logits:
        """Capture a graph, and compare it with a run without on a step's own inputs.

        The run in between overwrites what the graph may read although ONNX Runtime has freed it,
        such as the addresses that some operators copy to the device from pinned memory.
        """
        expected = eager(inputs)[:].copy()
        why: Exception
        try:
            graph = self._capture(bucket)
            eager(_of_another_shape(inputs))
            replayed = self._replay(graph, inputs)
        except Exception as error:  # ONNX Runtime's errors have no base class
            why = error
        else:
            difference = _difference(replayed, expected, inputs) / (expected.std() or 1.0)
            if difference <= _TOLERANCE:
                self._graphs[bucket] = graph
                return replayed
            why = ValueError(f"logits differ by {difference:.2f} deviations from those without")
        warn_without_graphs(why)
        self.is_usable = False
        self._graphs.clear()
        return eager(inputs)  # because the graph may have written wrong keys and values

    def _capture(self, bucket: Bucket) -> _Graph:
        """Capture a graph by a step in which no row writes a key or a value."""
        n_rows, width, shortest = bucket
        binding = self._session.io_binding()
        self._bind_blocks(binding)
        for name, dtype in self._dtypes.items():
            shape: tuple[int, ...] = (n_rows + (name == "cumulative_sequence_length"),)
            if name == "block_table":
                shape = (n_rows, width)
            elif name == INVERSE_TEMPERATURES_INPUT:
                shape = (n_rows, 1)
            address = self._device.address + self._offsets[name]
            binding.bind_input(name, self._stream.device, 0, dtype.type, shape, address)
        metadata = np.array([1, width * self._block_size, shortest], dtype=np.int32)
        binding.bind_cpu_input(_METADATA, metadata)
        self._outputs.bind(binding, 0, n_rows)
        table = self._view("block_table", n_rows * width).reshape(n_rows, width)
        n_copied = self._offsets["block_table"] + table.nbytes
        graph = _Graph(binding, _options(next(_ids)), n_copied, table)
        self._fill({"past_seqlens": np.array([shortest - 1])}, graph)
        for _ in range(_RUNS_BEFORE):
            self._session.run_with_iobinding(binding, without_graph())
        free = self._stream.free_memory()
        self._session.run_with_iobinding(binding, graph.options)
        self.bytes_each = max(self.bytes_each, free - self._stream.free_memory())
        return graph

    def _replay(self, graph: _Graph, inputs: Inputs) -> Logits:
        self._fill(inputs, graph)
        self._session.run_with_iobinding(graph.binding, graph.options)
        return self._outputs.take(len(inputs["past_seqlens"]))

    def _fill(self, inputs: Inputs, graph: _Graph) -> None:
        """Begin to copy a step's inputs, and rows of padding after them, to the device.

        A row of padding is a sequence of one token that reads block 0 and writes nothing.
        """
        n_rows = len(graph.table)
        for name, padding in (
            ("input_ids", 0),
            ("position_ids", 0),
            ("past_seqlens", 0),
            ("slot_mapping", -1),
            (INVERSE_TEMPERATURES_INPUT, 1),
        ):
            if name in self._values:
                given = np.ravel(inputs.get(name, ()))
                self._values[name][: len(given)] = given
                self._values[name][len(given) : n_rows] = padding
        graph.table[:] = 0
        if "block_table" in inputs:
            n_given, n_blocks = inputs["block_table"].shape
            graph.table[:n_given, :n_blocks] = inputs["block_table"]
        self._stream.copy(self._device.address, self._host.address, graph.n_copied)

    def _view(self, name: str, n_values: int) -> Array:
        """Return the first values of an input in the pinned buffer."""
        dtype, offset = self._dtypes[name], self._offsets[name]
        return self._host.array[offset : offset + n_values * dtype.itemsize].view(dtype)


def _difference(logits: Logits, expected: Floats, inputs: Inputs) -> float:
    """Return the largest difference of logits, and of candidates from their own rows."""
    rows = logits[:]
    differences = [rows - expected]
    if logits.candidates is not None:
        ids, largest, log_totals, tempered_totals = logits.candidates
        if not ((ids >= 0) & (ids < rows.shape[1])).all():
            return float("inf")
        peaks = rows.max(axis=1, keepdims=True)
        total, tempered = (
            np.log(np.exp((rows - peaks) * inverse).sum(axis=1))
            for inverse in (1.0, inputs[INVERSE_TEMPERATURES_INPUT])
        )
        differences += [np.take_along_axis(rows, ids, axis=1) - largest]
        differences += [total + peaks[:, 0] - log_totals, tempered - tempered_totals]
    return float(np.max([np.abs(difference).max() for difference in differences]))


def _of_another_shape(inputs: Inputs) -> Inputs:
    """Return the inputs of one row, or of two, with other tokens and without effect."""
    rows = [0] if len(inputs["past_seqlens"]) > 1 else [0, 0]
    _, longest, _ = inputs["attention_metadata"]
    return {
        "input_ids": (inputs["input_ids"][rows] == 0).astype(np.int64),
        "position_ids": inputs["position_ids"][rows],
        "cumulative_sequence_length": np.arange(len(rows) + 1, dtype=np.int32),
        "past_seqlens": inputs["past_seqlens"][rows],
        "block_table": inputs["block_table"][rows],
        "slot_mapping": np.full(len(rows), -1, dtype=np.int32),
        _METADATA: np.array([1, longest, 1], dtype=np.int32),
        "logits_indices": np.arange(len(rows)),
        INVERSE_TEMPERATURES_INPUT: inputs[INVERSE_TEMPERATURES_INPUT][rows],
    }


def warn_without_graphs(why: Exception) -> None:
    """Log why all steps run without graphs."""
    reason = (str(why) or type(why).__name__).splitlines()[0]
    logger.warning("decodes run without CUDA graphs, and slower: %s", reason)


def without_graph() -> onnxruntime.RunOptions:
    """Return the options of a run that is neither captured nor replayed."""
    return _options(_EAGER)


def _options(graph_id: int) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options

"""A stand-in of an ONNX Runtime session that captures CUDA graphs, with its stream and memory.

Copies happen when the stream gets to them, which is at the next run or wait. A replay computes from
the recorded addresses and shapes, as a card does, and fails where a card would be silently wrong.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvasir.server.engine.gpu.session import Backend
from tests.kit.numpy_session import (
    Array,
    HostBuffer,
    HostStream,
    NumpyBinding,
    NumpySession,
    numpy_backend,
)

_ON_CPU = {"attention_metadata"}


class RecordingStream(HostStream):
    """Memory of this machine, and copies that wait. graph_bytes: what each graph takes."""

    device = "cuda"

    def __init__(self, free_bytes: int = 2**30, graph_bytes: int = 0) -> None:
        self.n_allocations = self.taken = 0
        self.free_bytes, self.graph_bytes = free_bytes, graph_bytes
        self._copies: list[tuple[int, int, int]] = []

    def device_buffer(self, n_bytes: int) -> HostBuffer:
        self.n_allocations += 1
        return super().device_buffer(n_bytes)

    def pinned_buffer(self, n_bytes: int) -> HostBuffer:
        self.n_allocations += 1
        return super().pinned_buffer(n_bytes)

    def free_memory(self) -> int:
        return self.free_bytes - self.taken

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        self._copies.append((to, source, n_bytes))

    def synchronize(self) -> None:
        for copy in self._copies:
            super().copy(*copy)
        self._copies.clear()


class Capture(NamedTuple):
    """All that a graph knows."""

    places: dict[str, tuple[Any, ...]]
    binding: NumpyBinding
    cpu_inputs: dict[str, Array]
    thread: int


class RecordingSession(NumpySession):
    """A session that captures the first run of a graph id, and replays the later ones.

    refuses: raises at a capture. forgets: replays compute from the inputs of the capture. strays:
    an output of replays is that of the run before, as if they read memory that it used since.
    """

    def __init__(self, graph: Path, stream: RecordingStream) -> None:
        super().__init__(graph)
        self.captures: dict[int, Capture] = {}
        self.replays: list[tuple[int, ...]] = []  # the block table's shape
        self.refuses = self.forgets = False
        self.strays = ""
        self._stream = stream
        self._n_binds = self._n_known_binds = self._n_known_allocations = 0

    def io_binding(self) -> NumpyBinding:
        binding = super().io_binding()
        for name in ("bind_input", "bind_output", "bind_cpu_input"):
            setattr(binding, name, self._counted(getattr(binding, name)))
        self._n_binds += 1
        return binding

    def run_with_iobinding(self, binding: NumpyBinding, options: Any = None) -> None:
        graph_id = int(options.get_run_config_entry("gpu_graph_id"))  # without one, it would be 0
        self._stream.synchronize()
        if graph_id in self.captures:
            self._replay(self.captures[graph_id], binding)
        else:
            super().run_with_iobinding(binding)
            if graph_id != -1:
                self._capture(graph_id, binding)
        self._n_known_binds = self._n_binds
        self._n_known_allocations = self._stream.n_allocations

    def _capture(self, graph_id: int, binding: NumpyBinding) -> None:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        for name, place in binding.places.items():
            assert place[0] == ("cpu" if name in _ON_CPU else "cuda"), f"{name} is copied"
            assert name in _ON_CPU or len(place) > 1, f"{name} has no address"
        held = NumpyBinding()  # views of the same addresses
        held.inputs, held.outputs = dict(binding.inputs), dict(binding.outputs)
        cpu_inputs = {name: binding.inputs[name].copy() for name in _ON_CPU}
        if self.forgets:
            held.inputs |= {name: binding.inputs[name].copy() for name in ("input_ids",)}
        self.captures[graph_id] = Capture(
            dict(binding.places), held, cpu_inputs, threading.get_ident()
        )
        self._stream.taken += self._stream.graph_bytes
        super().run_with_iobinding(held)

    def _replay(self, capture: Capture, binding: NumpyBinding) -> None:
        assert threading.get_ident() == capture.thread, "a replay by another thread"
        assert binding.places == capture.places, "a replay with other addresses or shapes"
        for name, known in capture.cpu_inputs.items():
            assert (binding.inputs[name] == known).all(), f"a replay with another {name}"
        assert self._n_binds == self._n_known_binds, "a binding in a replayed step"
        assert self._stream.n_allocations == self._n_known_allocations, "an allocation in a step"
        held = NumpyBinding()
        held.inputs = capture.binding.inputs | capture.cpu_inputs
        held.outputs = dict(capture.binding.outputs)
        kept = held.outputs.get(self.strays)
        last = None if kept is None else kept[:1].copy()
        super().run_with_iobinding(held)
        if kept is not None:
            kept[:1] = last
        self.replays.append(np.shape(held.inputs["block_table"]))

    def _counted(self, bind: Any) -> Any:
        def call(*arguments: Any) -> None:
            self._n_binds += 1
            bind(*arguments)

        return call


def recording_backend(
    free_bytes: int, graph_bytes: int = 0, opened: list[RecordingSession] | None = None
) -> Backend:
    """Return a way to a GPU that is this processor and captures graphs; opened: its sessions."""
    streams: list[RecordingStream] = []

    def open_stream() -> Any:
        streams.append(RecordingStream(free_bytes, graph_bytes))
        return streams[-1]

    def open_capturing(graph: Path, stream: Any) -> Any:
        session = RecordingSession(graph, stream)
        if opened is not None:
            opened.append(session)
        return session

    return numpy_backend(free_bytes)._replace(
        free_memory=lambda: free_bytes - sum(stream.taken for stream in streams),
        open_stream=open_stream,
        open_capturing=open_capturing,
    )

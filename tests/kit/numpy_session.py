"""A stand-in of an ONNX Runtime session on a GPU: the graph in numpy, blocks bound by address.

The graph is traced in float32, which the operator in numpy accepts, so that tokens can be equal.
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper

from kvasir.export.graphs import paged as paged_graph
from kvasir.export.graphs.paged import export_paged_graph
from kvasir.server.engine.gpu.cuda import bind_cuda_blocks
from kvasir.server.engine.gpu.graphs import Inputs
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.gpu.outputs import DeviceOutputs
from kvasir.server.engine.gpu.session import Backend
from kvasir.server.engine.sampling.logits import Logits
from kvasir.server.engine.sampling.params import Floats
from tests.kit import paged_reference
from tests.kit.random_models import RandomModel, make_config, make_decoder

Array = NDArray[Any]
BLOCK = 8  # tokens of a block


class HostBuffer:
    """Zero bytes of this machine's memory."""

    def __init__(self, n_bytes: int) -> None:
        self.array = np.zeros(n_bytes, dtype=np.uint8)
        self.address = self.array.ctypes.data


class GarbageBuffer(HostBuffer):
    """Large numbers, as memory may have that nobody has written."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__(n_bytes)
        self.array.view(np.float32)[:] = 1e3


class HostStream:
    """A stream of the processor, whose copies happen at once."""

    device = "cpu"
    handle = 0

    def device_buffer(self, n_bytes: int) -> HostBuffer:
        return HostBuffer(n_bytes)

    def pinned_buffer(self, n_bytes: int) -> HostBuffer:
        return HostBuffer(n_bytes)

    def free_memory(self) -> int:
        return 2**20

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        ctypes.memmove(to, source, n_bytes)

    def synchronize(self) -> None:
        pass


class NumpySession:
    """Those methods of an InferenceSession that a graph over blocks needs."""

    def __init__(self, graph: Path) -> None:
        self.graph = paged_reference.load(graph)
        described = onnx.load(graph, load_external_data=False).graph
        self._inputs, self._outputs = map(_describe, (described.input, described.output))

    def get_inputs(self) -> list[SimpleNamespace]:
        return self._inputs

    def get_outputs(self) -> list[SimpleNamespace]:
        return self._outputs

    def io_binding(self) -> NumpyBinding:
        return NumpyBinding()

    def run_with_iobinding(self, binding: NumpyBinding, _options: Any = None) -> None:
        results: Any = self.graph.run(list(binding.outputs), binding.inputs)
        for (name, place), result in zip(binding.outputs.items(), results, strict=True):
            if isinstance(place, np.ndarray):
                if name.startswith("present"):
                    past = binding.inputs[name.replace("present", "past_key_values")]
                    assert place.ctypes.data == past.ctypes.data, "present is not past's memory"
                place[...] = result
            else:
                binding.outputs[name] = SimpleNamespace(numpy=lambda result=result: result)


class NumpyBinding:
    """Bound inputs and outputs; an output at no address is made by each run."""

    def __init__(self) -> None:
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Any] = {}
        self.places: dict[str, tuple[Any, ...]] = {}  # device, number, type, shape, address

    def bind_cpu_input(self, name: str, array: Array) -> None:
        self.inputs[name] = array
        self.places[name] = ("cpu",)

    def bind_input(self, name: str, *where: Any) -> None:
        self.inputs[name] = _at(*where)
        self.places[name] = where

    def bind_output(self, name: str, *where: Any) -> None:
        self.outputs[name] = _at(*where) if len(where) > 1 else None
        self.places[name] = where

    def get_outputs(self) -> list[Any]:
        return list(self.outputs.values())


def _at(_device: str, _id: int, element_type: Any, shape: tuple[int, ...], address: int) -> Array:
    """Return the numbers at an address."""
    dtype = np.dtype(
        helper.tensor_dtype_to_np_dtype(element_type)
        if isinstance(element_type, int)
        else element_type
    )
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = (ctypes.c_uint8 * n_bytes).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


def _describe(values: Any) -> list[SimpleNamespace]:
    """Return names, types and shapes as a session gives them."""
    described = []
    for value in values:
        kind = value.type.tensor_type
        shape = [axis.dim_param or axis.dim_value for axis in kind.shape.dim]
        type_name = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        described.append(SimpleNamespace(name=value.name, type=f"tensor({type_name})", shape=shape))
    return described


def numpy_backend(free_bytes: int) -> Backend:
    """Return a way to a GPU that is this processor, with so much memory free."""
    bind = partial(bind_cuda_blocks, buffer=HostBuffer)
    session: Any = NumpySession
    stream: Any = HostStream
    return Backend(lambda: None, session, bind, lambda: free_bytes, 64, open_stream=stream)


def export_paged(folder: Path, **changes: Any) -> RandomModel:
    """Export a random decoder over blocks of BLOCK tokens, in float32."""
    decoder = make_decoder(make_config(**changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(paged_graph.DTYPES, "fp32", torch.float32)
        patch.setattr(paged_graph, "KV_BLOCK_SIZE", BLOCK)
        export_paged_graph(decoder.config, decoder.state_dict(), folder / "model.onnx", "fp32")
    return RandomModel(decoder, folder / "model.onnx")


class NumpyModel(DeviceModel):
    """An exported graph run by numpy, which notes what it is asked.

    n_read: rows of logits. shapes: of each run, the most new tokens of a sequence, and sequences.
    """

    def __init__(self, graph: Path, n_blocks: int, *, has_candidates: bool = True) -> None:
        session: Any = NumpySession(graph)
        stream: Any = HostStream()
        outputs = DeviceOutputs(session, stream, 256)
        bind = partial(bind_cuda_blocks, device="cpu", buffer=GarbageBuffer)
        super().__init__(session, n_blocks, bind, outputs)
        self.n_read, self.shapes = 0, list[tuple[int, int]]()
        self._has_candidates = has_candidates

    def run(self, inputs: Inputs, first_row: int = 0) -> Logits:
        self.shapes.append((int(inputs["attention_metadata"][0]), len(inputs["past_seqlens"])))
        logits = super().run(inputs, first_row)

        def read(start: int, stop: int) -> Floats:
            self.n_read += stop - start
            return logits[start:stop]

        return Logits(len(logits), read, logits.candidates if self._has_candidates else None)

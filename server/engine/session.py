"""ONNX Runtime sessions: the server's only import of onnxruntime."""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
from onnxruntime import InferenceSession, SessionOptions

from model.bundle import GRAPH_ENVIRONMENT
from server.engine.cuda.runner import Inputs
from server.engine.cuda.runtime import DeviceBuffer, NoDeviceError, free_memory
from server.engine.sampling import Floats

__all__ = [
    "DeviceModel",
    "InferenceSession",
    "block_bytes",
    "open_cuda_session",
    "open_session",
    "require_cuda",
]

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_WARNING, _FATAL = 2, 4  # ONNX Runtime's severities; the first is its default
_TYPES = {  # numbers of onnx.TensorProto, and bytes
    "tensor(float)": (1, 4),
    "tensor(float16)": (10, 2),
    "tensor(bfloat16)": (16, 2),
    "tensor(int8)": (3, 1),
    "tensor(float8e4m3fn)": (17, 1),
}

onnxruntime.disable_telemetry_events()  # what is served, and where, is nobody's business


def open_session(graph: Path, threads: int, spin_microseconds: int) -> InferenceSession:
    """A session on the CPU. spin_microseconds: how long a thread with nothing to compute keeps its processor."""
    os.environ.update(GRAPH_ENVIRONMENT)  # ONNX Runtime reads it when the session is built
    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", str(int(spin_microseconds > 0))
    )
    options.add_session_config_entry(
        "session.intra_op.spin_duration_us", str(max(1, spin_microseconds))
    )
    options.add_session_config_entry(
        "session.force_spinning_stop", "1"
    )  # nobody spins between two runs
    return InferenceSession(graph, options, providers=[_CPU])


def require_cuda() -> None:
    """Load CUDA's libraries. Raises NoDeviceError where ONNX Runtime is the one for the CPU, or no GPU answers."""
    if _CUDA not in onnxruntime.get_available_providers():
        raise NoDeviceError(
            "the installed ONNX Runtime is the one for the CPU; install the extra cuda in its place"
        )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
        onnxruntime.preload_dlls()
    free_memory()  # says what is missing


def open_cuda_session(graph: Path) -> InferenceSession:
    """A session on the first NVIDIA GPU.

    Raises NoDeviceError, where ONNX Runtime would go on without, on the CPU, or fail for want of kernels there.
    """
    require_cuda()
    onnxruntime.set_default_logger_severity(
        _FATAL
    )  # why there is no GPU is said below, in one line
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            session = InferenceSession(graph, SessionOptions(), providers=[_CUDA, _CPU])
    except Exception as error:  # ONNX Runtime's own are many, and have no base of their own
        raise NoDeviceError(
            f"ONNX Runtime cannot run the model on this GPU: {str(error).splitlines()[0]}"
        ) from None
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)
    if _CUDA not in session.get_providers():
        raise NoDeviceError(
            "ONNX Runtime finds no NVIDIA GPU that it can use; look for the driver, and for the packages of the extra "
            "cuda, or export the model for the CPU"
        )
    return session


class Buffer(Protocol):
    """Memory on a device."""

    address: int


class DeviceModel:
    """A graph over blocks, which stay on a device: ids go in, logits come out.

    device, buffer: where the blocks are, and how so many bytes of zeros are had there.
    """

    def __init__(
        self,
        session: InferenceSession,
        n_blocks: int,
        device: str = "cuda",
        buffer: Callable[[int], Buffer] = DeviceBuffer,
    ) -> None:
        self._session = session
        self._io = session.io_binding()
        self._blocks: list[Buffer] = []
        for value in session.get_inputs():
            if value.name.startswith("past_key_values."):
                kind, itemsize = _TYPES[value.type]
                shape = (n_blocks, *value.shape[1:])
                blocks = buffer(math.prod(shape) * itemsize)
                present = value.name.replace("past_key_values", "present")
                self._io.bind_input(value.name, device, 0, kind, shape, blocks.address)
                self._io.bind_output(present, device, 0, kind, shape, blocks.address)
                self._blocks.append(blocks)

    def run(self, inputs: Inputs) -> Floats:
        """Logits [rows, vocab], on the CPU."""
        for name, array in inputs.items():
            self._io.bind_cpu_input(name, np.ascontiguousarray(array))
        self._io.bind_output("logits", "cpu")
        self._session.run_with_iobinding(self._io)
        logits: Floats = self._io.get_outputs()[
            len(self._blocks)
        ].numpy()  # the output that was bound last
        return logits


def block_bytes(session: InferenceSession) -> int:
    """Of one block's keys and values, in all layers."""
    blocks = [value for value in session.get_inputs() if value.name.startswith("past_key_values.")]
    return sum(math.prod(value.shape[1:]) * _TYPES[value.type][1] for value in blocks)

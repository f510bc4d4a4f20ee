"""ONNX Runtime sessions on CUDA."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.gpu.cuda_runtime import (
    CudaStream,
    DeviceBuffer,
    NoDeviceError,
    check_capability,
)
from kvasir.server.engine.session import KVInput

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_WARNING, _FATAL = 2, 4  # ONNX Runtime's severities; the first is its default


def require_cuda() -> None:
    """Load CUDA's libraries.

    Raises NoDeviceError if the installed ONNX Runtime is the one for the CPU, or no GPU answers.
    """
    if _CUDA not in onnxruntime.get_available_providers():
        raise NoDeviceError(
            "the installed ONNX Runtime is the one for the CPU; install the extra cuda in its place"
        )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the names of missing libraries
        onnxruntime.preload_dlls()
    check_capability()  # raises the error that says what is missing


def open_cuda_session(
    graph: Path, options: dict[str, str] | None = None
) -> onnxruntime.InferenceSession:
    """Open a session on the first NVIDIA GPU. options: of ONNX Runtime's provider.

    Raises NoDeviceError if there is none; ONNX Runtime would try the graph on the CPU.
    """
    require_cuda()
    providers = [(_CUDA, options or {}), _CPU]
    session = open_on_gpu(lambda: onnxruntime.InferenceSession(graph, providers=providers))
    if _CUDA not in session.get_providers():
        raise NoDeviceError(
            "ONNX Runtime finds no NVIDIA GPU that it can use; check the driver and the packages of"
            " the extra cuda, or export the model for the CPU"
        )
    return session


def open_capturing_session(graph: Path, stream: CudaStream) -> onnxruntime.InferenceSession:
    """Open a session that can capture its runs, all of which are on the stream.

    Raises NoDeviceError as `open_cuda_session`, or where a part of the graph is not for the GPU.
    """
    options = {"enable_cuda_graph": "1", "user_compute_stream": str(stream.handle)}
    return open_cuda_session(graph, options)


def open_on_gpu(
    open_session: Callable[[], onnxruntime.InferenceSession],
) -> onnxruntime.InferenceSession:
    """Return the session that a function opens. Raises NoDeviceError with one line if it fails."""
    onnxruntime.set_default_logger_severity(_FATAL)  # the errors below say it in one line
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            return open_session()
    except Exception as error:  # ONNX Runtime's errors have no base class of their own
        raise NoDeviceError(
            f"ONNX Runtime cannot run the model on this GPU: {str(error).splitlines()[0]}"
        ) from None
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)


def bind_cuda_blocks(
    binding: onnxruntime.IOBinding,
    kv: KVInput,
    n_blocks: int,
    device: str = "cuda",
    buffer: Callable[[int], Any] = DeviceBuffer,
) -> object:
    """Bind past and present to the same new blocks, and return the buffer that keeps them.

    device, buffer: the device of the blocks, and the class of buffers of so many zero bytes there.
    """
    blocks = buffer(n_blocks * kv.bytes_per_item)
    bind_blocks_at(blocks.address, binding, kv, n_blocks, device)
    return blocks


def bind_blocks_at(
    address: int, binding: onnxruntime.IOBinding, kv: KVInput, n_blocks: int, device: str
) -> None:
    """Bind past and present to the blocks at an address."""
    where = (device, 0, kv.element_type, (n_blocks, *kv.shape), address)
    binding.bind_input(kv.name, *where)
    binding.bind_output(kv.present, *where)

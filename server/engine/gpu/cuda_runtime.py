"""Calls of CUDA's runtime library that ONNX Runtime does not offer."""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import numpy as np

# Major compute capabilities with machine code in ONNX Runtime's wheel, and the least minor ones. It
# has no code that the driver could translate for others.
_GENERATIONS = {7: 5, 8: 0, 9: 0, 12: 0}
_CAPABILITY = (75, 76)  # cudaDevAttrComputeCapabilityMajor and …Minor
_LIBRARY = "libcudart.so.13"  # of the CUDA version that ONNX Runtime's wheel is built for
_ANY_DIRECTION = 4  # cudaMemcpyDefault
_NON_BLOCKING = 1  # cudaStreamNonBlocking


class NoDeviceError(ValueError):
    """The GPU that a model was exported for is missing on this machine or in this installation."""


def free_memory() -> int:
    """Return the free bytes of the current GPU. Raises NoDeviceError."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


def check_capability() -> None:
    """Raise NoDeviceError for a GPU for whose generation ONNX Runtime has no machine code."""
    version = []
    for attribute in _CAPABILITY:
        value = ctypes.c_int()
        _call("cudaDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), 0)
        version.append(value.value)
    major, minor = version
    if minor < _GENERATIONS.get(major, 10):
        raise NoDeviceError(
            f"ONNX Runtime has no machine code for this GPU's compute capability {major}.{minor}; "
            "use one of 7.5, 8, 9 or 12, or export the model for the CPU"
        )


class DeviceBuffer:
    """Zeros in the current GPU's memory, freed with the object. Raises NoDeviceError.

    ONNX Runtime's arena would round up, and keep the memory as long as the process lives.
    """

    def __init__(self, n_bytes: int) -> None:
        pointer = ctypes.c_void_p()
        _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(n_bytes))
        self.address = pointer.value or 0
        weakref.finalize(self, _call, "cudaFree", pointer)
        _call("cudaMemset", pointer, 0, ctypes.c_size_t(n_bytes))
        _call("cudaDeviceSynchronize")  # ONNX Runtime's stream does not wait for the memset


class PinnedBuffer:
    """Bytes of this machine's memory that the GPU reads by itself. Raises NoDeviceError."""

    def __init__(self, n_bytes: int) -> None:
        pointer = ctypes.c_void_p()
        _call("cudaMallocHost", ctypes.byref(pointer), ctypes.c_size_t(n_bytes))
        self.address = pointer.value or 0
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(self.address))
        weakref.finalize(self, _call, "cudaFreeHost", pointer)


class CudaStream:
    """A stream of copies, on which a session runs as well, so both happen in order.

    It is a session's own: a capture takes in all that happens on a stream. Raises NoDeviceError.
    """

    device = "cuda"

    def __init__(self) -> None:
        self._stream = ctypes.c_void_p()
        _call("cudaStreamCreateWithFlags", ctypes.byref(self._stream), _NON_BLOCKING)

    @property
    def handle(self) -> int:
        """The address by which ONNX Runtime knows it."""
        return self._stream.value or 0

    def device_buffer(self, n_bytes: int) -> DeviceBuffer:
        """Return zeros on the device."""
        return DeviceBuffer(n_bytes)

    def pinned_buffer(self, n_bytes: int) -> PinnedBuffer:
        """Return memory from and to which copies need not wait."""
        return PinnedBuffer(n_bytes)

    def free_memory(self) -> int:
        """Return the free bytes of the GPU."""
        return free_memory()

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        """Begin a copy from one address to another, after everything else on the stream."""
        addresses = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(n_bytes)
        _call("cudaMemcpyAsync", *addresses, _ANY_DIRECTION, self._stream)

    def synchronize(self) -> None:
        """Wait until the stream has nothing to do."""
        _call("cudaStreamSynchronize", self._stream)


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NoDeviceError(
            f"CUDA's runtime cannot be loaded: {error}; install the extra cuda"
        ) from None


def _call(function: str, *arguments: object) -> None:
    library = _library()
    if code := getattr(library, function)(*arguments):
        library.cudaGetErrorString.restype = ctypes.c_char_p
        why = library.cudaGetErrorString(code).decode()
        raise NoDeviceError(
            f"no NVIDIA GPU can be used: {why}; check the driver, or export the model for the CPU"
        )

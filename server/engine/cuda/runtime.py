"""Calls of CUDA's runtime library that ONNX Runtime does not offer."""

from __future__ import annotations

import ctypes
import weakref

_LIBRARY = "libcudart.so.13"  # of the CUDA version that ONNX Runtime's wheel is built for


class NoDeviceError(ValueError):
    """The GPU that a model was exported for is missing on this machine or in this installation."""


def free_memory() -> int:
    """Return the free bytes of the current GPU. Raises NoDeviceError."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


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


def _call(function: str, *arguments: object) -> None:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NoDeviceError(
            f"CUDA's runtime cannot be loaded: {error}; install the extra cuda"
        ) from None
    if code := getattr(library, function)(*arguments):
        library.cudaGetErrorString.restype = ctypes.c_char_p
        why = library.cudaGetErrorString(code).decode()
        raise NoDeviceError(
            f"no NVIDIA GPU can be used: {why}; check the driver, or export the model for the CPU"
        )

"""What CUDA's runtime library is asked directly, because ONNX Runtime does not pass it on."""

from __future__ import annotations

import ctypes
import weakref

_LIBRARY = "libcudart.so.13"  # of the CUDA version that ONNX Runtime's wheel is built for


class NoDeviceError(ValueError):
    """A GPU that a model was exported for, and that this machine or this installation does not have."""


def free_memory() -> int:
    """Bytes that are free on the current GPU. Raises NoDeviceError."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


class DeviceBuffer:
    """Zeros in the current GPU's memory, which is given back with the object. Raises NoDeviceError.

    Not ONNX Runtime's arena: that rounds up, and keeps what it was given for as long as the process lives.
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
            f"no NVIDIA GPU can be used: {why}; look for the driver, or export the model for the CPU"
        )

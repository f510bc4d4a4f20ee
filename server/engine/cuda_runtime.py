"""What CUDA's runtime library is asked directly, because ONNX Runtime does not pass it on."""

from __future__ import annotations

import ctypes

_LIBRARY = "libcudart.so.13"  # of the CUDA version that ONNX Runtime's wheel is built for


class NoDeviceError(ValueError):
    """A GPU that a model was exported for, and that this machine or this installation does not have."""


def free_memory() -> int:
    """Bytes that are free on the current GPU. Raises NoDeviceError."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


def fill_with_zeros(address: int, n_bytes: int) -> None:
    """Write zeros to the GPU's memory: what it held before may be no number. Raises NoDeviceError."""
    _call("cudaMemset", ctypes.c_void_p(address), 0, ctypes.c_size_t(n_bytes))


def _call(function: str, *arguments: object) -> None:
    try:
        code = getattr(ctypes.CDLL(_LIBRARY), function)(*arguments)
    except OSError as error:
        raise NoDeviceError(f"CUDA's runtime cannot be loaded: {error}; install the extra cuda") from None
    if code:
        raise NoDeviceError(f"CUDA's runtime cannot be used: {function} returned error {code}")

"""ONNX Runtime sessions on WebGPU, by its plugin: GPUs of AMD, Intel, Apple and others."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np

from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.gpu.cuda import open_on_gpu
from kvasir.server.engine.gpu.cuda_runtime import NoDeviceError
from kvasir.server.engine.session import KVInput

_MEMORY = "webgpu"  # ONNX Runtime's name of the adapter's memory


def require_webgpu() -> None:
    """Load the plugin. Raises NoDeviceError if it is not installed or there is no adapter."""
    _find_device()


def open_webgpu_session(graph: Path) -> onnxruntime.InferenceSession:
    """Open a session on an adapter. Raises NoDeviceError if a node would run on the CPU."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices([_find_device()], {})
    return open_on_gpu(partial(onnxruntime.InferenceSession, graph, options))


def bind_webgpu_blocks(binding: onnxruntime.IOBinding, kv: KVInput, n_blocks: int) -> object:
    """Bind past and present to the same new blocks of zeros, and return what keeps them.

    ONNX Runtime would copy all blocks in each run if they were two.
    """
    assert kv.itemsize == np.dtype(np.float16).itemsize, f"{kv.name} is not of 16 bits"
    shape = (n_blocks, *map(int, kv.shape))
    blocks = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float16, _MEMORY, 0)
    blocks.update_inplace(np.zeros(shape, dtype=np.float16))
    binding.bind_ortvalue_input(kv.name, blocks)
    binding.bind_ortvalue_output(kv.present, blocks)
    return blocks


@cache  # a library is registered once
def _find_device() -> onnxruntime.OrtEpDevice:
    try:
        import onnxruntime_ep_webgpu as plugin  # noqa: PLC0415  of the extra webgpu
    except ImportError:
        raise NoDeviceError(
            "ONNX Runtime's plugin for WebGPU is missing; install the extra webgpu"
        ) from None
    name = plugin.get_ep_name()
    if not any(device.ep_name == name for device in onnxruntime.get_ep_devices()):
        onnxruntime.register_execution_provider_library(name, plugin.get_library_path())
    for device in onnxruntime.get_ep_devices():
        if device.ep_name == name:
            return device
    raise NoDeviceError(
        "WebGPU finds no adapter; check the GPU's driver and, on Linux, Vulkan's loader, or export "
        "the model for the CPU"
    )

"""ONNX Runtime sessions on CUDA, and a runner of a graph over KV cache blocks on the GPU."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from model.bundle import KV_BLOCK_SIZE
from model.config import TransformerConfig
from model.onnx.runtime import onnxruntime
from server.engine.cuda.runner import Inputs, PagedRunner
from server.engine.cuda.runtime import DeviceBuffer, NoDeviceError, free_memory
from server.engine.engine import check_max_model_len, warm_up
from server.engine.kv.blocks import KVBlocks
from server.engine.sampling import Floats
from server.engine.session import check_shape, kv_inputs

DEFAULT_CHUNK_SIZE = 2048  # prompt tokens in a step
_MEMORY_SHARE = 0.9
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
    free_memory()  # raises the error that says what is missing


def open_cuda_session(graph: Path) -> onnxruntime.InferenceSession:
    """Open a session on the first NVIDIA GPU.

    Raises NoDeviceError if there is none; ONNX Runtime would try the graph on the CPU.
    """
    require_cuda()
    onnxruntime.set_default_logger_severity(_FATAL)  # the errors below say it in one line
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            session = onnxruntime.InferenceSession(
                graph, onnxruntime.SessionOptions(), providers=[_CUDA, _CPU]
            )
    except Exception as error:  # ONNX Runtime's errors have no base class of their own
        raise NoDeviceError(
            f"ONNX Runtime cannot run the model on this GPU: {str(error).splitlines()[0]}"
        ) from None
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)
    if _CUDA not in session.get_providers():
        raise NoDeviceError(
            "ONNX Runtime finds no NVIDIA GPU that it can use; check the driver and the packages of"
            " the extra cuda, or export the model for the CPU"
        )
    return session


class DeviceModel:
    """A graph over blocks, which stay on a device: ids go in, logits come out.

    device, buffer: the device of the blocks, and the class of buffers of so many zero bytes there.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        n_blocks: int,
        device: str = "cuda",
        buffer: Callable[[int], Any] = DeviceBuffer,
    ) -> None:
        self._session = session
        self._io = session.io_binding()
        self._blocks = []
        for kv in kv_inputs(session):
            blocks = buffer(n_blocks * kv.bytes_per_item)
            where = (device, 0, kv.element_type, (n_blocks, *kv.shape), blocks.address)
            self._io.bind_input(kv.name, *where)
            self._io.bind_output(kv.present, *where)
            self._blocks.append(blocks)

    def run(self, inputs: Inputs) -> Floats:
        """Return logits [rows, vocab], on the CPU."""
        for name, array in inputs.items():
            self._io.bind_cpu_input(name, np.ascontiguousarray(array))
        self._io.bind_output("logits", "cpu")  # after the blocks, whose order it shares
        self._session.run_with_iobinding(self._io)
        logits: Floats = self._io.get_outputs()[len(self._blocks)].numpy()
        return logits


def block_bytes(session: onnxruntime.InferenceSession) -> int:
    """Return the size of one block's keys and values in all layers."""
    return sum(kv.bytes_per_item for kv in kv_inputs(session))


def open_cuda_runner(
    graph: Path,
    config: TransformerConfig,
    *,
    max_num_seqs: int,
    max_model_len: int | None = None,
    kv_cache_bytes: int | None = None,
    keep_prompts: bool = True,
) -> PagedRunner:
    """Load the graph and warm it up. Raises NoDeviceError, and ValueError for impossible limits.

    kv_cache_bytes: memory of the blocks; None is nine tenths of what is free once the longest chunk
    of a prompt has run and ONNX Runtime holds the memory for that. keep_prompts: see KVBlocks.
    """
    longest = check_max_model_len(max_model_len, config)
    session = open_cuda_session(graph)
    check_shape(session, config)

    def make_runner(n_blocks: int, max_num_seqs: int) -> PagedRunner:
        blocks = KVBlocks(
            n_blocks=n_blocks,
            block_size=KV_BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            keep_prompts=keep_prompts,
            token_bytes=block_bytes(session) // KV_BLOCK_SIZE,
        )
        model = DeviceModel(session, n_blocks)
        return PagedRunner(model, blocks, max_model_len=longest, vocab_size=config.vocab_size)

    chunk = min(DEFAULT_CHUNK_SIZE, longest - 1)
    warm_up(make_runner(-(-(chunk + 1) // KV_BLOCK_SIZE), max_num_seqs=1), chunk)
    budget = int(_MEMORY_SHARE * free_memory()) if kv_cache_bytes is None else kv_cache_bytes
    runner = make_runner(budget // block_bytes(session), max_num_seqs)
    warm_up(runner)
    return runner

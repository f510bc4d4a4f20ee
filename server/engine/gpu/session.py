"""A runner of a graph over KV cache blocks on a GPU, by CUDA or by WebGPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvasir.model.config import TransformerConfig
from kvasir.model.directory import KV_BLOCK_SIZE, Device
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.gpu.cuda import (
    bind_cuda_blocks,
    open_capturing_session,
    open_cuda_session,
    require_cuda,
)
from kvasir.server.engine.gpu.cuda_runtime import CudaStream, NoDeviceError, free_memory
from kvasir.server.engine.gpu.graphs import warn_without_graphs
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.gpu.outputs import DeviceOutputs
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.gpu.webgpu import bind_webgpu_blocks, open_webgpu_session, require_webgpu
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.model_runner import check_max_model_len, warm_up
from kvasir.server.engine.sampling.logits import most_logits
from kvasir.server.engine.session import KVInput, check_shape, kv_inputs

_MEMORY_SHARE = 0.9


class Backend(NamedTuple):
    """The way to one kind of GPU.

    require: raises NoDeviceError where there is none. open_session: takes a graph's path.
    bind_blocks: see `bind_cuda_blocks`. free_memory: None where nobody can tell, and the blocks
    then get `kv_cache_bytes` by default. chunk_size: prompt tokens in a step by default.
    open_stream: returns what copies outputs; None where each run copies all of its logits.
    open_capturing: opens a session on a stream that can capture runs; None where none can.
    """

    require: Callable[[], None]
    open_session: Callable[[Path], onnxruntime.InferenceSession]
    bind_blocks: Callable[[onnxruntime.IOBinding, KVInput, int], object]
    free_memory: Callable[[], int] | None
    chunk_size: int
    kv_cache_bytes: int | None = None
    open_stream: Callable[[], CudaStream] | None = None
    open_capturing: Callable[[Path, CudaStream], onnxruntime.InferenceSession] | None = None


BACKENDS: dict[Device, Backend] = {
    "cuda": Backend(
        require_cuda,
        open_cuda_session,
        bind_cuda_blocks,
        free_memory,
        2048,
        open_stream=CudaStream,
        open_capturing=open_capturing_session,
    ),
    "webgpu": Backend(
        require_webgpu, open_webgpu_session, bind_webgpu_blocks, None, 512, kv_cache_bytes=2**30
    ),
}


def block_bytes(session: onnxruntime.InferenceSession) -> int:
    """Return the size of one block's keys and values in all layers."""
    return sum(kv.bytes_per_item for kv in kv_inputs(session))


def open_gpu_runner(
    device: Device,
    graph: Path,
    config: TransformerConfig,
    *,
    max_num_seqs: int,
    max_model_len: int | None = None,
    kv_cache_bytes: int | None = None,
    chunk_size: int | None = None,
    keep_prompts: bool = True,
    captures: bool = True,
) -> PagedRunner:
    """Load the graph and warm it up. Raises NoDeviceError, and ValueError for impossible limits.

    kv_cache_bytes: memory of the blocks; None is nine tenths of what is free once the largest step
    has run and ONNX Runtime holds the memory for that, or 1 GiB where nobody can tell. chunk_size:
    most prompt tokens in a step. keep_prompts: see KVBlocks. captures: run decodes as CUDA graphs,
    where there are such; no other thread of the process may use the GPU then.
    """
    longest = check_max_model_len(max_model_len, config)
    backend = BACKENDS[device]
    backend.require()
    stream = backend.open_stream() if backend.open_stream else None
    session = stream and captures and _open_capturing(backend, graph, stream)
    captures = bool(session)
    session = session or backend.open_session(graph)
    check_shape(session, config)
    outputs = None
    if stream is not None:
        outputs = DeviceOutputs(session, stream, most_logits(max_num_seqs, config.vocab_size))

    def make_runner(n_blocks: int) -> PagedRunner:
        blocks = KVBlocks(
            n_blocks=n_blocks,
            block_size=KV_BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            keep_prompts=keep_prompts,
            token_bytes=block_bytes(session) // KV_BLOCK_SIZE,
        )
        model = DeviceModel(session, n_blocks, backend.bind_blocks, outputs)
        if captures and stream is not None:
            model.capture(stream, blocks)
        return PagedRunner(
            model,
            blocks,
            max_model_len=longest,
            vocab_size=config.vocab_size,
            rounds_kv=any(kv.itemsize == 1 for kv in kv_inputs(session)),
        )

    chunk = min(chunk_size or backend.chunk_size, longest - 1)
    budget = backend.kv_cache_bytes if kv_cache_bytes is None else kv_cache_bytes
    if budget is None:
        runner = make_runner(_measure_room(backend, session, make_runner, chunk, max_num_seqs))
        warm_up(runner)
    else:
        runner = make_runner(budget // block_bytes(session))
        warm_up_largest(runner, chunk)
    return runner


def _measure_room(
    backend: Backend,
    session: onnxruntime.InferenceSession,
    make_runner: Callable[[int], PagedRunner],
    chunk: int,
    max_num_seqs: int,
) -> int:
    """Run the largest steps over few blocks; return the blocks for which they leave memory."""
    assert backend.free_memory is not None
    most = int(_MEMORY_SHARE * backend.free_memory()) // block_bytes(session)
    wanted = -(-chunk // KV_BLOCK_SIZE) + max_num_seqs - 1
    runner = make_runner(min(most, wanted))
    warm_up_largest(runner, chunk)
    reserve = runner.model.graphs.reserve if runner.model.graphs else 0
    del runner  # which frees its blocks
    return int(_MEMORY_SHARE * (backend.free_memory() - reserve)) // block_bytes(session)


def _open_capturing(
    backend: Backend, graph: Path, stream: CudaStream
) -> onnxruntime.InferenceSession | None:
    """Open a session that can capture runs; return None, and say why, where none can."""
    if backend.open_capturing is None:
        return None
    try:
        return backend.open_capturing(graph, stream)
    except NoDeviceError as error:
        warn_without_graphs(error)
        return None


def warm_up_largest(runner: PagedRunner, chunk: int) -> None:
    """Run the largest steps that may come: of `chunk` prompt tokens, and of all sequences."""
    kv = runner.kv
    chunk = min(chunk, kv.budget_tokens)
    n_others = (kv.budget_tokens - kv.reservation(chunk, 0)) // kv.block_size
    warm_up(runner, chunk, 1 + min(kv.max_num_seqs - 1, n_others))

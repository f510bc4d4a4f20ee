"""A decoder on the CPU by operators of our own: a step is one run of packed tokens over blocks.

It is the GPU's way, `PagedRunner` over `KVBlocks`, in the memory of the CPU, and every token has
the same bits whatever else is in the run.
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir.kernels.library import Library, load
from kvasir.model.adapters.layout import Layout
from kvasir.model.config import TransformerConfig
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.model.platform.machine import usable_cpus
from kvasir.server.engine.adapters.loaded import GraphAdapters
from kvasir.server.engine.gpu.cuda import bind_blocks_at
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.kv.files import PrefixFiles
from kvasir.server.engine.kv.memory import map_memory
from kvasir.server.engine.model_runner import check_max_model_len, kv_memory
from kvasir.server.engine.runner import OnnxRunner
from kvasir.server.engine.session import KVInput, check_shape, kv_inputs, open_session

logger = logging.getLogger("kvasir")


def open_decoder(
    graph: Path,
    config: TransformerConfig,
    library: Library | None,
    layout: Layout | None = None,
    **options: Any,
) -> OnnxRunner | PagedRunner:
    """Load a decoder: over blocks, if operators of our own compute it so, or over rows.

    layout: of adapters; None is without. options: OnnxRunner's. Raises as it does.
    """
    if config.recurrence is not None:
        logger.info("%s runs over rows: it has recurrent layers", graph.parent.name)
    elif library is not None:
        from kvasir.kernels.graph import Mismatch  # noqa: PLC0415  imports onnx

        try:
            return open_packed_runner(graph, config, library, layout=layout, **options)
        except Mismatch as mismatch:
            logger.info("%s runs over rows: %s", graph.parent.name, mismatch)
    return OnnxRunner(graph, config, library=library, layout=layout, **options)


def open_packed_runner(
    graph: Path,
    config: TransformerConfig,
    library: Library,
    *,
    max_num_seqs: int,
    max_model_len: int | None = None,
    kv_cache_bytes: int | None = None,
    n_models: int = 1,
    prefix_cache_bytes: int | None = None,
    threads: int | None = None,
    layout: Layout | None = None,
) -> PagedRunner:
    """Load a graph. The arguments are OnnxRunner's, and layout, see `open_decoder`.

    Prompts that are kept share the memory of both budgets with sequences; prefix_cache_bytes: 0
    keeps none. Raises Mismatch for a graph that the operators do not compute, and ValueError as
    OnnxRunner.
    """
    from kvasir.kernels.page import BLOCK_SIZE, page  # noqa: PLC0415  imports onnx

    longest = check_max_model_len(max_model_len, config)
    adapters = None if layout is None else GraphAdapters(layout, library)
    session = open_session(
        graph, threads or usable_cpus(), library=library, rewrite=page, adapters=adapters
    )
    check_shape(session, config)
    block_bytes = sum(kv.bytes_per_item for kv in kv_inputs(session))
    n_bytes = kv_memory(kv_cache_bytes, n_models)
    cache_bytes = n_bytes // 10 if prefix_cache_bytes is None else prefix_cache_bytes
    most = max_num_seqs * -(-longest // BLOCK_SIZE)
    n_blocks = min(n_bytes // block_bytes, most) + cache_bytes // block_bytes
    if not n_blocks:
        raise ValueError(
            f"kv_cache_memory of {n_bytes} bytes holds no prompt: a block of {BLOCK_SIZE} tokens "
            f"takes {block_bytes}"
        )
    blocks = MemoryBlocks(
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        keep_prompts=cache_bytes > 0,
        token_bytes=block_bytes // BLOCK_SIZE,
    )
    model = DeviceModel(session, n_blocks, blocks.bind)
    return PagedRunner(
        model,
        blocks,
        max_model_len=longest,
        vocab_size=config.vocab_size,
        drafts_exactly=True,
        adapters=adapters,
    )


@cache
def own_library() -> Library | None:
    """Return the library of operators of our own; None where they cannot be used."""
    library = load("auto", None)
    return None if isinstance(library, str) else library


def find_packed_model(
    graph: Path, config: TransformerConfig
) -> tuple[Callable[[int], DeviceModel], int] | None:
    """Return what makes a decoder with so many blocks, and the tokens of one.

    None where operators of our own do not compute it, or are not there.
    """
    library = own_library()
    if library is None or config.recurrence is not None:
        return None
    from kvasir.kernels.graph import Mismatch  # noqa: PLC0415  imports onnx
    from kvasir.kernels.page import BLOCK_SIZE, page  # noqa: PLC0415  imports onnx

    try:
        session = open_session(graph, usable_cpus(), library=library, rewrite=page)
    except Mismatch:
        return None
    return partial(DeviceModel, session, bind_blocks=bind_cpu_blocks), BLOCK_SIZE


class MemoryBlocks(KVBlocks):
    """Blocks in the CPU's memory, of which free ones give their pages back."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._memories: list[tuple[mmap.mmap, int]] = []  # and the bytes of a block in each
        self.files: PrefixFiles | None = None

    def bind(self, binding: onnxruntime.IOBinding, kv: KVInput, n_blocks: int) -> object:
        """See bind_cpu_blocks."""
        memory = bind_cpu_blocks(binding, kv, n_blocks)
        self._memories.append((memory, kv.bytes_per_item))
        return memory

    def restore(self, row: int, names: list[bytes], n_done: int, limit: int) -> int:
        """See KVStore: blocks are read from files."""
        if self.files is None:
            return n_done
        n, blocks = n_done // self.block_size, self._held[row]
        n_most = n + max(1, limit // self.block_size)
        for name, block in zip(names[n:n_most], blocks[n:n_most], strict=False):
            if not self.files.read(name, self._parts(block)):
                break
            if name not in self.cache.blocks:
                self.cache.put(name, block)
                self._names[block] = name
            n += 1
        if n < n_most or n == len(names):
            self.files.keep(names[:n], lambda place: self._parts(blocks[place]))
        return n * self.block_size

    def _parts(self, block: int) -> list[NDArray[np.uint8]]:
        """Return a block's bytes in each memory."""
        return [
            np.frombuffer(memory, dtype=np.uint8, count=size, offset=block * size)
            for memory, size in self._memories
        ]

    def release_idle_memory(self) -> None:
        """See KVStore: named blocks stay."""
        if sys.platform != "linux":
            return
        free, page = np.sort(self._free), mmap.PAGESIZE
        for blocks in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
            for memory, size in self._memories if len(blocks) else ():
                start = -(-int(blocks[0]) * size // page) * page
                end = (int(blocks[-1]) + 1) * size // page * page
                if start < end:
                    memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def bind_cpu_blocks(binding: onnxruntime.IOBinding, kv: KVInput, n_blocks: int) -> mmap.mmap:
    """Bind past and present to the same new blocks, whose pages are taken when they are written."""
    memory = map_memory(n_blocks * kv.bytes_per_item)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    bind_blocks_at(address, binding, kv, n_blocks, "cpu")
    return memory

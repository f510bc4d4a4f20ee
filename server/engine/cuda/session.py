"""A model directory's graph for CUDA, ready to run: session, blocks on the GPU, runner."""

from __future__ import annotations

from pathlib import Path

from model.bundle import KV_BLOCK_SIZE
from model.config import DecoderConfig
from server.engine.cuda.runner import PagedRunner
from server.engine.cuda.runtime import free_memory
from server.engine.engine import check_max_model_len
from server.engine.kv.blocks import KVBlocks
from server.engine.session import DeviceModel, block_bytes, open_cuda_session

LONGEST_CHUNK = 2048  # prompt tokens in a step, unless set
_MEMORY_SHARE = 0.9


def open_cuda_runner(
    graph: Path,
    config: DecoderConfig,
    *,
    max_num_seqs: int,
    max_model_len: int | None = None,
    kv_cache_bytes: int | None = None,
    keep_prompts: bool = True,
) -> PagedRunner:
    """Load the graph and warm it up. kv_cache_bytes: for blocks; None is nine tenths of what is left, once the longest
    chunk of a prompt has run and ONNX Runtime holds the memory that this takes.

    Raises NoDeviceError where there is no GPU, and ValueError for a limit that cannot be met.
    """
    longest = check_max_model_len(max_model_len, config)
    session = open_cuda_session(graph)

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

    chunk = min(LONGEST_CHUNK, longest - 1)
    make_runner(-(-(chunk + 1) // KV_BLOCK_SIZE), max_num_seqs=1).warm_up(chunk)
    budget = int(_MEMORY_SHARE * free_memory()) if kv_cache_bytes is None else kv_cache_bytes
    runner = make_runner(budget // block_bytes(session), max_num_seqs)
    runner.warm_up()
    return runner

"""torch.compile of a network's blocks, where it is worth its time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import compiler, nn

from kvasir.model.network.block import Block
from kvasir.model.network.feed_forward import Mixture

# Compiling the blocks of `tiny` takes 73 s of a slow core, and its step 1.45 s then instead of 1.8.
# So many FLOPs are 530 of its steps, of whose time 185 s are saved.
_WORTH = 3e13


def is_worth(network: nn.Module, flops: float) -> bool:
    """Tell whether a run of so many FLOPs ends sooner if its blocks are compiled.

    Experts are not compiled, since each has another number of rows in every batch.
    """
    return flops >= _WORTH and not any(isinstance(part, Mixture) for part in network.modules())


def compile_blocks(network: nn.Module, trial: Callable[[], object]) -> str:
    """Compile a network's blocks for rows of one shape; return what is in the way, if anything is.

    Blocks alone: equal ones are compiled once. trial: computes a batch, as steps do.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # noqa: PLC0415  slow, and needed here alone
    from torch._inductor import config  # noqa: PLC0415

    config.fallback_random = True  # dropout drops what it would without
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    for block in blocks:
        block.compile(dynamic=False)
    try:
        trial()
    except BackendCompilerFailed as error:
        for block in blocks:
            block._compiled_call_impl = None
        cause = error.inner_exception
        return f"{type(cause).__name__}: {cause}".splitlines()[0]
    return ""


def uncompiled(compiled: bool) -> AbstractContextManager[None]:
    """Return a block in which nothing that was compiled is, for batches of other shapes."""
    stance: Any = compiler.set_stance  # it loads the compiler
    block: AbstractContextManager[None] = stance("force_eager") if compiled else nullcontext()
    return block

"""Training by several processes: who they are, what they agree on, and how a decoder is spread over them.

`torchrun` starts them and tells each one who it is. Without it there is one process, and nothing here communicates.
Tensors of the training itself go over NCCL on GPUs and Gloo on CPUs; what the processes agree on always goes over Gloo,
so that it needs no GPU and may wait for hours while one of them prepares the corpus.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model.checkpoint import CheckpointError
from model.network.decoder import Decoder

_LONGEST_WAIT = timedelta(days=1)


class DistributedError(ValueError):
    """What these processes cannot train together; the message has the mend."""


class PeerError(Exception):
    """Another process failed, and says why itself."""


class ShardError(CheckpointError):
    """Slices that could not be written or read; every process raises it."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that train together, seen from one of them. control: None where there is only this one."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this one prints and writes files."""
        return self.rank == 0

    def check_shard(self, shard: bool) -> None:
        """Raises DistributedError where there is nobody to share with."""
        if shard and self.control is None:
            raise DistributedError(
                "--shard spreads a decoder over processes; start with: torchrun --nproc-per-node N -m commands.train …"
            )

    def share(self, batch_size: int) -> int:
        """How many of a batch's rows are this process's. Raises DistributedError when they do not divide evenly."""
        if batch_size % self.size:
            raise DistributedError(
                f"a batch of {batch_size} cannot be split evenly over {self.size} processes; "
                f"use a --batch-size that {self.size} divides, or another --nproc-per-node"
            )
        return batch_size // self.size

    def reduce(self, value: float, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
        """The sum, say, of every process's value, the same on all of them."""
        if self.control is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, operation, self.control)
        return tensor.item()

    def any(self, flag: bool) -> bool:
        return self.reduce(flag, dist.ReduceOp.MAX) > 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Every process leaves this block together, or none does: the first one that failed raises its error, and the
        others PeerError. Nothing in the block may wait for another process.
        """
        failed = True
        try:
            yield
            failed = False
        finally:
            first = self.reduce(self.rank if failed else self.size, dist.ReduceOp.MIN)
            if first not in {self.rank, self.size}:
                raise PeerError

    def spread(self, decoder: Decoder, shard: bool) -> nn.Module:
        """What to call in place of the decoder, which is moved to the device; its gradients are then means over the
        processes.

        Every process keeps all parameters (DistributedDataParallel, Li et al. 2020) or, with `shard`, a slice of each
        block's (fully_shard, Zhao et al. 2023), gathered while the block computes; `decoder` then holds DTensors.
        """
        if self.control is None:
            return decoder.to(self.device)
        if shard:
            mesh = init_device_mesh(self.device.type, (self.size,))
            for block in decoder.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(decoder, mesh=mesh)
            return decoder
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            decoder.to(self.device), device_ids=devices, forward_sync_buffers=False
        )

    def save_shards(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Each process writes its slices of the tensors, with torch.distributed.checkpoint, as safetensors files whose
        headers say where in the whole the slices belong: nothing is pickled. Raises ShardError.
        """
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            save(state, storage_writer=writer, process_group=self.control)
        except CheckpointException as error:
            raise ShardError(f"{folder} cannot be written: {_cause(error)}") from None

    def load_shards(self, folder: Path, decoder: Decoder) -> dict[str, Tensor]:
        """Tensors "parameter/key" from what any number of processes wrote, each spread as its parameter is here.

        Raises ShardError.
        """
        reader = HuggingFaceStorageReader(str(folder))
        parameters = dict(decoder.named_parameters())
        state: dict[str, Tensor] = {}
        try:
            for name in sorted(reader.read_metadata().state_dict_metadata):
                owner, _, key = name.rpartition("/")
                if owner in parameters:
                    state[name] = (
                        torch.zeros(()) if key == "step" else torch.zeros_like(parameters[owner])
                    )
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "torch.distributed is disabled"
                )  # which is no mistake in one process
                if state:
                    load(
                        state,
                        storage_reader=reader,
                        process_group=self.control,
                        no_dist=self.control is None,
                    )
        except (SafetensorError, CheckpointException) as error:
            raise ShardError(f"{folder} cannot be loaded: {_cause(error)}") from None
        return state


def _cause(error: BaseException) -> BaseException:
    """What the first process that failed failed with."""
    return (
        next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    )


def find_device() -> torch.device:
    """This process's: of several on a machine, each has its own GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def alone() -> Processes:
    return Processes(0, 1, find_device())


@contextmanager
def join() -> Iterator[Processes]:
    """Meet the other processes that torchrun started, if it did."""
    if "RANK" not in os.environ:
        yield alone()
        return
    device = find_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        control = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        yield Processes(dist.get_rank(), dist.get_world_size(), device, control)
    finally:
        dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is spread over the processes, gathered by all of them; another one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def without_reducing(module: nn.Module) -> AbstractContextManager[None]:
    """Gradients of another backward pass are to come: DistributedDataParallel need not add them up yet. Shards are
    added up at once, because whole gradients would not fit.
    """
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

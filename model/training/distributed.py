"""The processes that train together: what they agree on, and how a decoder is spread over them.

`torchrun` starts the processes and tells each its rank; without it there is one process, and
nothing here communicates. Tensors of the training go over NCCL on GPUs and Gloo on CPUs. Agreement
always goes over Gloo: it needs no GPU, and may take hours while one process prepares the corpus.
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
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kvasir.model.checkpoint import CheckpointError
from kvasir.model.network.transformer import Transformer


class PeerError(Exception):
    """A failure of another process, which reports it."""


class ShardError(CheckpointError):
    """Shards that could not be written or read; every process raises it."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that train together, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None  # None: there is one process

    @property
    def is_first(self) -> bool:
        """True for the process that prints and writes files."""
        return self.rank == 0

    def check_shard(self, shard: bool) -> None:
        """Raise ValueError when sharding is wanted and there is only one process."""
        if shard and self.control is None:
            command = "torchrun --nproc-per-node N -m kvasir.commands.train …"
            raise ValueError(f"--shard spreads a decoder over processes; start with: {command}")

    def rows_per_process(self, batch_size: int) -> int:
        """Return this process's number of rows. Raises ValueError for an uneven split."""
        if batch_size % self.size:
            mend = f"use a --batch-size that {self.size} divides, or another --nproc-per-node"
            uneven = f"a batch of {batch_size} cannot be split evenly over {self.size} processes"
            raise ValueError(f"{uneven}; {mend}")
        return batch_size // self.size

    def reduce(self, value: float, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
        """Return the sum (or other reduction) of every process's value, the same on all."""
        if self.control is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, operation, self.control)
        return tensor.item()

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return all processes' rows, by rank; gradients reach those of this process alone."""
        if self.control is None:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.detach().contiguous())
        parts[self.rank] = rows
        return torch.cat(parts)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make all processes leave this block together, or none.

        The first process that failed raises its error, the others PeerError. Nothing in the block
        may wait for another process.
        """
        failed_rank = self.rank
        try:
            yield
            failed_rank = self.size  # none
        finally:
            first = self.reduce(failed_rank, dist.ReduceOp.MIN)
            if first not in {self.rank, self.size}:
                raise PeerError

    def spread(self, decoder: Transformer, shard: bool) -> nn.Module:
        """Move a decoder to the device and return the module to call in its place.

        Gradients are then means over the processes. Every process keeps all parameters
        (DistributedDataParallel, Li et al. 2020) or, with `shard`, a slice of each block's
        (fully_shard, Zhao et al. 2023), gathered while the block computes; `decoder` then holds
        DTensors.
        """
        if self.control is None:
            return decoder.to(self.device)
        if shard:
            mesh = init_device_mesh(self.device.type, (self.size,))
            of_encoder = () if decoder.encoder is None else decoder.encoder.blocks
            for module in (*decoder.blocks, *of_encoder, decoder):
                fully_shard(module, mesh=mesh)
            return decoder
        decoder.to(self.device)
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(decoder, device_ids=devices, forward_sync_buffers=False)

    def save_shards(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write this process's slices of the tensors as a safetensors file. Raises ShardError.

        The file's header says where in the whole the slices belong.
        """
        writer = hf_storage.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            save(state, storage_writer=writer, process_group=self.control)
        except CheckpointException as error:
            first, *_ = error.failures.values()
            raise ShardError(f"{folder} cannot be written: {first[0]}") from None

    def load_shards(self, folder: Path, decoder: Transformer) -> dict[str, Tensor]:
        """Return the written tensors, each spread as its parameter is here. Raises ShardError."""
        reader = hf_storage.HuggingFaceStorageReader(str(folder))
        parameters = dict(decoder.named_parameters())
        state: dict[str, Tensor] = {}
        try:
            for name in sorted(reader.read_metadata().state_dict_metadata):
                parameter, _, key = name.rpartition("/")
                if parameter in parameters:
                    like = torch.zeros(()) if key == "step" else parameters[parameter]
                    state[name] = torch.zeros_like(like)
            if state:
                with warnings.catch_warnings():  # one process is no mistake
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")
                    group = self.control
                    load(state, storage_reader=reader, process_group=group, no_dist=group is None)
        except (SafetensorError, CheckpointException) as error:
            failures = getattr(error, "failures", {0: (error,)})  # by process
            reason = next(iter(failures.values()))[0]
            raise ShardError(f"{folder} cannot be loaded: {reason}") from None
        return state


def one_process() -> Processes:
    """Return this process alone, with its GPU if it has one; torchrun gives each its own."""
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return Processes(0, 1, torch.device(gpu if torch.cuda.is_available() else "cpu"))


@contextmanager
def join() -> Iterator[Processes]:
    """Meet the other processes that torchrun started, if it did."""
    alone = one_process()
    if "RANK" not in os.environ:
        yield alone
        return
    on_gpu = alone.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(alone.device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        control = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        yield Processes(dist.get_rank(), dist.get_world_size(), alone.device, control)
    finally:
        dist.destroy_process_group()


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be spread; every process has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def without_reducing(module: nn.Module) -> AbstractContextManager[None]:
    """Return a block in which DistributedDataParallel does not reduce gradients yet."""
    # Shards reduce at once, because whole gradients would not fit.
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

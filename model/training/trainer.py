"""The training loop, in one process or in several that share each batch.

A step depends on (settings, seed, step) and the saved state alone, so a resumed run has the same
losses as an uninterrupted one. The number of processes changes nothing but rounding without
dropout; with dropout each process drops other values, and losses are equal in distribution only.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.distributed import ReduceOp
from torch.nn.utils import clip_grad_norm_

from kvasir.model import checkpoint
from kvasir.model.network.transformer import Transformer
from kvasir.model.platform.progress import handling
from kvasir.model.training.compilation import compile_blocks, uncompiled
from kvasir.model.training.data.tokens import TokenData
from kvasir.model.training.distributed import Processes, gather, one_process, without_reducing
from kvasir.model.training.flops import peak_flops
from kvasir.model.training.low_rank import adapter_parameters
from kvasir.model.training.metrics import Evaluation, StepMetrics, open_metrics
from kvasir.model.training.objectives import OBJECTIVES, Data
from kvasir.model.training.settings import TrainSettings

# Called after each step with its metrics, tokens per second, and a held-out prompt with a sampled
# continuation (empty where the step had no evaluation).
Report = Callable[[StepMetrics, float, tuple[str, str]], None]
_REHEARSALS, _REHEARSAL_SECONDS = 6, 2.0  # most steps that are timed first; their most seconds


class DivergedError(Exception):
    """A loss that is no longer a number; the last checkpoint is from before."""


@dataclass
class Trainer:
    """A network, its optimizer and the step they have reached, in each process that trains it."""

    decoder: Transformer
    tokenizer: Tokenizer
    data: Data
    settings: TrainSettings
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  # go into every checkpoint
    processes: Processes = field(default_factory=one_process)
    shard: bool = False  # processes hold slices of the decoder's and the optimizer's tensors
    base: Mapping[str, Any] | None = None  # of an adapter: its model, as training.json says
    step: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)  # of training, since the run began
    held_out: Evaluation = field(default=Evaluation(), init=False)
    compiled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        settings, device = self.settings, self.processes.device
        self.dtype = compute_type(device) if settings.mixed_precision else torch.float32
        if isinstance(self.data, TokenData) and self.decoder.pooler is not None:
            self.decoder.pooler.requires_grad_(False)  # masked tokens do not train it
        self.module = self.processes.spread(self.decoder, self.shard)
        kind = OBJECTIVES[type(self.data)]
        shared = (self.decoder, self.module, self.tokenizer, self.data, settings, self.processes)
        self.objective = kind(*shared, self.dtype)
        matrices = [p for p in self.decoder.parameters() if p.dim() >= 2]
        vectors = [p for p in self.decoder.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))

    @property
    def step_size(self) -> tuple[int, int]:
        """A step's tokens, in all processes, and the FLOPs of learning them."""
        n_rows = self.settings.batch_size * self.settings.accumulate
        n_tokens, flops = self.objective.row_size
        return n_rows * n_tokens, n_rows * flops

    def train(
        self, folder: Path, report: Report, forecast: Callable[[float], object] | None = None
    ) -> bool:
        """Train to the last step, with checkpoints and metrics.csv in `folder`.

        Before the first step a `forecast` is called with the seconds that one will take.
        Returns False when Ctrl-C or SIGTERM, to any of the processes, ended training early.
        """
        settings, processes = self.settings, self.processes
        peak = processes.reduce(peak_flops(processes.device, self.dtype))
        n_tokens, flops = self.step_size
        place = folder if processes.is_first else None
        log = open_metrics(place, self.step, tensorboard=settings.tensorboard)
        with _interruption() as interrupted, log as write:
            if forecast is not None and self.step < settings.steps:
                forecast(self._rehearse())
            while self.step < settings.steps and not processes.reduce(len(interrupted)):
                started, rate = time.perf_counter(), settings.learning_rate_at(self.step)
                loss, norm = self._update(rate)
                elapsed = time.perf_counter() - started
                self.step += 1
                self.seconds += elapsed
                held_out, sample = Evaluation(), ("", "")
                is_last = self.step == settings.steps
                if is_last or self.step % settings.evaluate_every == 0:
                    held_out = self.held_out = self.evaluate()
                    with uncompiled(self.compiled):
                        sample = self.objective.sample(self.step)
                metrics = StepMetrics(
                    step=self.step,
                    tokens=self.step * n_tokens,
                    train_loss=loss,
                    learning_rate=rate,
                    gradient_norm=norm,
                    seconds=round(self.seconds, 3),
                    mfu=flops / elapsed / peak,
                    **held_out.columns,
                )
                write(metrics)
                report(metrics, n_tokens / elapsed, sample)
                if self.step % settings.checkpoint_every == 0 and not is_last:
                    self.save(folder)
            self.save(folder)
            return self.step == settings.steps

    def compile(self) -> str:
        """Compile the network by a batch whose gradients are dropped; return why it cannot be."""

        def trial() -> None:
            self._make_gradients()
            self.optimizer.zero_grad(set_to_none=True)

        problem = compile_blocks(self.decoder, trial)
        self.compiled = not problem
        return problem

    def _rehearse(self) -> float:
        """Return the seconds of a step, from gradients that are dropped again.

        The optimizer's own time, a few per cent, is left out, as it would change the run.
        """
        times: list[float] = []
        while len(times) < _REHEARSALS and sum(times[1:]) < _REHEARSAL_SECONDS:
            started = time.perf_counter()
            self._make_gradients()
            self.optimizer.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - started
            times.append(self.processes.reduce(seconds, ReduceOp.MAX))
        return median(times[1:])  # the first is slower, on a GPU by seconds

    def _update(self, rate: float) -> tuple[float, float]:
        """Make one optimizer step; return the loss before it and the gradient's unclipped norm.

        Both are means over the targets of all processes and accumulated parts.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = self._make_gradients()
        if not math.isfinite(total):
            raise DivergedError(
                f"the loss became {total} at step {self.step + 1}; the last checkpoint is from "
                f"before that; start again with a learning rate below {rate:.2g}"
            )
        norm = gather(clip_grad_norm_(self.decoder.parameters(), self.settings.clip)).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _make_gradients(self) -> float:
        """Compute the gradients of the next step, and return its loss."""
        settings, processes = self.settings, self.processes
        self.module.train()
        seed_dropout(settings.seed, self.step, processes.rank)
        n_rows, draw = self.objective.n_rows, self.step * settings.accumulate
        rows = range(processes.rank * n_rows, (processes.rank + 1) * n_rows)
        batches = [
            self.data.batch(settings.seed, draw + i, settings.batch_size, settings.context, rows)
            for i in range(settings.accumulate)
        ]
        n_targets = processes.reduce(sum(batch.n_targets for batch in batches))
        total = 0.0
        for i, batch in enumerate(batches):
            with nullcontext() if i + 1 == len(batches) else without_reducing(self.module):
                loss = self.objective.loss(batch) / n_targets
                (loss * processes.size).backward()  # reducing takes the mean over processes
            total += loss.item()
        return processes.reduce(total)

    @torch.no_grad()  # FSDP2 cannot train with memory that it first took in inference mode
    def evaluate(self) -> Evaluation:
        """Measure what is held out."""
        self.module.eval()
        with uncompiled(self.compiled):
            return self.objective.evaluate()

    def save(self, folder: Path) -> None:
        """Write a checkpoint that any number of processes can continue, sharded or not."""
        is_first = self.processes.is_first
        held = adapter_parameters(self.decoder) or self.decoder.state_dict()
        tensors = ((name, gather(tensor.detach())) for name, tensor in held.items())
        weights = {name: tensor.cpu() for name, tensor in tensors if is_first}
        state = checkpoint.optimizer_state(self.decoder, self.optimizer)
        shards = folder / f"step-{self.step:08d}.{checkpoint.STATE_FOLDER}.part"
        if self.shard:
            with self.processes.together():
                if is_first:
                    shutil.rmtree(shards, ignore_errors=True)
            self.processes.save_shards(shards, state)
        progress: dict[str, Any] = {
            "settings": asdict(self.settings),
            "seconds": round(self.seconds, 1),
            **self.held_out.columns,
            "train_tokens": self.data.n_train,
            "held_out_tokens": self.data.n_held_out,
        }
        if self.base is not None:
            progress["base"] = self.base
        with self.processes.together():
            if is_first:
                checkpoint.save_checkpoint(
                    folder,
                    self.step,
                    self.decoder,
                    self.tokenizer,
                    shards if self.shard else state,
                    progress,
                    weights=weights,
                    extra_files=self.extra_files,
                )

    def restore(self, path: Path, progress: dict[str, Any]) -> None:
        """Continue from a checkpoint whose weights the decoder already holds."""
        if (path / checkpoint.STATE_FOLDER).is_dir():
            state = self.processes.load_shards(path / checkpoint.STATE_FOLDER, self.decoder)
        elif self.shard and (path / checkpoint.STATE_FILE).is_file():
            state = self.processes.load_shards(path, self.decoder)
        else:
            state = checkpoint.load_state(path)
        checkpoint.restore_optimizer(self.decoder, self.optimizer, state)
        self.step, self.seconds = progress["step"], progress["seconds"]
        self.held_out = Evaluation.of(progress)


def seed_dropout(seed: int, step: int, rank: int = 0) -> None:
    """Make dropout a function of (seed, step, rank), so resuming needs no generator's state."""
    state = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def compute_type(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the machine multiplies it in hardware, else float32."""
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported()
    else:
        capabilities = torch.cpu.get_capabilities()
        supported = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if supported else torch.float32


@contextmanager
def _interruption() -> Iterator[list[int]]:
    """Yield a list that Ctrl-C and SIGTERM append to, so that the current step can be saved."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:  # the second signal interrupts at once
            signal.default_int_handler(number, frame)
        caught.append(number)

    with handling(note, signal.SIGINT, signal.SIGTERM):
        yield caught

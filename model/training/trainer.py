"""The training loop: next-token cross-entropy with teacher forcing, in one process or in several that share each batch.

What a step computes depends on (settings, seed, step) and the saved state alone, so a resumed run continues to the same
losses as one that was never interrupted. How many processes compute it changes nothing but rounding, as long as nothing
is dropped: with dropout each process drops otherwise, and losses are the same in distribution only.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from model.checkpoint import (
    STATE_FILE,
    STATE_FOLDER,
    load_state,
    optimizer_state,
    restore_optimizer,
    save_checkpoint,
)
from model.network.decoder import Decoder
from model.reference import generate
from model.training.data import IGNORED, Batch, TokenData
from model.training.distributed import Processes, alone, whole, without_reducing
from model.training.flops import flops_per_token, peak_flops
from model.training.metrics import MetricsLog, StepMetrics, open_metrics

_SAMPLE_TOKENS = 64
_SAMPLE_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How to train. One step sees batch_size · accumulate · context tokens, whatever number of processes share them.

    The learning rate rises linearly over `warmup` steps and falls along a cosine to a tenth of itself (Loshchilov &
    Hutter 2017). weight_decay acts on matrices only (AdamW, Loshchilov & Hutter 2019). clip: largest gradient norm.
    mixed_precision: products in the type that `compute_type` finds.
    """

    steps: int
    context: int
    batch_size: int = 16
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 250
    evaluate_rows: int = 32
    checkpoint_every: int = 250
    mixed_precision: bool = True
    tensorboard: bool = False

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.accumulate * self.context

    def learning_rate_at(self, step: int) -> float:
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


class DivergedError(Exception):
    """The loss is no longer a number; what was learnt since the last checkpoint is lost."""


class Report(Protocol):
    """Who is told how training goes; `kvasir train` draws a progress bar."""

    def step(self, step: int, loss: float, tokens_per_second: float, mfu: float) -> None: ...

    def evaluated(self, step: int, held_out_loss: float, prompt: str, sample: str) -> None: ...


class Trainer:
    """A decoder, its optimizer and the step they have reached: in each of the processes that train it.

    With `shard`, processes hold slices of the decoder's and the optimizer's tensors. `extra_files` go into every
    checkpoint as they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        data: TokenData,
        settings: TrainSettings,
        *,
        extra_files: Mapping[str, bytes] | None = None,
        processes: Processes | None = None,
        shard: bool = False,
    ) -> None:
        self.processes = processes or alone()
        self.n_rows = self.processes.share(settings.batch_size)
        self.dtype = (
            compute_type(self.processes.device) if settings.mixed_precision else torch.float32
        )
        self.flops_per_token = flops_per_token(decoder, settings.context)
        self.shard = shard
        self.decoder = decoder
        self.module = self.processes.spread(decoder, shard)
        self.tokenizer = tokenizer
        self.data = data
        self.settings = settings
        self.extra_files = extra_files or {}
        self.step = 0
        self.seconds = 0.0  # of training, since the run began
        self.held_out_loss = math.nan
        matrices = [p for p in decoder.parameters() if p.dim() >= 2]
        others = [p for p in decoder.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))

    def run(self, folder: Path, report: Report) -> bool:
        """Train to the last step, with checkpoints and metrics.csv in `folder`; False when Ctrl-C or SIGTERM, to any of
        the processes, ended it early.
        """
        peak = self.processes.reduce(peak_flops(self.processes.device, self.dtype))
        log: AbstractContextManager[MetricsLog | None] = nullcontext()
        if self.processes.is_first:
            log = open_metrics(folder, self.step, tensorboard=self.settings.tensorboard)
        with _interruption() as interrupted, log as metrics_log:
            while self.step < self.settings.steps and not self.processes.any(bool(interrupted)):
                self._one_step(metrics_log, report, peak)
                if (
                    self.step % self.settings.checkpoint_every == 0
                    and self.step < self.settings.steps
                ):
                    self.save(folder)
            self.save(folder)
            return self.step == self.settings.steps

    def _one_step(self, log: MetricsLog | None, report: Report, peak: float) -> None:
        started = time.perf_counter()
        rate = self.settings.learning_rate_at(self.step)
        loss, norm = self._update(rate)
        self.step += 1
        seconds = time.perf_counter() - started
        self.seconds += seconds
        speed = self.settings.tokens_per_step / seconds
        metrics = StepMetrics(
            step=self.step,
            tokens=self.step * self.settings.tokens_per_step,
            train_loss=loss,
            held_out_loss=self._evaluate_if_due(report),
            learning_rate=rate,
            gradient_norm=norm,
            seconds=round(self.seconds, 3),
            mfu=speed * self.flops_per_token / peak,
        )
        if log is not None:
            log.write(metrics)
        report.step(self.step, loss, speed, metrics.mfu)

    def _evaluate_if_due(self, report: Report) -> float | None:
        if self.step % self.settings.evaluate_every and self.step < self.settings.steps:
            return None
        self.held_out_loss = self.evaluate()
        report.evaluated(self.step, self.held_out_loss, *self._sample())
        return self.held_out_loss

    def _update(self, rate: float) -> tuple[float, float]:
        """One optimizer step at a learning rate; the loss before it and the gradient's norm before clipping.

        Both are of the whole batch: means over the targets of all processes and accumulated parts at once.
        """
        settings = self.settings
        self.module.train()
        seed_dropout(settings.seed, self.step, self.processes.rank)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = [
            self._batch(self.step * settings.accumulate + i) for i in range(settings.accumulate)
        ]
        n_targets = self.processes.reduce(sum(batch.n_targets for batch in batches))
        total = 0.0
        for i, batch in enumerate(batches):
            with nullcontext() if i + 1 == len(batches) else without_reducing(self.module):
                loss = self._loss(batch) / n_targets
                (loss * self.processes.size).backward()  # what is reduced is a mean over processes
            total += loss.item()
        total = self.processes.reduce(total)
        if not math.isfinite(total):
            raise DivergedError(
                f"the loss became {total} at step {self.step + 1}, and the last checkpoint is from before that; "
                f"start again with a learning rate below {rate:.2g}"
            )
        norm = whole(
            torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), settings.clip)
        ).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _batch(self, draw: int) -> Batch:
        """This process's rows of a drawn batch."""
        settings = self.settings
        first = self.processes.rank * self.n_rows
        rows = range(first, first + self.n_rows)
        return self.data.batch(
            seed=settings.seed,
            step=draw,
            batch_size=settings.batch_size,
            context=settings.context,
            rows=rows,
        )

    def _loss(self, batch: Batch) -> Tensor:
        """Summed cross-entropy, in nats, of a batch's targets."""
        inputs, targets = (torch.from_numpy(ids).to(self.processes.device) for ids in batch)
        with mixed_precision(self.processes.device, self.dtype):
            logits = self.module(inputs)
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    @torch.inference_mode()
    def evaluate(self) -> float:
        """Mean cross-entropy, in nats, on the held-out text: each process takes equally many of its rows."""
        self.module.eval()
        batch = self.data.held_out_rows(self.settings.context, self.settings.evaluate_rows)
        total, n_targets = 0.0, 0
        for part in batch.share(self.processes.rank, self.processes.size).split(self.n_rows):
            total += self._loss(part).item()
            n_targets += part.n_targets
        return self.processes.reduce(total) / self.processes.reduce(n_targets)

    def _sample(self) -> tuple[str, str]:
        """The start of the held-out text and a sampled continuation, both within the decoder's positions."""
        longest = self.decoder.config.max_model_len
        n_prompt = self.data.prompt_length or _SAMPLE_PROMPT_TOKENS
        prompt_ids = self.data.held_out[: min(n_prompt, max(1, longest // 2))].tolist()
        max_tokens = min(_SAMPLE_TOKENS, longest - len(prompt_ids))
        output_ids = generate(
            self.decoder,
            prompt_ids,
            max_tokens=max_tokens,
            temperature=0.8,
            top_p=0.95,
            seed=self.step,
        )
        return self.tokenizer.decode(prompt_ids), self.tokenizer.decode(output_ids)

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `restore` continues from, in any number of processes, sharded or not."""
        weights: dict[str, Tensor] = {}
        for name, tensor in self.decoder.state_dict().items():
            gathered = whole(tensor)
            if self.processes.is_first:
                weights[name] = gathered.cpu()
        state: dict[str, Tensor] | Path = optimizer_state(self.decoder, self.optimizer)
        if self.shard and isinstance(state, dict):
            shards = folder / f"step-{self.step:08d}.{STATE_FOLDER}.part"
            with self.processes.together():
                if self.processes.is_first:
                    shutil.rmtree(shards, ignore_errors=True)
            self.processes.save_shards(shards, state)
            state = shards
        progress = {
            "settings": asdict(self.settings),
            "seconds": round(self.seconds, 1),
            "held_out_loss": None if math.isnan(self.held_out_loss) else self.held_out_loss,
            "train_tokens": self.data.n_train,
            "held_out_tokens": len(self.data.held_out),
        }
        with self.processes.together():
            if self.processes.is_first:
                save_checkpoint(
                    folder,
                    self.step,
                    self.decoder,
                    self.tokenizer,
                    state,
                    progress,
                    weights=weights,
                    extra_files=self.extra_files,
                )

    def restore(self, path: Path, progress: dict[str, Any]) -> None:
        """Continue from a checkpoint whose weights the decoder already holds."""
        if (path / STATE_FOLDER).is_dir():
            state = self.processes.load_shards(path / STATE_FOLDER, self.decoder)
        elif self.shard and (path / STATE_FILE).is_file():
            state = self.processes.load_shards(path, self.decoder)
        else:
            state = load_state(path)
        restore_optimizer(self.decoder, self.optimizer, state)
        self.step = progress["step"]
        self.seconds = progress["seconds"]
        if progress["held_out_loss"] is not None:
            self.held_out_loss = progress["held_out_loss"]


def seed_dropout(seed: int, step: int, rank: int = 0) -> None:
    """Make what a process drops in a step a function of (seed, step, rank), on every device: resuming needs no
    generator's state.
    """
    torch.manual_seed(
        int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
    )


def compute_type(device: torch.device) -> torch.dtype:
    """bfloat16 where the machine multiplies it in hardware, else float32."""
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported()
    else:
        capabilities = torch.cpu.get_capabilities()
        supported = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.bfloat16 if supported else torch.float32


def mixed_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Autocast of products to bfloat16; parameters, gradients and the optimizer's state stay float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


@contextmanager
def _interruption() -> Iterator[list[int]]:
    """A list that Ctrl-C and SIGTERM put an entry into, so that the step in progress is finished and saved. Twice is at
    once.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            signal.default_int_handler(number, frame)
        caught.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

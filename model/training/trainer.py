"""The training loop, in one process or in several that share each batch.

The loss is a cross-entropy: of next tokens, of tokens that were masked, or of the document that
belongs to a query among all of a batch.

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
from types import FrameType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from model import checkpoint
from model.network.transformer import Transformer
from model.reference import generate
from model.training.data import Batch, TokenData
from model.training.distributed import Processes, gather, one_process, without_reducing
from model.training.flops import flops_per_token, peak_flops
from model.training.masking import IGNORED
from model.training.metrics import StepMetrics, open_metrics
from model.training.pairs import PairBatch, PairData, rank_documents

# Called after each step with its metrics, tokens per second, and a held-out prompt with a sampled
# continuation (empty where the step had no evaluation).
Report = Callable[[StepMetrics, float, tuple[str, str]], None]
_SAMPLE_TOKENS = 64
_SAMPLE_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings of a training run.

    The learning rate rises linearly over `warmup` steps and falls along a cosine to a tenth of
    itself (Loshchilov & Hutter 2017). weight_decay acts on matrices only (AdamW, Loshchilov &
    Hutter 2019). clip: largest gradient norm.
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

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


class DivergedError(Exception):
    """A loss that is no longer a number; the last checkpoint is from before."""


@dataclass
class Trainer:
    """A network, its optimizer and the step they have reached, in each process that trains it."""

    decoder: Transformer
    tokenizer: Tokenizer
    data: TokenData | PairData
    settings: TrainSettings
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  # go into every checkpoint
    processes: Processes = field(default_factory=one_process)
    shard: bool = False  # processes hold slices of the decoder's and the optimizer's tensors
    step: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)  # of training, since the run began
    held_out_loss: float | None = field(default=None, init=False)
    held_out_accuracy: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        settings, device = self.settings, self.processes.device
        self.n_rows = self.processes.rows_per_process(settings.batch_size)
        self.dtype = compute_type(device) if settings.mixed_precision else torch.float32
        n_texts, length, in_pairs = 1, settings.context, isinstance(self.data, PairData)
        if isinstance(self.data, PairData):
            n_texts, length = self.data.pairs.shape[1], self.data.mean_length
        elif self.decoder.pooler is not None:
            self.decoder.pooler.requires_grad_(False)  # masked tokens do not train it
        self.tokens_per_step = settings.batch_size * settings.accumulate * n_texts * length
        self.flops_per_token = flops_per_token(self.decoder, length, has_logits=not in_pairs)
        self.module = self.processes.spread(self.decoder, self.shard)
        matrices = [p for p in self.decoder.parameters() if p.dim() >= 2]
        vectors = [p for p in self.decoder.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))

    def train(self, folder: Path, report: Report) -> bool:
        """Train to the last step, with checkpoints and metrics.csv in `folder`.

        Returns False when Ctrl-C or SIGTERM, to any of the processes, ended training early.
        """
        settings, processes = self.settings, self.processes
        peak = processes.reduce(peak_flops(processes.device, self.dtype))
        place = folder if processes.is_first else None
        log = open_metrics(place, self.step, tensorboard=settings.tensorboard)
        with _interruption() as interrupted, log as write:
            while self.step < settings.steps and not processes.reduce(len(interrupted)):
                started, rate = time.perf_counter(), settings.learning_rate_at(self.step)
                loss, norm = self._update(rate)
                elapsed = time.perf_counter() - started
                self.step += 1
                self.seconds += elapsed
                speed = self.tokens_per_step / elapsed
                mfu = speed * self.flops_per_token / peak
                tokens, seconds = self.step * self.tokens_per_step, round(self.seconds, 3)
                held_out_loss, accuracy, sample = None, None, ("", "")
                is_last = self.step == settings.steps
                if is_last or self.step % settings.evaluate_every == 0:
                    held_out_loss, accuracy = self.evaluate()
                    self.held_out_loss, self.held_out_accuracy = held_out_loss, accuracy
                    sample = self._sample()
                metrics = StepMetrics(
                    self.step, tokens, loss, held_out_loss, rate, norm, seconds, mfu, accuracy
                )
                write(metrics)
                report(metrics, speed, sample)
                if self.step % settings.checkpoint_every == 0 and not is_last:
                    self.save(folder)
            self.save(folder)
            return self.step == settings.steps

    def _update(self, rate: float) -> tuple[float, float]:
        """Make one optimizer step; return the loss before it and the gradient's unclipped norm.

        Both are means over the targets of all processes and accumulated parts.
        """
        settings, processes = self.settings, self.processes
        self.module.train()
        seed_dropout(settings.seed, self.step, processes.rank)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        first, draw = processes.rank * self.n_rows, self.step * settings.accumulate
        rows = range(first, first + self.n_rows)
        batches = [
            self.data.batch(settings.seed, draw + i, settings.batch_size, settings.context, rows)
            for i in range(settings.accumulate)
        ]
        n_targets = processes.reduce(sum(batch.n_targets for batch in batches))
        total = 0.0
        for i, batch in enumerate(batches):
            with nullcontext() if i + 1 == len(batches) else without_reducing(self.module):
                loss = self._loss(batch) / n_targets
                (loss * processes.size).backward()  # reducing takes the mean over processes
            total += loss.item()
        total = processes.reduce(total)
        if not math.isfinite(total):
            raise DivergedError(
                f"the loss became {total} at step {self.step + 1}; the last checkpoint is from "
                f"before that; start again with a learning rate below {rate:.2g}"
            )
        norm = gather(clip_grad_norm_(self.decoder.parameters(), settings.clip)).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _loss(self, batch: Batch | PairBatch) -> Tensor:
        """Return the summed cross-entropy, in nats, of a batch's targets in this process."""
        if isinstance(batch, Batch):
            return _cross_entropy(*self._logits(batch))
        # Every process ranks all documents, because its gradients are those of its own vectors.
        vectors = self.processes.gather_rows(self._vectors(batch))
        loss = _cross_entropy(*rank_documents(vectors, batch.texts))
        return loss - loss.detach() * (1 - 1 / self.processes.size)

    def _logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits [tokens, vocab] and targets [tokens]."""
        inputs, targets = (torch.from_numpy(ids).to(self.processes.device) for ids in batch)
        with self._precision():
            logits = self.module(inputs)
        return logits.flatten(0, 1).float(), targets.flatten()

    def _vectors(self, batch: PairBatch) -> Tensor:
        """Return the vectors of this process's pairs, [pairs, columns, d_out]."""
        inputs = (batch.ids, batch.lengths)
        ids, lengths = (torch.from_numpy(one).to(self.processes.device) for one in inputs)
        with self._precision():
            vectors: Tensor = self.module(ids, lengths, pooled=True)
        rows: Tensor = vectors.float().unflatten(0, (-1, batch.texts.shape[1]))
        return rows

    def _precision(self) -> torch.autocast:
        # Only products are in bfloat16; parameters, gradients and the optimizer's state are not.
        enabled = self.dtype == torch.bfloat16
        return torch.autocast(self.processes.device.type, dtype=torch.bfloat16, enabled=enabled)

    @torch.inference_mode()
    def evaluate(self) -> tuple[float, float]:
        """Return the mean cross-entropy, in nats, and the accuracy, on what is held out."""
        self.module.eval()
        settings, processes = self.settings, self.processes
        if isinstance(self.data, PairData):
            return self._evaluate_pairs(self.data)
        batch = self.data.held_out_rows(settings.context, settings.evaluate_rows)
        total, n_right, n_targets = 0.0, 0.0, 0
        share = batch.share(processes.rank, processes.size)
        for start in range(0, len(share.inputs), self.n_rows):
            part = Batch(*(ids[start : start + self.n_rows] for ids in share))
            logits, targets = self._logits(part)
            total += _cross_entropy(logits, targets).item()
            n_right += (logits.argmax(dim=1) == targets).sum().item()
            n_targets += part.n_targets
        total, n_right, n = (processes.reduce(value) for value in (total, n_right, n_targets))
        return total / n, n_right / n

    def _evaluate_pairs(self, data: PairData) -> tuple[float, float]:
        """Return the loss of batches of held-out pairs, and the share of queries that find theirs.

        Candidates are all documents that are held out. Every process computes everything.
        """
        pairs, size = data.held_out_pairs(self.settings.evaluate_rows), self.settings.batch_size
        starts = range(0, len(pairs), self.n_rows)
        parts = (data.read(pairs[i : i + self.n_rows], range(self.n_rows)) for i in starts)
        vectors = torch.cat([self._vectors(part) for part in parts])
        total = 0.0
        for start in range(0, len(pairs), size):
            some = slice(start, start + size)
            total += _cross_entropy(*rank_documents(vectors[some], pairs[some])).item()
        logits, targets = rank_documents(vectors, pairs)
        return total / len(pairs), (logits.argmax(dim=1) == targets).double().mean().item()

    def _sample(self) -> tuple[str, str]:
        """Return the start of the held-out text and a decoder's sampled continuation of it."""
        if isinstance(self.data, PairData) or self.data.masking is not None:
            return "", ""
        decoder, step, longest = self.decoder, self.step, self.decoder.config.max_model_len
        n_prompt = self.data.prompt_length or _SAMPLE_PROMPT_TOKENS
        prompt = self.data.held_out[: min(n_prompt, max(1, longest // 2))].tolist()
        n = min(_SAMPLE_TOKENS, longest - len(prompt))
        output = generate(decoder, prompt, max_tokens=n, temperature=0.8, top_p=0.95, seed=step)
        return self.tokenizer.decode(prompt), self.tokenizer.decode(output)

    def save(self, folder: Path) -> None:
        """Write a checkpoint that any number of processes can continue, sharded or not."""
        is_first = self.processes.is_first
        tensors = ((name, gather(one)) for name, one in self.decoder.state_dict().items())
        weights = {name: tensor.cpu() for name, tensor in tensors if is_first}
        state = checkpoint.optimizer_state(self.decoder, self.optimizer)
        shards = folder / f"step-{self.step:08d}.{checkpoint.STATE_FOLDER}.part"
        if self.shard:
            with self.processes.together():
                if is_first:
                    shutil.rmtree(shards, ignore_errors=True)
            self.processes.save_shards(shards, state)
        progress = {
            "settings": asdict(self.settings),
            "seconds": round(self.seconds, 1),
            "held_out_loss": self.held_out_loss,
            "held_out_accuracy": self.held_out_accuracy,
            "train_tokens": self.data.n_train,
            "held_out_tokens": self.data.n_held_out,
        }
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
        self.held_out_loss = progress["held_out_loss"]
        self.held_out_accuracy = progress.get("held_out_accuracy")


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum, in nats; logits: [targets, classes]."""
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


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

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

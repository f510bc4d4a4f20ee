"""The training loop: next-token cross-entropy with teacher forcing, on whatever one machine has.

What a step computes depends on (settings, seed, step) and the saved state alone, so a resumed run continues to the same
losses as one that was never interrupted.
"""

from __future__ import annotations

import csv
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

import numpy as np
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from model.checkpoint import load_state, optimizer_state, restore_optimizer, save_checkpoint
from model.data import TokenData
from model.decoder import Decoder
from model.generate import generate

METRICS_FILE = "metrics.csv"
_COLUMNS = ["step", "tokens", "train_loss", "held_out_loss", "learning_rate", "gradient_norm", "seconds"]
_SAMPLE_TOKENS = 64
_SAMPLE_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How to train. One step sees batch_size · accumulate · context tokens.

    The learning rate rises linearly over `warmup` steps and falls along a cosine to a tenth of itself (Loshchilov &
    Hutter 2017). weight_decay acts on matrices only (AdamW, Loshchilov & Hutter 2019). clip: largest gradient norm.
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

    def step(self, step: int, loss: float, tokens_per_second: float) -> None: ...

    def evaluated(self, step: int, held_out_loss: float, prompt: str, sample: str) -> None: ...


class Trainer:
    """A decoder, its optimizer and the step they have reached."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, data: TokenData, settings: TrainSettings) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.decoder = decoder.to(self.device)
        self.tokenizer = tokenizer
        self.data = data
        self.settings = settings
        self.step = 0
        self.seconds = 0.0  # of training, over all sessions of the run
        self.held_out_loss = math.nan
        matrices = [p for p in decoder.parameters() if p.dim() >= 2]
        others = [p for p in decoder.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))

    def run(self, folder: Path, report: Report) -> bool:
        """Train to the last step, with checkpoints and metrics.csv in `folder`; False when Ctrl-C ended it early."""
        with _interruption() as interrupted, _open_metrics(folder / METRICS_FILE, self.step) as metrics:
            writer = csv.writer(metrics)
            while self.step < self.settings.steps and not interrupted:
                self._one_step(writer, report)
                metrics.flush()
                if self.step % self.settings.checkpoint_every == 0 and self.step < self.settings.steps:
                    self.save(folder)
            self.save(folder)
            return self.step == self.settings.steps

    def _one_step(self, writer: Any, report: Report) -> None:
        started = time.perf_counter()
        rate = self.settings.learning_rate_at(self.step)
        loss, norm = self._update(rate)
        self.step += 1
        self.seconds += time.perf_counter() - started
        held_out: float | str = ""
        if self.step % self.settings.evaluate_every == 0 or self.step == self.settings.steps:
            held_out = self.held_out_loss = self.evaluate()
            report.evaluated(self.step, held_out, *self._sample())
        tokens = self.step * self.settings.tokens_per_step
        writer.writerow([self.step, tokens, loss, held_out, rate, norm, round(self.seconds, 3)])
        report.step(self.step, loss, self.settings.tokens_per_step / (time.perf_counter() - started))

    def _update(self, rate: float) -> tuple[float, float]:
        """One optimizer step at a learning rate; the loss before it and the gradient's norm before clipping."""
        self.decoder.train()
        seed_dropout(self.settings.seed, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        settings = self.settings
        for i in range(settings.accumulate):
            draw = self.step * settings.accumulate + i
            rows = self.data.batch(
                seed=settings.seed, step=draw, batch_size=settings.batch_size, context=settings.context
            )
            loss = self._loss(torch.from_numpy(rows)) / settings.accumulate
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise DivergedError(
                f"the loss became {total} at step {self.step + 1}, and the last checkpoint is from before that; "
                f"start again with a learning rate below {rate:.2g}"
            )
        norm = torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), settings.clip).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _loss(self, rows: Tensor) -> Tensor:
        """Mean next-token cross-entropy, in nats, of rows [batch, context + 1]."""
        rows = rows.to(self.device)
        with mixed_precision(self.device):
            logits = self.decoder(rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    @torch.inference_mode()
    def evaluate(self) -> float:
        """Mean cross-entropy, in nats, on the held-out text."""
        self.decoder.eval()
        rows = torch.from_numpy(self.data.held_out_rows(self.settings.context, self.settings.evaluate_rows))
        losses = [self._loss(part).item() * len(part) for part in rows.split(self.settings.batch_size)]
        return sum(losses) / len(rows)

    def _sample(self) -> tuple[str, str]:
        """The start of the held-out text and a sampled continuation, both within the decoder's positions."""
        longest = self.decoder.config.max_model_len
        prompt_ids = self.data.held_out[: min(_SAMPLE_PROMPT_TOKENS, max(1, longest // 2))].tolist()
        max_tokens = min(_SAMPLE_TOKENS, longest - len(prompt_ids))
        output_ids = generate(
            self.decoder, prompt_ids, max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=self.step
        )
        return self.tokenizer.decode(prompt_ids), self.tokenizer.decode(output_ids)

    def save(self, folder: Path) -> Path:
        """Write a checkpoint that `restore` continues from."""
        state = optimizer_state(self.decoder, self.optimizer)
        progress = {
            "settings": asdict(self.settings),
            "seconds": round(self.seconds, 1),
            "held_out_loss": None if math.isnan(self.held_out_loss) else self.held_out_loss,
            "train_tokens": self.data.n_train,
            "held_out_tokens": len(self.data.held_out),
        }
        return save_checkpoint(folder, self.step, self.decoder, self.tokenizer, state, progress)

    def restore(self, path: Path, progress: dict[str, Any]) -> None:
        """Continue from a checkpoint whose weights the decoder already holds."""
        restore_optimizer(self.decoder, self.optimizer, load_state(path))
        self.step = progress["step"]
        self.seconds = progress["seconds"]
        if progress["held_out_loss"] is not None:
            self.held_out_loss = progress["held_out_loss"]


def seed_dropout(seed: int, step: int) -> None:
    """Make what a step drops a function of (seed, step), on every device: resuming needs no generator's state."""
    torch.manual_seed(int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0]))


def mixed_precision(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 autocast where the machine multiplies bfloat16 in hardware, else float32."""
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported()
    else:
        capabilities = torch.cpu.get_capabilities()
        supported = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=supported)


@contextmanager
def _interruption() -> Iterator[list[int]]:
    """A list that Ctrl-C puts an entry into, so that the step in progress is finished and saved. Twice is at once."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            signal.default_int_handler(number, frame)
        caught.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _open_metrics(path: Path, step: int) -> Iterator[IO[str]]:
    """metrics.csv, with the rows up to `step` kept and later ones (of a run that was cut off) dropped."""
    kept: list[list[str]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.reader(file) if row and row[0].isdigit() and int(row[0]) <= step]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([_COLUMNS, *kept])
        yield file


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw metrics.csv as a PNG: training loss per step, held-out loss where it was measured."""
    with metrics.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    held_out = [row for row in rows if row["held_out_loss"]]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([int(r["step"]) for r in rows], [float(r["train_loss"]) for r in rows], linewidth=0.8, label="training")
    axes.plot([int(r["step"]) for r in held_out], [float(r["held_out_loss"]) for r in held_out], "o-", label="held out")
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)

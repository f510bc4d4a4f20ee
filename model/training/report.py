"""Reports of a training run: a moving bar, its expected time, evaluations and samples."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from torch import cuda

from kvasir.model.platform.machine import usable_cpus
from kvasir.model.platform.printable import printable
from kvasir.model.training.distributed import Processes
from kvasir.model.training.metrics import Evaluation, StepMetrics
from kvasir.model.training.trainer import Report

# Called with "training", the step, the number of steps, and a note: loss, speed and MFU.
StepProgress = Callable[[str, int, int, str], object]
_LONG = 10  # seconds of a run that gets a forecast
_TASTE, _TASTE_SECONDS = 300, 600  # most steps and seconds of a run that is suggested for a taste
_FEWEST = 30  # steps of which a taste may show that the loss falls


def console_report(
    lines: Console, progress: StepProgress, steps: int, *, has_perplexity: bool = True
) -> Report:
    """Return a report that moves a progress bar, and prints each evaluation."""

    def report(metrics: StepMetrics, tokens_per_second: float, sample: tuple[str, str]) -> None:
        if metrics.held_out_loss is not None:
            print_held_out(lines, metrics.step, Evaluation.of(asdict(metrics)), has_perplexity)
            if sample[1]:
                _print_sample(lines, *sample)
        note = f"loss {metrics.train_loss:.3f} · MFU {metrics.mfu:.0%}"
        progress("training", metrics.step, steps, f"{note} · {tokens_per_second:,.0f} tokens/s")

    return report


def print_held_out(
    lines: Console, step: int, held_out: Evaluation, has_perplexity: bool = True
) -> None:
    """Print an evaluation, with the perplexity that a loss of tokens means."""
    text = str(held_out)
    if has_perplexity and held_out.loss is not None:
        text += f", perplexity {math.exp(min(held_out.loss, 700.0)):,.1f}"
    lines.print(Text.assemble((f"step {step:,}", "bold"), f"  {text}"), soft_wrap=True)


def expected_time(seconds: float, step: int, steps: int, processes: Processes) -> str:
    """Return how long the steps that are left take, if that is worth a line, and a shorter run.

    seconds: of one step.
    """
    left = seconds * (steps - step)
    if left < _LONG:
        return ""
    where = f"{usable_cpus()} CPUs"
    if processes.device.type == "cuda":
        where = f"{processes.size} x {cuda.get_device_name(processes.device)}"
    text = f"about {_in_words(left)} on {where}, beside evaluations"
    taste = min(_TASTE, int(_TASTE_SECONDS / seconds))
    taste -= taste % 10
    if step > 0 or steps <= 2 * taste:
        shorter = ""
    elif taste < _FEWEST:
        shorter = "; a smaller --preset or --context learns sooner"
    else:
        shorter = f"; for a taste, --steps {taste} takes {_in_words(seconds * taste)}"
    return f"{text}{shorter}; Ctrl-C stops and saves"


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:,.0f} days"


def _print_sample(lines: Console, prompt: str, text: str) -> None:
    """Print a prompt and its continuation as an indented block, with their own line breaks."""
    prompt, text = printable(prompt), printable(text)
    if lines.is_terminal:
        block = Text.assemble((prompt, "dim"), text)
        lines.print(Padding(block, (0, 0, 0, 4), expand=False))
    else:  # whose lines are not wrapped
        lines.print(textwrap.indent(prompt + text, "    "), soft_wrap=True)

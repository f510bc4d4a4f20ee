"""The settings of a training run, and the learning rate that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Schedule = Literal["cosine", "inverse-sqrt"]
# Repeating text further teaches little (Muennighoff et al. 2023: a repeated token's value decays
# with a constant of 15 repetitions).
PASSES = 16
_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
_EVALUATIONS, _LONGEST_WAIT = 5, 250  # at least so many evaluations; most steps between them


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings of a training run.

    The learning rate rises linearly over `warmup` steps. With the schedule "cosine" it then falls
    along a cosine to a tenth of itself (Loshchilov & Hutter 2017). With "inverse-sqrt" it falls
    with the square root of the step; a learning_rate of (d_model · warmup)^-0.5 makes that the one
    of Vaswani et al. 2017, equation 3. weight_decay acts on matrices only (AdamW, Loshchilov &
    Hutter 2019). clip: largest gradient norm. label_smoothing: the share of a translation's targets
    that all tokens have equally (Szegedy et al. 2016). compile: whether blocks are compiled.
    steps and evaluate_every: 0 lets `completed` choose.
    """

    steps: int
    context: int
    batch_size: int = 16
    accumulate: int = 1
    learning_rate: float = 1e-3
    schedule: Schedule = "cosine"
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    label_smoothing: float = 0.0
    seed: int = 0
    evaluate_every: int = 250
    evaluate_rows: int = 32
    checkpoint_every: int = 250
    mixed_precision: bool = True
    compile: bool = False
    tensorboard: bool = False

    def completed(
        self, step_tokens: int, n_train: int, n_parameters: int, passes: int = PASSES
    ) -> TrainSettings:
        """Return the settings with `steps` and `evaluate_every` chosen where they are 0.

        The steps pass so many times through the text of n_train tokens, but see no more than 20
        tokens per parameter, and are no fewer than the warm-up.
        """
        n_tokens = min(passes * n_train, _TOKENS_PER_PARAMETER * n_parameters)
        steps = self.steps or max(self.warmup, math.ceil(n_tokens / step_tokens))
        every = self.evaluate_every or min(_LONGEST_WAIT, math.ceil(steps / _EVALUATIONS))
        return replace(self, steps=steps, evaluate_every=every)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "inverse-sqrt":
            return self.learning_rate * math.sqrt(self.warmup / (step + 1))
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

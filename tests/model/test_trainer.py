"""The training loop against AdamW written out, and a resumed run against an uninterrupted one."""

from __future__ import annotations

import csv
import math
import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.network.transformer import Transformer
from kvasir.model.tokenizer import train_tokenizer
from kvasir.model.training import trainer as training
from kvasir.model.training.data.corpus import Corpus
from kvasir.model.training.data.tokens import Batch, TokenData, write_tokens
from kvasir.model.training.metrics import StepMetrics, plot_losses
from kvasir.model.training.settings import TrainSettings
from kvasir.model.training.trainer import Trainer
from tests.kit.random_models import make_config
from tests.kit.training_runs import metrics

TEXTS = [
    f"The {animal} sat on the {place}.\n" * 6
    for animal in ("cat", "dog", "hen")
    for place in ("mat", "log")
]
CONTEXT = 16
tokenizer = train_tokenizer(TEXTS, 270)
CONFIG = make_config(vocab_size=tokenizer.get_vocab_size(), max_model_len=32, n_layer=1)
SETTINGS = TrainSettings(
    steps=8,
    context=CONTEXT,
    batch_size=2,
    warmup=3,
    evaluate_every=3,
    evaluate_rows=3,
    checkpoint_every=4,
    seed=1,
)


class Recorder:
    """A report that keeps what the loop told it; `at` runs while the loop is in a step."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        self.at = at or {}
        self.losses: list[float] = []
        self.speeds: list[tuple[float, float]] = []
        self.evaluations: list[tuple[int, float, str, str]] = []

    def __call__(self, metrics: StepMetrics, speed: float, sample: tuple[str, str]) -> None:
        self.speeds.append((speed, metrics.mfu))
        self.losses.append(metrics.train_loss)
        if metrics.held_out_loss is not None:
            self.evaluations.append((metrics.step, metrics.held_out_loss, *sample))
        self.at.get(metrics.step, lambda: None)()


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    folder = tmp_path_factory.mktemp("corpus") / "data"
    return write_tokens(Corpus(TEXTS, 0), tokenizer, folder, held_out=0.3, context=CONTEXT)


def make_trainer(data: TokenData, settings: TrainSettings = SETTINGS, **changes: Any) -> Trainer:
    torch.manual_seed(5)
    return Trainer(Transformer(replace(CONFIG, **changes)), tokenizer, data, settings)


def resume(folder: Path, data: TokenData) -> Trainer:
    """As a new process would, whatever its random state."""
    torch.manual_seed(999)
    torch.rand(7)
    checkpoint = load_checkpoint(folder)
    settings = TrainSettings(**checkpoint.progress["settings"])
    trainer = Trainer(checkpoint.decoder, checkpoint.tokenizer, data, settings)
    trainer.restore(checkpoint.path, checkpoint.progress)
    return trainer


def rows_of(batch: Batch) -> Tensor:
    """[rows, context + 1]: inputs, and the last target."""
    return torch.cat(
        [torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets[:, -1:])], dim=1
    )


def weights(folder: Path) -> dict[str, Tensor]:
    return load_checkpoint(folder).decoder.state_dict()


# One step


@pytest.mark.parametrize("warmup", [1, 10, 300])
def test_the_learning_rate_rises_linearly_and_falls_along_a_cosine(warmup: int) -> None:
    settings = TrainSettings(steps=200, context=8, learning_rate=0.4, warmup=warmup)
    for step in range(200):
        if step < warmup:
            expected = 0.4 * (step + 1) / warmup
        else:
            expected = 0.04 + 0.36 * (1 + math.cos(math.pi * (step - warmup) / (200 - warmup))) / 2
        assert math.isclose(settings.learning_rate_at(step), expected)
    assert math.isclose(settings.learning_rate_at(199), 0.04, rel_tol=0.1) or warmup > 200


def test_steps_are_chosen_by_the_text_the_network_and_the_warm_up() -> None:
    settings = TrainSettings(steps=0, evaluate_every=0, context=8, warmup=10)
    by_text = settings.completed(100, 1_001, 10**9)
    assert (by_text.steps, by_text.evaluate_every) == (161, 33)
    by_network = settings.completed(100, 10**9, 50_000)
    assert (by_network.steps, by_network.evaluate_every) == (10_000, 250)
    assert settings.completed(100, 1, 1).steps == 10
    given = replace(settings, steps=3, evaluate_every=7)
    assert given.completed(100, 1_001, 10**9) == given


def adamw_by_formula(
    decoder: Transformer, batches: list[Tensor], settings: TrainSettings
) -> list[tuple[float, float]]:
    """Return each step's loss and gradient norm (Loshchilov & Hutter 2019, Algorithm 2)."""
    moments = {
        name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in decoder.named_parameters()
    }
    history = []
    for t, rows in enumerate(batches, start=1):
        logits = decoder(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        decoder.zero_grad()
        loss.backward()
        gradients = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        history.append((loss.item(), norm))
        rate = settings.learning_rate_at(t - 1)
        with torch.no_grad():
            for name, p in decoder.named_parameters():
                gradient = gradients[name] * min(1.0, settings.clip / norm)
                first, second = moments[name]
                first.mul_(0.9).add_(0.1 * gradient)
                second.mul_(0.95).add_(0.05 * gradient**2)
                adapted = first / (1 - 0.9**t) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
                p.sub_(rate * (adapted + (settings.weight_decay * p if p.dim() > 1 else 0.0)))
    return history


@pytest.mark.parametrize(("accumulate", "clip"), [(1, 100.0), (2, 0.1)])
def test_steps_are_adamw_on_all_their_rows_at_once(
    data: TokenData, accumulate: int, clip: float
) -> None:
    """In float64, so that a loss not divided by `accumulate` or a gradient not reset shows."""
    settings = replace(
        SETTINGS, accumulate=accumulate, clip=clip, learning_rate=0.01, mixed_precision=False
    )
    trainer = make_trainer(data, settings, qkv_bias=True)
    trainer.decoder.double()
    expected = deepcopy(trainer.decoder)
    drawn = [rows_of(data.batch(1, i, 2, CONTEXT)) for i in range(3 * accumulate)]
    batches = list(torch.cat(drawn).split(2 * accumulate))
    history = adamw_by_formula(expected, batches, settings)
    for loss, norm in history:
        assert (norm > clip) == (clip == 0.1)
        actual = trainer._update(settings.learning_rate_at(trainer.step))
        trainer.step += 1
        torch.testing.assert_close(
            torch.tensor(actual), torch.tensor((loss, norm)), rtol=1e-5, atol=1e-6
        )
    for actual_p, expected_p in zip(
        trainer.decoder.parameters(), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(actual_p, expected_p, rtol=1e-6, atol=1e-7)


def test_held_out_loss_is_the_mean_over_every_token(data: TokenData) -> None:
    """Three rows in batches of two: a mean of the batches' means would weigh the last row twice."""
    trainer = make_trainer(data, replace(SETTINGS, mixed_precision=False), dropout=0.5)
    losses, right = [], []
    decoder = trainer.decoder.eval()
    for row in rows_of(data.held_out_rows(CONTEXT, 3)):
        log_probabilities = decoder(row[None, :-1])[0].log_softmax(dim=-1).detach()
        losses += [-float(log_probabilities[t, token]) for t, token in enumerate(row[1:])]
        right += [int(log_probabilities[t].argmax()) == token for t, token in enumerate(row[1:])]
    assert len(losses) == 3 * CONTEXT
    decoder.train()
    loss, accuracy, _ = trainer.evaluate()
    assert math.isclose(loss or 0.0, sum(losses) / len(losses), rel_tol=1e-5)
    assert math.isclose(accuracy or 0.0, sum(right) / len(right))


# A run


def test_the_loss_falls_from_that_of_guessing(data: TokenData, tmp_path: Path) -> None:
    settings = replace(
        SETTINGS,
        steps=40,
        batch_size=4,
        learning_rate=0.02,
        evaluate_every=20,
        checkpoint_every=1000,
    )
    recorder = Recorder()
    assert make_trainer(data, settings).train(tmp_path, recorder)
    assert abs(recorder.losses[0] - math.log(CONFIG.vocab_size)) < 0.1
    assert recorder.losses[-1] < 0.5 * recorder.losses[0]
    (_, first, *_), (_, last, *_) = recorder.evaluations
    assert last < first < math.log(CONFIG.vocab_size)


def test_evaluating_and_saving_change_nothing(data: TokenData, tmp_path: Path) -> None:
    """Drawing a sample or leaving evaluation mode on would move the training that follows."""
    losses = []
    for i, every in enumerate((1, 1000)):
        recorder = Recorder()
        settings = replace(SETTINGS, evaluate_every=every, checkpoint_every=every)
        folder = tmp_path / str(i)
        folder.mkdir()
        make_trainer(data, settings, dropout=0.3).train(folder, recorder)
        losses.append(recorder.losses)
    assert losses[0] == losses[1]


def test_dropout_differs_between_steps_seeds_and_processes(data: TokenData) -> None:
    """Dropout is seeded by step; with one seed for all steps it would prune the network."""
    trainer = make_trainer(data, dropout=0.5)
    drops = []
    for seed, step, rank in ((1, 0, 0), (1, 1, 0), (2, 0, 0), (1, 0, 1), (1, 0, 0)):
        training.seed_dropout(seed, step, rank)
        drops.append(trainer.decoder.train().dropout(torch.ones(64)))
    assert torch.equal(drops[0], drops[4])
    assert not any(torch.equal(drops[0], other) for other in drops[1:4])


def test_metrics_have_a_row_for_every_step(
    data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "peak_flops", lambda *_: 1e12)
    recorder = Recorder()
    settings = replace(SETTINGS, accumulate=2)
    trainer = make_trainer(data, settings)
    assert trainer.train(tmp_path, recorder)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    assert [int(row["tokens"]) for row in rows] == [step * 2 * 2 * CONTEXT for step in range(1, 9)]
    assert [float(row["train_loss"]) for row in rows] == recorder.losses
    rates = [settings.learning_rate_at(step) for step in range(8)]
    assert [float(row["learning_rate"]) for row in rows] == rates
    assert all(float(row["gradient_norm"]) > 0 for row in rows)
    held_out = {
        int(row["step"]): float(row["held_out_loss"]) for row in rows if row["held_out_loss"]
    }
    assert held_out == {step: loss for step, loss, *_ in recorder.evaluations}
    assert list(held_out) == [3, 6, 8]  # every so often, and at the end
    _, flops = trainer.objective.row_size
    for row, (speed, mfu) in zip(rows, recorder.speeds, strict=True):
        assert float(row["mfu"]) == mfu == pytest.approx(speed * flops / CONTEXT / 1e12)
    for _, _, prompt, sample in recorder.evaluations:
        assert prompt
        assert tokenizer.decode(data.held_out.tolist()).startswith(prompt)
        assert sample


def test_samples_fit_a_decoder_with_few_positions(data: TokenData, tmp_path: Path) -> None:
    """A prompt and a sample of the usual lengths would run past the last position."""
    settings = replace(SETTINGS, context=2, steps=2, evaluate_every=1)
    for longest in (2, 3, 18):
        recorder = Recorder()
        trainer = make_trainer(data, settings, position="learned", max_model_len=longest)
        folder = tmp_path / str(longest)
        folder.mkdir()
        assert trainer.train(folder, recorder)
        assert len(recorder.evaluations) == 2


# Interruption


RESUMED = replace(SETTINGS, accumulate=2, checkpoint_every=2)
CHANGES = {"dropout": 0.2, "attention_dropout": 0.1, "position": "learned", "norm": "layernorm"}
CHANGES |= {"qkv_bias": True, "tied_embeddings": False}


@pytest.fixture(scope="module")
def whole(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    assert make_trainer(data, RESUMED, **CHANGES).train(folder, Recorder())
    return folder


def test_a_run_that_is_stopped_at_every_step_ends_in_the_same_bits(
    data: TokenData, whole: Path, tmp_path: Path
) -> None:
    make_trainer(data, RESUMED, **CHANGES).save(tmp_path)
    seconds = 0.0
    for step in range(1, RESUMED.steps + 1):
        recorder, times = Recorder(at={step: press_ctrl_c}), list[float]()
        complete = resume(tmp_path, data).train(tmp_path, recorder, times.append)
        assert complete == (step == RESUMED.steps)
        assert len(recorder.losses) == 1  # the step in progress is finished, and no other
        assert len(times) == 1  # of steps that are rehearsed, which changes nothing
        assert times[0] > 0
        rows, progress = metrics(whole)[:step], load_checkpoint(tmp_path).progress
        assert metrics(tmp_path) == rows
        # These go into the manifest of the exported model.
        held_out = [float(row["held_out_loss"]) for row in rows if row["held_out_loss"]]
        assert progress["held_out_loss"] == (held_out[-1] if held_out else None)
        n_tokens = data.n_train, len(data.held_out)
        assert (progress["train_tokens"], progress["held_out_tokens"]) == n_tokens
        assert progress["seconds"] >= seconds
        seconds = progress["seconds"]
    recorder = Recorder()
    assert resume(tmp_path, data).train(tmp_path, recorder)
    assert not recorder.losses
    assert metrics(tmp_path) == metrics(whole)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path).items())


def test_the_forecast_leaves_out_a_slow_first_step(
    data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose kernels are loaded in it."""
    trainer, now, steps = make_trainer(data, replace(SETTINGS, steps=1)), 0.0, iter([8.0])
    gradients = trainer._make_gradients

    def make_gradients() -> float:
        nonlocal now
        now += next(steps, 0.5)
        return gradients()

    monkeypatch.setattr(trainer, "_make_gradients", make_gradients)
    monkeypatch.setattr("kvasir.model.training.trainer.time.perf_counter", lambda: now)
    monkeypatch.setattr("kvasir.model.training.trainer.peak_flops", lambda *_: 1.0)
    times = list[float]()
    trainer.train(tmp_path, Recorder(), times.append)
    assert times == [0.5]


def test_a_second_ctrl_c_stops_at_once_and_the_usual_handler_returns(
    data: TokenData, tmp_path: Path
) -> None:
    usual = signal.getsignal(signal.SIGINT)

    def press_twice() -> None:
        press_ctrl_c()
        press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        make_trainer(data).train(tmp_path, Recorder(at={5: press_twice}))
    assert signal.getsignal(signal.SIGINT) is usual
    assert load_checkpoint(tmp_path).progress["step"] == 4


# The picture


def test_the_loss_picture_is_a_png(whole: Path, tmp_path: Path) -> None:
    """Also of a run stopped before its first step or first evaluation."""
    lines = (whole / "metrics.csv").read_text().splitlines(keepends=True)
    for n_rows in (0, 1, 8):
        (tmp_path / "metrics.csv").write_text("".join(lines[: 1 + n_rows]))
        plot_losses(tmp_path)
        content = (tmp_path / "loss.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.rstrip().endswith(b"IEND\xaeB`\x82")
        (tmp_path / "loss.png").unlink()


def test_a_loss_that_is_no_number_ends_training_and_keeps_the_last_checkpoint(
    data: TokenData, tmp_path: Path
) -> None:
    """Would catch a run that trains on, and saves over what was good."""
    trainer = make_trainer(data)

    def spoil() -> None:
        with torch.no_grad():
            trainer.decoder.embedding.weight[:] = torch.nan

    with pytest.raises(
        training.DivergedError, match=r"became nan at step 6; .* learning rate below"
    ):
        trainer.train(tmp_path, Recorder({5: spoil}))
    assert load_checkpoint(tmp_path).progress["step"] == 4
    assert all(weight.isfinite().all() for weight in weights(tmp_path).values())

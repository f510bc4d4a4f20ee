"""Recurrences in chunks against the loop over tokens that defines them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvasir.model.network.recurrent import chunks, mamba
from kvasir.model.network.recurrent.chunks import run_chunks
from kvasir.model.network.recurrent.mamba import scan
from kvasir.model.training import trainer as training
from kvasir.model.training.data.corpus import Corpus
from kvasir.model.training.data.tokens import write_tokens
from tests.kit.recurrences import run_by_token
from tests.model.test_trainer import (
    CONTEXT,
    SETTINGS,
    TEXTS,
    Recorder,
    make_trainer,
    tokenizer,
)
from tests.model.variants import VARIANTS

Inputs = tuple[Tensor, ...]  # query, key, value, past, decay and perhaps rate


def random_inputs(sequence: int, rated: bool, decay: float, n_decays: int | None = None) -> Inputs:
    """Keys of length 1, as the delta rule has them.

    decay: that of the fastest token. n_decays: of a head; None is one.
    """
    torch.manual_seed(sequence)
    query, key = torch.randn(2, 2, sequence, 3, 8, dtype=torch.float64)
    key = key / key.norm(dim=-1, keepdim=True)
    value = torch.randn(2, sequence, 3, 5, dtype=torch.float64)
    past = torch.randn(2, 3, 8, 5, dtype=torch.float64)
    rates = torch.rand(2, sequence, 3, dtype=torch.float64)
    shape = rates.shape if n_decays is None else (*rates.shape, n_decays)
    decays = torch.rand(shape, dtype=torch.float64)
    inputs = query, key, value, past, -decay * decays**4
    return (*inputs, 2 * rates) if rated else inputs


def gradients(inputs: Inputs, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    weights = [torch.randn(part.shape, dtype=torch.float64) for part in outputs]
    loss = sum((part * weight).sum() for part, weight in zip(outputs, weights, strict=True))
    assert isinstance(loss, Tensor)
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("decay", [0.0, 0.5, 900.0])
@pytest.mark.parametrize("rated", [False, True])
@pytest.mark.parametrize("n_decays", [None, 8])
@pytest.mark.parametrize("sequence", [1, 8, 27])
def test_chunks_are_the_loop_over_tokens(
    sequence: int,
    n_decays: int | None,
    rated: bool,
    decay: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs, states and all gradients, of one chunk and of several, whole or not."""
    monkeypatch.setattr(chunks, "_CHUNK", 8 if n_decays is None else 8 * chunks._FEWER)
    inputs = random_inputs(sequence, rated, decay, n_decays)
    for part in inputs:
        part.requires_grad_()
    expected = run_by_token(*inputs)
    actual = run_chunks(*inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    ours_theirs = zip(gradients(inputs, actual), gradients(inputs, expected), strict=True)
    for ours, theirs in ours_theirs:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("step", [0.0, 0.5, 900.0])
@pytest.mark.parametrize("sequence", [1, 8, 27])
def test_a_scan_is_the_loop_over_tokens(
    sequence: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of a channel is a matrix of its own."""
    monkeypatch.setattr(mamba, "_CHUNK", 8)
    torch.manual_seed(sequence)
    query, key = torch.randn(2, 2, sequence, 3, dtype=torch.float64)
    value = torch.randn(2, sequence, 5, dtype=torch.float64)
    past, rates = torch.randn(2, 5, 3, dtype=torch.float64), -torch.rand(5, 3).double()
    steps = step * torch.rand(2, sequence, 5, dtype=torch.float64) ** 4
    inputs = query, key, value, past, steps, rates
    for part in inputs:
        part.requires_grad_()
    each = [part[:, :, None].expand(-1, -1, 5, -1).flatten(2) for part in (query, key)]
    values = value[..., None].expand(-1, -1, -1, 3).flatten(2)
    decays = (steps[..., None] * rates).flatten(2)
    alone = (part[..., None] for part in (*each, values))
    read, matrices = run_by_token(*alone, past.flatten(1)[..., None, None], decays)
    expected = read.view(2, sequence, 5, 3).sum(dim=-1), matrices.view(2, 5, 3)
    actual = scan(*inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    ours_theirs = zip(gradients(inputs, actual), gradients(inputs, expected), strict=True)
    for ours, theirs in ours_theirs:
        torch.testing.assert_close(ours, theirs)


def test_in_bfloat16_a_matrix_is_still_float32() -> None:
    """Under autocast products would be rounded to eight bits, and a long memory would drown."""
    inputs = tuple(part.float() for part in random_inputs(20, rated=True, decay=0.1))
    expected = run_chunks(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        for ours, theirs in zip(run_chunks(*inputs), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("qwen3.5", "bamba", "kimi", "jamba")),
        ("lfm2", torch.float32),
    ],
)
def test_every_number_of_a_hybrid_learns(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrence's own numbers move too."""
    monkeypatch.setattr(training, "compute_type", lambda _: dtype)
    data = write_tokens(Corpus(TEXTS, 0), tokenizer, tmp_path / "data", 0.3, CONTEXT)
    settings = replace(SETTINGS, steps=16, evaluate_every=16, checkpoint_every=16)
    trainer, recorder = make_trainer(data, settings, **VARIANTS[name]), Recorder()
    before = {name: p.detach().clone() for name, p in trainer.decoder.named_parameters()}
    assert trainer.train(tmp_path, recorder)
    assert recorder.losses[-1] < recorder.losses[0] - 0.2
    for parameter, trained in trainer.decoder.named_parameters():
        assert not torch.equal(before[parameter], trained), parameter

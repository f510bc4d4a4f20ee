"""The rows that the exporter measures on begin as served texts do."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import processors

from export.directory import sample_text
from export.kv_cache import sample_rows
from export.verification.verify import SampleText, VerificationError, Verifier, _Tally, check
from model.bundle import Verification
from model.checkpoint import Checkpoint
from model.tokenizer import train_tokenizer
from tests.random_models import RandomModel, make_config

TEXT = np.random.default_rng(5).integers(10, 300, size=500)


def perplexity(model: RandomModel, rows: list[list[int]], first: int) -> float:
    """Slowly: a forward for every token from `first` on."""
    losses = []
    with torch.inference_mode():
        for row in rows:
            for i in range(first, len(row)):
                logits = model.decoder(torch.tensor([row[:i]]))[0, -1]
                losses.append(-logits.log_softmax(-1)[row[i]].item())
    return math.exp(np.mean(losses))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("random_model", (7, 9)), ("random_int8_model", (7,)), ("random_int8_model", ())],
)
def test_every_row_begins_with_what_the_tokenizer_puts_before_a_text(
    name: str, prefix: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """A row from the middle has no BOS, unlike the texts that a decoder is trained and used on."""
    model: RandomModel = request.getfixturevalue(name)
    text = SampleText("text", TEXT, prefix)
    verifier = Verifier(model.config, model.decoder.state_dict(), model.graph, text)
    tests, rows = verifier._plan()
    for row in rows:
        assert row.tolist()[: len(prefix)] == list(prefix)
    for test in tests:
        for place, run in zip(test.places, test.case.rows, strict=True):
            assert (rows[place][: len(run)] == run).all()
    figures = verifier.verify()
    step = 128 - len(prefix)
    n_rows = 499 // step
    rows_of_text = [[*prefix, *TEXT[i * step : (i + 1) * step + 1]] for i in range(n_rows)]
    expected = perplexity(model, rows_of_text, first=33)
    assert figures.text == f"text, {n_rows} x 128 tokens"
    assert figures.perplexity_torch == pytest.approx(expected, rel=1e-4)
    assert figures.perplexity_onnx == pytest.approx(
        figures.perplexity_torch, rel=1e-4 if name == "random_model" else 0.1
    )
    wanted = sum(len(step.wanted) for test in tests for step in test.case.steps)
    assert figures.positions == wanted > 96 * n_rows


@pytest.mark.parametrize("n_parameters", [10**6, 135 * 10**6, 8 * 10**9])
def test_the_tokens_of_a_large_model_are_few_and_still_enough(
    n_parameters: int, random_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(random_model.config, max_model_len=4096)
    text = SampleText("text", np.resize(TEXT, 10_000))
    verifier = Verifier(config, random_model.decoder.state_dict(), random_model.graph, text)
    monkeypatch.setattr(verifier._decoder, "n_parameters", n_parameters)
    tests, rows = verifier._plan()
    n_tokens = sum(len(row) - 1 for row in rows)
    assert n_tokens * n_parameters < max(4e11, 1200 * n_parameters)
    assert max(map(len, rows)) > 256  # a long row
    decoded = [step for step in tests[-1].case.steps if step.decode]
    assert sum(len(step.wanted) for step in decoded) > 500


def test_a_prefix_is_cut_where_a_row_cannot_hold_it(random_model: RandomModel) -> None:
    text = SampleText("text", TEXT[:2], tuple(range(300)))
    figures = Verifier(
        random_model.config, random_model.decoder.state_dict(), random_model.graph, text
    ).verify()
    assert figures.perplexity_torch is not None


def test_the_sample_of_keys_and_values_begins_so_too() -> None:
    rows = sample_rows(make_config(max_model_len=32), TEXT, (7, 9))
    assert rows is not None
    assert rows.shape == (8, 32)
    assert (rows[:, :2] == (7, 9)).all()
    assert rows[:, 2:].flatten().tolist() == TEXT[-8 * 30 :].tolist()
    assert sample_rows(make_config(max_model_len=32), TEXT[:239], (7, 9)) is None


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>", "<s> <s> $A"])
def test_the_prefix_is_found_in_the_tokenizer(template: str, tmp_path: Path) -> None:
    content = "<s> the same text, again and again: " * 20
    tokenizer = train_tokenizer([content], 280)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    plain = tokenizer.encode(content).ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    (tmp_path / "text.txt").write_text(content)
    checkpoint = Checkpoint(tmp_path, make_config(), {}, tokenizer, {})
    sample = sample_text(checkpoint, tmp_path / "text.txt", "int8")
    assert sample is not None
    assert sample.token_ids.tolist() == plain
    assert sample.prefix == (special[0][1],) * template.split("$A", maxsplit=1)[0].count("<s>")


@pytest.mark.parametrize(("loss", "error", "is_refused"), [
    (0.009, 0.0, False),
    (0.011, None, True),
    (0.03, 0.011, False),  # so few tokens leave open whether it is more than 1 %
    (0.03, 0.009, True),
    (0.07, 1.0, True),  # a broken graph, whose losses vary wildly
    (0.0, math.nan, True),
])  # fmt: skip
def test_a_loss_is_refused_beyond_doubt(loss: float, error: float | None, is_refused: bool) -> None:
    figures = Verification(
        max_logit_error=0.3,
        greedy_agreement=0.9,
        perplexity_torch=5.0,
        perplexity_onnx=5.0 * (1.0 + loss),
    )
    figures = figures.model_copy(update={"perplexity_error": error})
    with pytest.raises(VerificationError) if is_refused else contextlib.nullcontext():
        check(figures, "int8")


def test_the_error_of_a_perplexity_is_that_of_its_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(40, 50, generator=generator)
    actual = expected + 0.1 * torch.randn(40, 50, generator=generator)
    labels = torch.arange(40)
    tally = _Tally()
    tally.add(expected[:15], actual[:15], labels[:15])
    tally.add(expected[15:], actual[15:], labels[15:])
    before, after = (
        torch.tensor([-logits[i].log_softmax(0)[i] for i in range(40)])
        for logits in (expected, actual)
    )
    wanted = ((after - before).std(correction=0) / 40**0.5).item()
    assert tally.figures()["perplexity_error"] == pytest.approx(wanted, rel=1e-4)

"""Encoder-decoders learn sources and targets: against slow loops, formulas and transformers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.network.transformer import Transformer
from kvasir.model.presets import preset
from kvasir.model.reference import generate
from kvasir.model.tokenizer import train_tokenizer
from kvasir.model.training.data.corpus import CorpusError
from kvasir.model.training.data.masking import IGNORED
from kvasir.model.training.data.translations import (
    TranslationBatch,
    TranslationData,
    Translations,
    read_translations,
    write_translations,
)
from kvasir.model.training.settings import TrainSettings
from kvasir.model.training.trainer import Trainer
from tests.kit.huggingface_models import make_encoder_decoder, save
from tests.kit.training_runs import SETTINGS, trained, undrawn

without_pictures = pytest.fixture(scope="module", autouse=True)(undrawn)
LETTERS = "abcdefgh"
DRAWN = random.Random(0)
SOURCES = {"".join(DRAWN.choices(LETTERS, k=DRAWN.randint(1, 12))) for _ in range(150)}
PAIRS = [(source, source[::-1]) for source in sorted(SOURCES)]
tokenizer = train_tokenizer([], 257, "encoder-decoder")  # a token is a byte; 0 ends texts
SMALL: dict[str, Any] = {"n_layer": 1, "d_model": 48, "d_ff": 64, "n_head": 2, "n_kv_head": 1}
CONFIG = preset("tiny-seq2seq", **SMALL, head_dim=32, vocab_size=257, eos_token_ids=(0,))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_data(
    folder: Path,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    prefix: tuple[int, ...] = (0,),
    context: int = 16,
    held_out: float = 0.1,
) -> TranslationData:
    config = replace(CONFIG, target_prefix=prefix)
    return write_translations(Translations(pairs), tokenizer, config, folder, held_out, context, 4)


def texts_of(batch: TranslationBatch) -> list[tuple[str, str]]:
    """Read a batch's texts, checking how a target's inputs lead to it."""
    texts = []
    for source, length, inputs, targets in zip(*batch, strict=True):
        learned = targets[targets != IGNORED]
        assert (source[length - 1], learned[-1]) == (0, 0)
        assert (inputs[targets != IGNORED][1:] == learned[:-1]).all()
        texts.append((tokenizer.decode(source[:length]), tokenizer.decode(learned)))
    return texts


# Texts


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("a.jsonl", "{", "not JSON"),
        ("a.jsonl", "[]", "not a translation"),
        ("a.jsonl", '{"source": "a"}', "a translation lacks the field 'target'"),
        ("a.jsonl", '{"source": " ", "target": "b"}', "source must be text, not ' '"),
        ("a.jsonl", '{"source": "a", "target": ["b"]}', "target must be a valid string"),
        ("a.jsonl", '{"source": "a", "target": "b", "id": 1}', "unknown field 'id'"),
        ("a.jsonl", r'{"source": "a\u0000", "target": "b"}', "source must be text, not "),
        (
            "a.jsonl",
            r'{"source": "a", "target": "\ud800"}',
            "unable to parse raw data",
        ),
        ("a.tsv", "a", "there are 1 columns"),
        ("a.tsv", "a\tb\tc", "there are 3 columns"),
        ("a.tsv", "a\t", "target must be text, not ''"),
        ("a.tsv", "a\t\0", "target must be text, not "),
        ("a.tsv", "a\t" + "b" * 2**20 + "c", "target: .* at most 1048576 characters"),
    ],
)
def test_a_bad_line_is_named(name: str, line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    good = "a\tb" if file.suffix == ".tsv" else '{"source": "a", "target": "b"}'
    file.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(CorpusError, match=message) as raised:
        read_translations([file], 0)
    assert str(raised.value).startswith(f"{file}:3: ")
    assert len(str(raised.value)) < 1000


def test_lines_of_both_kinds_are_read_once_and_the_targets_of_a_source_are_together(
    tmp_path: Path,
) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.tsv"
    lines.write_text('{"target": "x", "source": "a"}\n{"source": "b", "target": "y"}\n')
    table.write_text("c\tz\r\na\t second\na\tx")
    pairs = read_translations([table, lines], 1).pairs
    assert sorted(pairs) == [("a", " second"), ("a", "x"), ("b", "y"), ("c", "z")]
    places = [place for place, (source, _) in enumerate(pairs) if source == "a"]
    assert places[1] == places[0] + 1
    (tmp_path / "a.txt").write_text("a\tb")
    with pytest.raises(CorpusError, match=r"are read from \*.jsonl or \*.tsv"):
        read_translations([table, tmp_path / "a.txt"], 1)


# Batches


def test_batches_hold_every_translation_once_in_similar_lengths(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    n_batches = data.n_train_pairs // 4
    batches = [data.batch(1, step, 4, 16) for step in range(n_batches)]
    texts = [pair for batch in batches for pair in texts_of(batch)]
    assert len(set(texts)) == len(texts)
    assert set(texts) <= set(PAIRS[: data.n_train_pairs])
    padded = sum(batch.sources.size - batch.lengths.sum() for batch in batches)
    assert padded < 0.1 * sum(batch.lengths.sum() for batch in batches)
    assert any(batch.sources.shape != batches[0].sources.shape for batch in batches)
    again = data.batch(1, n_batches, 4, 16)
    assert texts_of(again) not in [texts_of(batch) for batch in batches]
    for rows in (range(1), range(1, 4)):
        part = data.batch(1, 3, 4, 16, rows)
        assert texts_of(part) == texts_of(batches[3])[rows.start : rows.stop]


def test_what_is_held_out_is_written_and_never_drawn(tmp_path: Path) -> None:
    data = write_data(tmp_path, context=11)
    kept = [pair for pair in PAIRS if len(pair[0]) < 11]
    assert len(data.ends) == len(kept)
    held_out = kept[data.n_train_pairs :]
    assert texts_of(data.held_out(0, len(held_out))) == held_out
    lines = (tmp_path / "held_out.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line).values()) for line in lines] == held_out
    drawn = {pair for step in range(60) for pair in texts_of(data.batch(0, step, 4, 11))}
    assert drawn == set(kept[: data.n_train_pairs])
    n = sum(len(source) + 1 for source, _ in held_out)
    assert (data.n_train + data.n_held_out, data.n_held_out) == (len(data.tokens), 2 * n)


def test_no_source_is_both_learned_and_held_out(tmp_path: Path) -> None:
    pairs = [(source, target) for source in "abcdef" for target in "xyz"]
    data = write_data(tmp_path, pairs, held_out=0.3)
    assert data.n_train_pairs == 12


# The loss


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_loss_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """BART's target begins with a second token that no source decides."""
    theirs = make_encoder_decoder(name)
    checkpoint = load_checkpoint(save(tmp_path / "theirs", theirs))
    prefix = checkpoint.config.target_prefix
    data = write_data(tmp_path, prefix=prefix)
    trainer = Trainer(checkpoint.decoder, checkpoint.tokenizer, data, SETTINGS)
    batch = data.batch(0, 0, 4, 16)
    assert (batch.targets[:, : len(prefix) - 1] == IGNORED).all()
    sources, lengths, inputs, targets = map(torch.from_numpy, batch)
    within = (torch.arange(sources.shape[1]) < lengths[:, None]).long()
    with torch.inference_mode():
        rows = {"decoder_input_ids": inputs, "labels": targets}
        expected = theirs(sources, within, **rows).loss.item()
        actual = trainer.objective.loss(batch).item() / batch.n_targets
    assert actual == pytest.approx(expected, rel=1e-5)


def make_trainer(data: TranslationData, **changes: Any) -> Trainer:
    torch.manual_seed(3)
    return Trainer(Transformer(CONFIG), tokenizer, data, replace(SETTINGS, **changes))


@torch.inference_mode()
def test_smoothed_targets_are_a_mixture_with_all_tokens(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    trainer = make_trainer(data, label_smoothing=0.2)
    batch = data.batch(0, 0, 4, 16)
    sources, lengths, inputs, targets = map(torch.from_numpy, batch)
    decoder = trainer.decoder
    logits = decoder(inputs, source=decoder.read(sources, lengths)).log_softmax(dim=-1)
    expected = 0.0
    for row, wanted in zip(logits, targets, strict=True):
        for given, target in zip(row, wanted, strict=True):
            if target != IGNORED:
                expected -= float(0.8 * given[target] + 0.2 * given.mean())
    assert trainer.objective.loss(batch).item() == pytest.approx(expected, rel=1e-5)
    smooth, plain = trainer.evaluate(), make_trainer(data).evaluate()
    assert smooth == plain


def test_exact_match_is_that_of_greedy_decoding(tmp_path: Path) -> None:
    """No model can tell which letters are doubled, so it has about half right."""
    texts = ((letter * n, letter) for letter in LETTERS for n in range(1, 13))
    pairs = [(source, target * DRAWN.randint(1, 2)) for source, target in texts]
    data = write_data(tmp_path, pairs)
    trainer = make_trainer(data, batch_size=16, evaluate_rows=40)
    for trainer.step in range(60):
        trainer._update(3e-3)
    data = trainer.objective.data = replace(data, n_held_out_pairs=data.n_train_pairs)
    loss, accuracy, exact_match = trainer.evaluate()
    n_exact, log_probabilities = 0, list[float]()
    decoder = trainer.decoder.eval()
    for place in range(40):
        sources, lengths, inputs, targets = map(torch.from_numpy, data.held_out(place, place + 1))
        source = decoder.read(sources, lengths)
        given = decoder(inputs, source=source).detach().log_softmax(dim=-1)[0]
        log_probabilities += given[range(len(given)), targets[0]].tolist()
        output = generate(decoder, [0], max_tokens=16, ending_ids=[0], source=source)
        n_exact += output == targets[0].tolist()
        shown = tokenizer.decode(sources[0].tolist())
        assert trainer.objective.sample(place) == (f"{shown}\n", tokenizer.decode(output))
    assert exact_match == n_exact / 40
    assert 0 < n_exact < 40
    assert loss is not None
    assert accuracy is not None
    assert accuracy > exact_match
    assert loss == pytest.approx(-np.mean(log_probabilities), rel=1e-5)


def test_the_paper_s_schedule_has_a_name() -> None:
    d_model, warmup = 512, 4000
    peak = (d_model * warmup) ** -0.5
    settings = TrainSettings(
        steps=10**5, context=8, learning_rate=peak, warmup=warmup, schedule="inverse-sqrt"
    )
    for step in (1, 100, 3999, 4000, 4001, 90000):  # counted from 1, as in equation 3
        expected = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert math.isclose(settings.learning_rate_at(step - 1), expected)


# Runs

SHAPE = ("n_layer=1", "d_model=48", "d_ff=64", "n_head=2", "n_kv_head=1", "head_dim=32")
QUICK = [*(f"--set={change}" for change in (*SHAPE, "vocab_size=257")), "--preset=tiny-seq2seq"]
QUICK += ["--context=16", "--warmup=2", "--learning-rate=0.005", "--held-out=0.1"]


@pytest.mark.usefixtures("workplace")
def test_a_run_keeps_its_held_out_pairs_and_is_tuned() -> None:
    Path("pairs.tsv").write_text("\n".join("\t".join(pair) for pair in PAIRS))
    output = trained("pairs.tsv", *QUICK, "--batch-size=4", "--steps=1", "--out=run")
    assert "step 0  held-out loss" in output
    assert "exact match" in output
    checkpoint = load_checkpoint(Path("run"))
    assert checkpoint.progress["settings"]["label_smoothing"] == 0.1
    lines = (checkpoint.path / "held_out.jsonl").read_text().splitlines()
    assert len(lines) == len(PAIRS) // 10
    assert checkpoint.tokenizer.encode("abc").ids[-1] == 0
    again = ["pairs.tsv", "--init=run", "--context=16", "--batch-size=4", "--steps=1"]
    trained(*again, "--out=tuned")

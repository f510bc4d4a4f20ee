"""Encoders learn masked tokens and pairs: against slow loops, formulas written out, and BERT."""

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
from torch import Tensor
from torch.nn import functional

from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.config import Pooling
from kvasir.model.configuration.parts import Projection
from kvasir.model.network.transformer import Transformer
from kvasir.model.tokenizer import train_tokenizer
from kvasir.model.training.data.corpus import Corpus, CorpusError
from kvasir.model.training.data.masking import IGNORED, Masking
from kvasir.model.training.data.pairs import (
    PairBatch,
    PairData,
    Pairs,
    rank_documents,
    read_pairs,
    write_pairs,
)
from kvasir.model.training.data.tokens import Batch, TokenData, write_tokens
from kvasir.model.training.distributed import Processes, one_process
from kvasir.model.training.objectives import Ranking
from kvasir.model.training.run import open_run
from kvasir.model.training.trainer import Trainer
from tests.kit.encoders import BERT, LAST_TOKEN
from tests.kit.huggingface_models import make_encoder, save
from tests.kit.random_models import make_config
from tests.kit.training_runs import SETTINGS, metrics, trained, undrawn

without_pictures = pytest.fixture(scope="module", autouse=True)(undrawn)
CPU = torch.device("cpu")
NAMES = [f"{a}{b}" for a in ("red", "blue", "old", "wet") for b in ("fish", "bird", "ship", "tree")]
PAIRS = [(f"where is the {name}?", f"{name} swims over here") for name in NAMES]
TEXTS = [text for pair in PAIRS for text in pair]
tokenizer = train_tokenizer(TEXTS, 290, "encoder")
CLS, SEP, MASK = (tokenizer.get_vocab()[name] for name in ("[CLS]", "[SEP]", "[MASK]"))


def vectors_of(trainer: Trainer, batch: PairBatch) -> Tensor:
    assert isinstance(trainer.objective, Ranking)
    return trainer.objective.vectors(batch)


def make_trainer(data: TokenData | PairData, **changes: Any) -> Trainer:
    torch.manual_seed(3)
    config = make_config(vocab_size=290, **(BERT | changes))
    return Trainer(Transformer(config), tokenizer, data, SETTINGS)


# Masked tokens


def test_masks_have_their_rates_and_spare_special_tokens() -> None:
    generator = np.random.default_rng(0)
    masking = Masking.of(tokenizer)
    rows = generator.choice([*masking.ordinary, CLS, SEP, MASK], (400, 128))
    inputs, targets = masking.apply(rows, generator)
    framed = rows.copy()
    framed[:, 0], framed[:, -1] = CLS, SEP
    predicted = targets != IGNORED
    assert (targets[predicted] == framed[predicted]).all()
    assert (inputs[~predicted] == framed[~predicted]).all()
    assert not np.isin(targets[predicted], [CLS, SEP, MASK]).any()
    ordinary = ~np.isin(framed, [CLS, SEP, MASK])
    for row, own in zip(predicted, ordinary, strict=True):
        assert row.sum() == round(0.15 * own.sum())  # so no row is without
    masked = inputs[predicted] == MASK
    kept = inputs[predicted] == framed[predicted]
    assert masked.mean() == pytest.approx(0.8, abs=0.02)
    assert kept.mean() == pytest.approx(0.1 + 0.1 / len(masking.ordinary), abs=0.02)
    assert not np.isin(inputs[predicted][~masked & ~kept], [CLS, SEP]).any()
    short, targets = masking.apply(np.full((1, 3), CLS), generator)
    assert short.tolist() == [[CLS, CLS, SEP]]
    assert (targets == IGNORED).all()


def masked_data(folder: Path) -> TokenData:
    data = write_tokens(Corpus(TEXTS, 0), tokenizer, folder / "data", 0.3, 16, SEP)
    return replace(data, masking=Masking.of(tokenizer))


def test_a_row_is_masked_by_seed_and_step_whoever_draws_it(tmp_path: Path) -> None:
    data = masked_data(tmp_path)
    whole = data.batch(seed=1, step=5, batch_size=6, context=16)
    for rows in (range(2), range(2, 6)):
        part = data.batch(1, 5, 6, 16, rows)
        assert np.array_equal(part.inputs, whole.inputs[rows.start : rows.stop])
        assert np.array_equal(part.targets, whole.targets[rows.start : rows.stop])
    assert not np.array_equal(data.batch(1, 6, 6, 16).targets, whole.targets)
    first, again = data.held_out_rows(16, 3), data.held_out_rows(16, 3)
    assert np.array_equal(first.inputs, again.inputs)


def test_the_loss_is_that_of_bert(tmp_path: Path) -> None:
    """Without BERT's layer before its output matrix, which no vector of a text goes through."""
    theirs = make_encoder("bert", "ForMaskedLM")
    theirs.cls.predictions.transform = torch.nn.Identity()
    torch.nn.init.zeros_(theirs.cls.predictions.bias)
    checkpoint = load_checkpoint(save(tmp_path / "bert", theirs))
    generator = np.random.default_rng(0)
    inputs, targets = generator.integers(320, size=(2, 3, 20))
    targets[generator.random(targets.shape) < 0.8] = IGNORED
    with torch.inference_mode():
        rows = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(targets)}
        expected = theirs(**rows).loss.item()
    data = masked_data(tmp_path)
    trainer = Trainer(checkpoint.decoder, checkpoint.tokenizer, data, SETTINGS)
    batch = Batch(inputs, targets)
    assert trainer.objective.loss(batch).item() / batch.n_targets == pytest.approx(
        expected, rel=1e-5
    )


def test_layers_after_the_pooling_wait_for_pairs(tmp_path: Path) -> None:
    """DistributedDataParallel ends a run in which a parameter gets no gradient."""
    projected = Pooling(kind="mean", projections=(Projection(d_out=8),))
    trainer = make_trainer(masked_data(tmp_path), pooling=projected)
    trainer._update(1e-3)
    trainer.decoder.zero_grad(set_to_none=True)
    trainer.objective.loss(trainer.data.batch(0, 0, 4, 16)).backward()
    assert trainer.decoder.pooler is not None
    pooler = {id(parameter) for parameter in trainer.decoder.pooler.parameters()}
    for name, parameter in trainer.decoder.named_parameters():
        assert (parameter.grad is None) == (id(parameter) in pooler), name
        assert parameter.requires_grad == (id(parameter) not in pooler), name


# Pairs


def pair_data(folder: Path, pairs: Sequence[tuple[str, ...]], context: int = 16) -> PairData:
    folder.mkdir(exist_ok=True)
    return write_pairs(Pairs(pairs), tokenizer, folder, 0.25, context)[0]


def infonce(vectors: Tensor, texts: np.ndarray[Any, Any]) -> float:
    """Sum -log(e^(20 cos of the own) / Σ e^(20 cos)) over queries, a candidate at a time."""
    total, (n, columns) = 0.0, texts.shape
    for i in range(n):
        others = [
            functional.cosine_similarity(vectors[i, 0], vectors[j, column], 0)
            for j in range(n)
            for column in range(1, columns)
            if texts[j, column] != texts[i, 1]
        ]
        own = 20 * functional.cosine_similarity(vectors[i, 0], vectors[i, 1], 0).item()
        total += math.log(sum(math.exp(20 * other) for other in others) + math.exp(own)) - own
    return total


@pytest.mark.parametrize("columns", [2, 3])
def test_the_loss_is_that_of_the_formula(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(6, columns, 5, generator=generator)
    texts = np.arange(6 * columns).reshape(6, columns)
    texts[4, 1] = texts[0, 1]  # two queries with one document
    texts[2, -1] = texts[5, 1]
    vectors[4, 1], vectors[2, -1] = vectors[0, 1], vectors[5, 1]
    logits, targets = rank_documents(vectors, texts)
    loss = functional.cross_entropy(logits, targets, reduction="sum")
    assert loss.item() == pytest.approx(infonce(vectors, texts), rel=1e-5)


@pytest.mark.parametrize("changes", [{}, LAST_TOKEN | {"causal": True}])
def test_a_batch_has_different_pairs_and_the_vectors_that_are_served(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Padding that is attended to, or a text in another's row, would change a vector."""
    pairs = [(a, b, PAIRS[i - 3][1] + " and" * (i % 3)) for i, (a, b) in enumerate(PAIRS)]
    data = pair_data(tmp_path, pairs, context=8)
    assert len(data.pairs[-data.n_held_out_pairs :]) == 4
    trainer = make_trainer(data, **changes)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    batch = data.batch(1, 2, 8, 8)
    assert len(np.unique(batch.texts[:, 0])) == 8
    assert not np.isin(batch.texts[:, 0], data.pairs[-data.n_held_out_pairs :][:, 0]).any()
    trainer.decoder.eval()
    vectors = vectors_of(trainer, batch).flatten(0, 1)
    serving = load_tokenizer_cut_at(8)
    for vector, text in zip(vectors, batch.texts.ravel(), strict=True):
        ids = serving.encode(texts[text]).ids
        expected = trainer.decoder.encode(torch.tensor([ids]), torch.tensor([len(ids)]))[0]
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-5)
    part = data.batch(1, 2, 8, 8, range(3, 5))
    assert np.array_equal(part.texts, batch.texts)
    assert np.array_equal(part.lengths, batch.lengths[9:15])


def load_tokenizer_cut_at(length: int) -> Any:
    made = tokenizer.from_str(tokenizer.to_str())
    made.enable_truncation(length)
    return made


class Split(Processes):
    """One of two processes; what the other one would send is already known."""

    others: Tensor

    def gather_rows(self, rows: Tensor) -> Tensor:
        both = [self.others[:2], self.others[2:]]
        both[self.rank] = rows
        return torch.cat(both)


def test_processes_that_share_a_batch_have_the_loss_and_gradients_of_one(tmp_path: Path) -> None:
    """Each ranks the documents of all; its own alone would be an easier task."""
    data = pair_data(tmp_path, PAIRS)
    whole = make_trainer(data)
    batch = data.batch(0, 0, 4, 16)
    expected = whole.objective.loss(batch)
    expected.backward()
    vectors = vectors_of(whole, batch).detach()
    total, gradients = 0.0, []
    for rank in range(2):
        trainer = make_trainer(data)
        trainer.objective.processes = Split(rank, 2, CPU)
        object.__setattr__(trainer.objective.processes, "others", vectors)
        loss = trainer.objective.loss(data.batch(0, 0, 4, 16, range(2 * rank, 2 * rank + 2)))
        loss.backward()
        total += loss.item()
        gradients.append([parameter.grad for parameter in trainer.decoder.parameters()])
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for parameter, *parts in zip(whole.decoder.parameters(), *gradients, strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(sum(parts), parameter.grad, rtol=1e-3, atol=1e-5)


def test_held_out_accuracy_is_over_all_held_out_documents(tmp_path: Path) -> None:
    data = pair_data(tmp_path, PAIRS)
    trainer = make_trainer(data)
    trainer.objective.settings = replace(SETTINGS, batch_size=3)
    loss, accuracy, _ = trainer.evaluate()
    pairs = data.pairs[-data.n_held_out_pairs :][:4]
    with torch.inference_mode():
        vectors = vectors_of(trainer, data.read(pairs, range(4)))
    found = [int((vectors[i, 0] @ vectors[:, 1].T).argmax()) == i for i in range(4)]
    assert accuracy == sum(found) / 4
    parts = (infonce(vectors[part], pairs[part]) for part in (slice(3), slice(3, 4)))
    assert loss == pytest.approx(sum(parts) / 4, rel=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a pair"),
        ('{"query": "a"}', "a pair lacks the field 'document'"),
        ('{"query": "a", "anchor": "b", "document": "c"}', "unknown field 'anchor' in a pair"),
        ('{"query": "a", "document": 3}', "document must be a valid string, not 3"),
        ('{"anchor": " ", "positive": "b"}', "anchor must be text, not ' '"),
        ('{"query": "a", "document": "b", "score": 1}', "unknown field 'score' in a pair"),
    ],
)
def test_a_bad_pair_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(f'{{"anchor": "a", "positive": "b"}}\n\n{line}\n')
    with pytest.raises(CorpusError, match=message) as raised:
        read_pairs([file], 0)
    assert str(raised.value).startswith(f"{file}:3: ")


# Runs

SHAPE = ("n_layer=1", "d_model=48", "d_ff=64", "n_head=2", "n_kv_head=2", "head_dim=32")
QUICK = [*(f"--set={change}" for change in (*SHAPE, "vocab_size=300")), "--preset=tiny-encoder"]
QUICK += ["--context=16", "--warmup=5", "--learning-rate=0.01"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_jsonl(pairs: list[tuple[str, str]]) -> None:
    lines = [json.dumps({"query": query, "document": document}) for query, document in pairs]
    Path("pairs.jsonl").write_text("\n".join(lines))


def test_a_tiny_encoder_learns_pairs() -> None:
    """Held-out pairs are of words that others have; chance is 1 of 25."""
    words = random.Random(0).sample([a + b for a in "bdfgklmnprst" for b in "aeiou"], 40)
    pairs = [(f"find {a} {b}", f"{b} and {a}") for a in words[:20] for b in words[20:]][:250]
    write_jsonl(pairs)
    options = [*QUICK, "--batch-size=32", "--steps=60", "--held-out=0.1"]
    output = trained("pairs.jsonl", *options, "--out=run")
    assert "step 0  held-out loss" in output
    assert float(metrics("run")[-1]["held_out_accuracy"]) > 0.6


def test_an_encoder_of_text_gets_a_pooling_and_then_learns_pairs() -> None:
    Path("text.txt").write_text("\n".join(TEXTS))
    options = [option for option in QUICK if not option.startswith("--preset")]
    options += ["--batch-size=4", "--steps=2"]
    output = trained("text.txt", *options, "--set=causal=false", "--out=base")
    assert "the mean of its tokens'" in output
    data = open_run(Path("base"), one_process()).data
    assert isinstance(data, TokenData)
    assert data.masking is not None
    assert load_checkpoint(Path("base")).config.pooling == Pooling(kind="mean", normalize=True)
    write_jsonl(PAIRS)
    tuning = ["pairs.jsonl", "--init=base", "--context=16", "--batch-size=4", "--steps=2"]
    trained(*tuning, '--set=pooling={"kind": "cls"}', "--out=tuned")
    tuned = load_checkpoint(Path("tuned"))
    assert tuned.config.pooling == Pooling(kind="cls")
    assert tuned.tokenizer.encode("fish").ids[0] == CLS

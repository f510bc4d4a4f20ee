"""Folders with a SentencePiece model and no tokenizer.json, against transformers' tokenizers.

Spaces at the ends are left out: SentencePiece drops them, and some of transformers' do not. Marian,
whose tokenizer needs the sentencepiece package, is compared with every way to cut a text.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.huggingface.sentencepiece import read_marian, read_sentencepiece
from tests.kit.huggingface_models import make_encoder_decoder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import MBart50Tokenizer, MBartTokenizer, PegasusTokenizer, T5Tokenizer
    from transformers.convert_slow_tokenizer import (
        MBart50Converter,
        MBartConverter,
        PegasusConverter,
        T5Converter,
        import_protobuf,
    )

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
SCORES = {"▁": -2.0, "a": -3.5, "b": -3.25, "c": -4.0, "ab": -5.0, "▁ab": -5.125, "bca": -6.5}
SCORES |= {"▁c": -4.75, "cab": -7.0}
_TOKENS = ["</s>", ">>fra<<", "ä", "bca", "<unk>", *SCORES, "▁äb", "▁ba", "<pad>"]
IDS = {token: i for i, token in enumerate(dict.fromkeys(_TOKENS))}  # of Marian
# Of each family: its first pieces, transformers' tokenizer and converter, tokenizer_config.json.
_FAMILIES: dict[str, tuple[tuple[str, ...], Any, Any, dict[str, Any]]] = {
    "t5": (("<pad>", "</s>", "<unk>"), T5Tokenizer, T5Converter, {"extra_ids": 7}),
    "pegasus": (("<pad>", "</s>", "<unk>"), PegasusTokenizer, PegasusConverter, {}),
    "mbart": (("<unk>", "<s>", "</s>"), MBartTokenizer, MBartConverter, {"src_lang": "fr_XX"}),
    "mbart 50": (
        ("<unk>", "<s>", "</s>"),
        MBart50Tokenizer,
        MBart50Converter,
        {"src_lang": "sl_SI", "tokenizer_class": "MBart50Tokenizer"},
    ),
}


def write_model(path: Path, first: tuple[str, ...], **changes: Any) -> list[tuple[str, float]]:
    """Write a model; return its pieces and their scores."""
    model = import_protobuf().ModelProto()
    for piece in first:
        model.pieces.add(piece=piece, score=0.0, type=_UNKNOWN if piece == "<unk>" else _CONTROL)
    for piece, score in SCORES.items():
        kind = changes.get("type", _NORMAL)
        model.pieces.add(piece=piece, score=changes.get("score", score), type=kind)
    model.trainer_spec.model_type = changes.get("model_type", 1)
    model.normalizer_spec.precompiled_charsmap = changes.get("charsmap", b"")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(changes.get("content", model.SerializeToString()))
    return [(piece.piece, piece.score) for piece in model.pieces]


@pytest.mark.parametrize("name", _FAMILIES)
def test_texts_are_cut_as_in_transformers(name: str, tmp_path: Path) -> None:
    first, kind, converter, values = _FAMILIES[name]
    pieces = write_model(tmp_path / "spiece.model", first)
    made = read_sentencepiece(tmp_path / "spiece.model", name.removesuffix(" 50"), values)
    ours, theirs = Tokenizer.from_str(made), kind(**converter.convert_from_spm(pieces, **values))
    assert ours.get_vocab() == theirs.get_vocab()
    drawn = random.Random(0)
    special = ["</s>", "<extra_id_3>", "<mask_1>", "<unk_99>", "fr_XX"]
    for _ in range(100):
        words = ["".join(drawn.choices("abcx", k=drawn.randint(1, 6))) for _ in range(4)]
        text = " ".join(words) + drawn.choice(special) + " ".join(words[::-1])
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).ids == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("model_type", "changes", "values", "message"),
    [
        ("t5", {"content": b"\xff" * 9}, {}, "no SentencePiece model"),
        ("t5", {"model_type": 2}, {}, "not of SentencePiece's kind Unigram"),
        ("t5", {"type": _BYTE}, {}, "in bytes"),
        ("t5", {"score": math.nan}, {}, "without text or score"),
        ("t5", {"content": b"\n\x03\n\x01\xff"}, {}, "without text or score"),
        ("t5", {"charsmap": b"xyz"}, {"extra_ids": 7}, "normalizer: "),
        ("mbart", {"content": b""}, {}, "not of a 'mbart' model"),
        ("t5", {}, {"extra_ids": "7"}, "extra_ids is '7'"),
        ("t5", {}, {"extra_ids": 99}, "extra_ids is 99, not 0 to"),
        ("mbart", {}, {"src_lang": "sl_SI"}, "src_lang 'sl_SI'"),
        ("pegasus", {}, {"offset": 0}, "offset is 0"),
        ("m2m_100", {}, {}, "'m2m_100' model"),
    ],
)
def test_refusals(
    model_type: str, changes: dict[str, Any], values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "spiece.model", _FAMILIES["t5"][0], **changes)
    with pytest.raises(UnsupportedError, match=message):
        read_sentencepiece(tmp_path / "spiece.model", model_type, values)


def test_a_file_of_another_family_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "spiece.model", ("<unk>", "<pad>"))
    with pytest.raises(UnsupportedError, match="is not of a 'pegasus' model"):
        read_sentencepiece(tmp_path / "spiece.model", "pegasus", {})


@pytest.mark.parametrize(("name", "file"), [("t5", 0), ("pegasus", 0), ("mbart", 1)])
def test_a_folder_without_tokenizer_json_is_imported(name: str, file: int, tmp_path: Path) -> None:
    make_encoder_decoder(name).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has no tokenizer.json"):
        load_checkpoint(tmp_path)
    first, *_, values = _FAMILIES[name]
    write_model(tmp_path / ("spiece.model", "sentencepiece.bpe.model")[file], first)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = load_checkpoint(tmp_path).tokenizer
    ids = tokenizer.encode("ab").ids
    assert tokenizer.decode(ids) == "ab"
    assert len(ids) == (3 if name == "mbart" else 2)


# Marian


def write_marian(folder: Path, ids: object = IDS, **changes: Any) -> Path:
    write_model(folder / "source.spm", ("<unk>",), **changes)
    (folder / "vocab.json").write_text(json.dumps(ids))
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


def test_texts_of_marian_are_cut_into_the_likeliest_pieces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(read_marian(write_marian(tmp_path)))
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
    tokenizer = Tokenizer.from_str(read_marian(write_marian(tmp_path)))
    assert tokenizer.decode([IDS["▁äb"], IDS["▁ba"], IDS["</s>"]]) == "äb ba"
    for text, tokens in (
        ("ba äb", ("▁", "b", "a", "▁", "ä", "b", "</s>")),
        (">>fra<< abx", (">>fra<<", "▁ab", "<unk>", "</s>")),
    ):
        assert tokenizer.encode(text).ids == [IDS[token] for token in tokens]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content": b"\xff" * 9}, "no SentencePiece model"),
        ({"ids": IDS | {"more": 99}}, "must number its tokens"),
        ({"ids": {"a": 0}}, "must number its tokens"),
        ({"ids": ["a"]}, "must hold a JSON object"),
    ],
)
def test_refusals_of_marian(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_marian(write_marian(tmp_path, **changes))


def test_a_folder_of_marian_is_imported(tmp_path: Path) -> None:
    make_encoder_decoder("marian").save_pretrained(tmp_path)
    write_marian(tmp_path)
    assert load_checkpoint(tmp_path).tokenizer.encode("ab").ids == [IDS["▁ab"], 0]

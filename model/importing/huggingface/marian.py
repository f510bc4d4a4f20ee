"""The tokenizer of a Marian folder, whose source.spm and vocab.json become a tokenizer.json.

source.spm is a SentencePiece model (Kudo & Richardson 2018), a message of protobuf whose schema is
sentencepiece_model.proto; only the fields that are read are named here. Its pieces get the ids of
vocab.json, where those of the target language are too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from model.files import read_object
from model.importing.errors import UnsupportedError

SOURCE_FILE = "source.spm"
VOCABULARY_FILE = "vocab.json"
_END, _UNKNOWN, _PADDING = "</s>", "<unk>", "<pad>"
_NORMAL, _UNIGRAM = 1, 1  # values of a piece's type and of the trainer's model_type
# Before pieces of several characters that only targets have, so that no source is cut into them;
# decoding drops it. One character that only they have is better than none, as in MarianTokenizer.
_TARGET_MARK = "\ue000"
_PENALTY = 5.0  # of such a character, below all others; an unknown one has 10
# Name: number and type, as protobuf calls it, of each field.
_SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "Piece": {"piece": (1, "STRING"), "score": (2, "FLOAT"), "type": (3, "INT32")},
    "Trainer": {"model_type": (3, "INT32")},
    "Normalizer": {"precompiled_charsmap": (2, "BYTES")},
    "Model": {
        "pieces": (1, "Piece"),
        "trainer_spec": (2, "Trainer"),
        "normalizer_spec": (3, "Normalizer"),
    },
}
_DEFAULT = "1"  # of both enumerations above


@cache
def _model_class() -> Any:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="kvasir")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            label = kinds.LABEL_REPEATED if key == "pieces" else kinds.LABEL_OPTIONAL
            field = message.field.add(name=key, number=number, label=label)
            if kind in _SCHEMA:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".kvasir.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind}")
            if kind == "INT32":
                field.default_value = _DEFAULT
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("kvasir.Model"))


def read_marian(source: Path) -> str:
    """Return the folder's tokenizer as a tokenizer.json. Raises UnsupportedError.

    It cuts texts as MarianTokenizer does without sacremoses, except several characters in a row
    that only targets have. A language's code, as >>fra<<, is one token wherever it stands.
    """
    found, ids = _model_class()(), read_object(source / VOCABULARY_FILE, UnsupportedError)
    try:
        found.ParseFromString((source / SOURCE_FILE).read_bytes())
    except DecodeError:
        raise UnsupportedError(f"{SOURCE_FILE} is no SentencePiece model; copy it again") from None
    if found.trainer_spec.model_type != _UNIGRAM:
        raise UnsupportedError(f"{SOURCE_FILE} is not of SentencePiece's kind Unigram")
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str) or _UNKNOWN not in ids:
        raise UnsupportedError(f"{VOCABULARY_FILE} must number its tokens, {_UNKNOWN} among them")
    scores = {one.piece: one.score for one in found.pieces if one.type == _NORMAL}
    special = [token for token in ids if token in (_END, _UNKNOWN, _PADDING) or _is_code(token)]
    lowest = min(scores.values(), default=0.0) - _PENALTY
    vocabulary = [
        (piece, scores.get(piece, lowest))
        if piece in scores or piece in special or len(piece) == 1
        else (_TARGET_MARK + piece, 0.0)
        for piece in sorted(ids, key=ids.__getitem__)
    ]
    tokenizer = Tokenizer(models.Unigram(vocabulary, ids[_UNKNOWN], byte_fallback=False))
    steps: list[normalizers.Normalizer] = [
        normalizers.Strip(),
        normalizers.Replace(Regex(" {2,}"), " "),
    ]
    if charsmap := found.normalizer_spec.precompiled_charsmap:
        steps.insert(0, normalizers.Precompiled(charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_TARGET_MARK, ""), decoders.Metaspace()]
    )
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in special])
    if _END in ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {_END}", special_tokens=[(_END, ids[_END])]
        )
    return tokenizer.to_str()


def _is_code(token: str) -> bool:
    return token.startswith(">>") and token.endswith("<<")

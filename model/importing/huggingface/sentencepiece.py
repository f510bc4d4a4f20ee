"""SentencePiece models (Kudo & Richardson 2018), made into a tokenizer.json.

A file is a message of protobuf whose schema is sentencepiece_model.proto; only the fields that are
read are named here. Marian, T5, mT5, mBART and PEGASUS number its pieces and add some, each in its
own way, as their tokenizers in transformers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

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

from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.platform.files import read_limited, read_object

SOURCE_FILE, VOCABULARY_FILE = "source.spm", "vocab.json"  # Marian's
FILES = ("spiece.model", "sentencepiece.bpe.model")
_END, _UNKNOWN, _PADDING = "</s>", "<unk>", "<pad>"
_NORMAL = 1  # a piece's type
_CONTROL, _BYTE = 3, 6  # others
_UNIGRAM = 1  # the trainer's model_type
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
_CC25 = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT "
    "lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN "
)
_CC50 = (
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF "
    "pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
# Before pieces of several characters that only Marian's targets have, so that no source is cut into
# them; decoding drops it. One character that only they have is better than none, as transformers
# has it.
_TARGET_MARK = "\ue000"
_PENALTY = 5.0  # of such a character, below all others; an unknown one has 10
_PEGASUS_OFFSET = 103  # tokens that only pretraining uses

Vocabulary = list[tuple[str, float]]


class _Layout(NamedTuple):
    """A family's vocabulary, by id, its special tokens, and a text's place among them."""

    vocabulary: Vocabulary
    special: list[str]
    template: str = f"$A {_END}"


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


def _read_model(path: Path) -> Any:
    """Return a file's message. Raises UnsupportedError for one that is not of kind Unigram."""
    model = _model_class()()
    try:
        model.ParseFromString(read_limited(path))
    except DecodeError:
        raise UnsupportedError(f"{path.name} is no SentencePiece model; copy it again") from None
    if model.trainer_spec.model_type != _UNIGRAM:
        raise UnsupportedError(f"{path.name} is not of SentencePiece's kind Unigram")
    if not all(isinstance(piece.piece, str) and isfinite(piece.score) for piece in model.pieces):
        raise UnsupportedError(f"{path.name} has a piece without text or score; copy it again")
    return model


def _make_tokenizer(model: Any, layout: _Layout, unmarked: Iterable[str] = ()) -> Tokenizer:
    """Return a tokenizer that cuts texts as SentencePiece does.

    found: its message. unmarked: what decoding drops from pieces.
    """
    ids = {piece: i for i, (piece, _) in enumerate(layout.vocabulary)}
    tokenizer = Tokenizer(models.Unigram(layout.vocabulary, ids[_UNKNOWN], byte_fallback=False))
    steps: list[normalizers.Normalizer] = [
        normalizers.Strip(),
        normalizers.Replace(Regex(" {2,}"), " "),
    ]
    if charsmap := model.normalizer_spec.precompiled_charsmap:
        try:
            steps.insert(0, normalizers.Precompiled(charsmap))
        except Exception as error:  # tokenizers has no kind of its own
            raise UnsupportedError(f"a SentencePiece model's normalizer: {error}") from None
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [*(decoders.Replace(mark, "") for mark in unmarked), decoders.Metaspace()]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in layout.special])
    added = [part for part in layout.template.split() if part != "$A"]
    if all(part in ids for part in added):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=layout.template, special_tokens=[(part, ids[part]) for part in added]
        )
    return tokenizer


def _t5(pieces: Vocabulary, control: list[str], values: dict[str, Any]) -> _Layout:
    n_extra = values.get("extra_ids", 100)
    if type(n_extra) is not int or not 0 <= n_extra <= len(pieces):
        raise UnsupportedError(
            f"tokenizer_config.json's extra_ids is {n_extra!r}, not 0 to {len(pieces)}"
        )
    extra = [f"<extra_id_{i}>" for i in range(n_extra - 1, -1, -1)]
    return _Layout([*pieces, *((token, 0.0) for token in extra)], [*control, _UNKNOWN, *extra])


def _mbart(pieces: Vocabulary, _: list[str], values: dict[str, Any]) -> _Layout:
    is_50 = str(values.get("tokenizer_class")).startswith("MBart50")
    languages = (_CC25 + _CC50 * is_50).split()
    source = values.get("src_lang") or "en_XX"
    if source not in languages:
        raise UnsupportedError(f"tokenizer_config.json's src_lang {source!r} is no language of it")
    first = ["<s>", _PADDING, _END, _UNKNOWN]
    special = [*first, *languages, "<mask>"]
    vocabulary = [*((token, 0.0) for token in first), *pieces[3:]]
    vocabulary += [(token, 0.0) for token in special[len(first) :]]
    return _Layout(vocabulary, special, f"{source} $A {_END}" if is_50 else f"$A {_END} {source}")


def _pegasus(pieces: Vocabulary, _: list[str], values: dict[str, Any]) -> _Layout:
    offset = values.get("offset", _PEGASUS_OFFSET)
    if offset != _PEGASUS_OFFSET:
        raise UnsupportedError(
            f"tokenizer_config.json's offset is {offset!r}, not {_PEGASUS_OFFSET}"
        )
    first = [_PADDING, _END, "<mask_1>", "<mask_2>"]
    first += [f"<unk_{i}>" for i in range(2, offset)]
    return _Layout([*((token, -100.0) for token in first), *pieces[2:]], [*first, _UNKNOWN])


_LAYOUTS: dict[str, Callable[[Vocabulary, list[str], dict[str, Any]], _Layout]] = {
    "t5": _t5,
    "mt5": _t5,
    "mbart": _mbart,
    "pegasus": _pegasus,
}


def read_sentencepiece(path: Path, model_type: str, values: dict[str, Any]) -> str:
    """Return one of FILES as a tokenizer.json; values: tokenizer_config.json's.

    Raises UnsupportedError, also for other families than those above.
    """
    if model_type not in _LAYOUTS:
        raise UnsupportedError(f"of a {model_type!r} model {path.name} cannot be read")
    model = _read_model(path)
    if any(piece.type == _BYTE for piece in model.pieces):
        raise UnsupportedError(f"{path.name} spells characters in bytes, which cannot be read")
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    control = [piece.piece for piece in model.pieces if piece.type == _CONTROL]
    layout = _LAYOUTS[model_type](pieces, control, values)
    names = [piece for piece, _ in layout.vocabulary]
    if _UNKNOWN not in dict(pieces) or _UNKNOWN not in names or len({*names}) < len(names):
        raise UnsupportedError(f"{path.name} is not of a {model_type!r} model; copy it again")
    return _make_tokenizer(model, layout).to_str()


def read_marian(source: Path) -> str:
    """Return the tokenizer of a Marian folder as a tokenizer.json. Raises UnsupportedError.

    The pieces of source.spm get the ids of vocab.json, where those of the target language are too.
    It cuts texts as MarianTokenizer does without sacremoses, except several characters in a row
    that only targets have. A language's code, as >>fra<<, is one token wherever it stands.
    """
    ids = read_object(source / VOCABULARY_FILE, UnsupportedError)
    model = _read_model(source / SOURCE_FILE)
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str) or _UNKNOWN not in ids:
        raise UnsupportedError(f"{VOCABULARY_FILE} must number its tokens, {_UNKNOWN} among them")
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
    special = [
        token
        for token in ids
        if token in (_END, _UNKNOWN, _PADDING) or (token.startswith(">>") and token.endswith("<<"))
    ]
    lowest = min(scores.values(), default=0.0) - _PENALTY
    vocabulary = [
        (piece, scores.get(piece, lowest))
        if piece in scores or piece in special or len(piece) == 1
        else (_TARGET_MARK + piece, 0.0)
        for piece in sorted(ids, key=ids.__getitem__)
    ]
    return _make_tokenizer(model, _Layout(vocabulary, special), [_TARGET_MARK]).to_str()

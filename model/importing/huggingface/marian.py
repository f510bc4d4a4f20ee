"""The tokenizer of a Marian folder, whose source.spm and vocab.json become a tokenizer.json.

The pieces of source.spm, a SentencePiece model, get the ids of vocab.json, where those of the
target language are too.
"""

from __future__ import annotations

from pathlib import Path

from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.huggingface.sentencepiece import (
    END,
    NORMAL,
    PADDING,
    UNKNOWN,
    Layout,
    make_tokenizer,
    read_model,
)
from kvasir.model.platform.files import read_object

SOURCE_FILE = "source.spm"
VOCABULARY_FILE = "vocab.json"
# Before pieces of several characters that only targets have, so that no source is cut into them;
# decoding drops it. One character that only they have is better than none, as in MarianTokenizer.
_TARGET_MARK = "\ue000"
_PENALTY = 5.0  # of such a character, below all others; an unknown one has 10


def read_marian(source: Path) -> str:
    """Return the folder's tokenizer as a tokenizer.json. Raises UnsupportedError.

    It cuts texts as MarianTokenizer does without sacremoses, except several characters in a row
    that only targets have. A language's code, as >>fra<<, is one token wherever it stands.
    """
    ids, model = (
        read_object(source / VOCABULARY_FILE, UnsupportedError),
        read_model(source / SOURCE_FILE),
    )
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str) or UNKNOWN not in ids:
        raise UnsupportedError(f"{VOCABULARY_FILE} must number its tokens, {UNKNOWN} among them")
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    special = [
        token
        for token in ids
        if token in (END, UNKNOWN, PADDING) or (token.startswith(">>") and token.endswith("<<"))
    ]
    lowest = min(scores.values(), default=0.0) - _PENALTY
    vocabulary = [
        (piece, scores.get(piece, lowest))
        if piece in scores or piece in special or len(piece) == 1
        else (_TARGET_MARK + piece, 0.0)
        for piece in sorted(ids, key=ids.__getitem__)
    ]
    return make_tokenizer(model, Layout(vocabulary, special), [_TARGET_MARK]).to_str()

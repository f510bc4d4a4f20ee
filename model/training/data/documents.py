"""The documents of a corpus, of the kind that its files and the model say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.template.chat_template import ChatTemplate
from kvasir.model.training.data.conversations import Conversation, read_conversations
from kvasir.model.training.data.corpus import Corpus, CorpusError, read_corpus, read_lines
from kvasir.model.training.data.labels import LabelLine, read_labelled
from kvasir.model.training.data.pairs import PairLine, Pairs, read_pairs
from kvasir.model.training.data.translations import TranslationLine, Translations, read_translations

Documents = Corpus | Pairs | Translations | list[Conversation]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """The text or chats to train on, and how they become tokens."""

    paths: Sequence[Path]
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    held_out: float = 0.05  # share of the tokens, chats, pairs or translations
    tokenizer: Path | None = None  # used instead of a trained tokenizer
    chat_template: Path | None = None  # used instead of the initial checkpoint's


def read_documents(
    corpus: CorpusSettings, files: dict[str, bytes], seed: int, config: TransformerConfig
) -> Documents:
    """Return what a corpus holds; files: of the checkpoint, with its chat template.

    Raises ChatTemplateError, ConfigError and CorpusError.
    """
    if config.encoder is not None:
        return read_translations(corpus.paths, seed)
    chats = [path for path in corpus.paths if path.suffix == ".jsonl" and not path.is_dir()]
    if chats and len(chats) < len(corpus.paths):
        message = "is for lines of JSON, which cannot be mixed with text; train on one at a time"
        raise CorpusError(f"{chats[0]} {message}")
    if not chats:
        return read_corpus(corpus.paths, corpus.include, corpus.exclude, seed)
    if any(read_lines(corpus.paths, LabelLine.is_meant)):
        return read_labelled(corpus.paths, seed)
    makes_vectors = config.pooling is not None or not config.causal
    if makes_vectors or any(read_lines(corpus.paths, PairLine.is_meant)):
        return read_pairs(corpus.paths, seed)
    if any(read_lines(corpus.paths, TranslationLine.is_meant)):
        mend = "use --preset tiny-seq2seq"
        raise ConfigError(f"sources and targets are for an encoder-decoder; {mend}")
    template = ChatTemplate.parse(files)
    if template is None:
        raise CorpusError(
            "chats need a chat template, and there is none; give one with --chat-template FILE, or "
            "begin with a checkpoint that has one: --init DIR"
        )
    return read_conversations(corpus.paths, template, seed)

"""Labelled texts in JSONL, a line {"text": …, "label": …}, and the classifier that learns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir.model.config import Pooling, TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.configuration.parts import Projection
from kvasir.model.training.data.corpus import CorpusError, LineText, TextLine, read_lines, shuffled
from kvasir.model.training.data.pairs import PairLine, Pairs


class LabelLine(TextLine, title="a labelled text"):
    """A text and its label."""

    text: LineText
    label: LineText

    @classmethod
    def is_meant(cls, line: Any) -> bool:
        """Tell whether a line is meant as a labelled text, be it right or wrong."""
        return super().is_meant(line) and not PairLine.is_meant(line)

    @classmethod
    def parse(cls, line: Any) -> tuple[str, ...]:
        """Return the text and the label. Raises ValueError saying what is wrong."""
        label = line.get("label", "") if cls.is_meant(line) else ""
        if not isinstance(label, str):
            raise ValueError(f"label must be text, not {label!r:.200}; write it in quotes")
        return super().parse(line)


@dataclass(frozen=True, slots=True)
class LabelledTexts(Pairs):
    """Different texts in the order of training, each as a pair of nothing else, and its label."""

    labels: Sequence[str]


def read_labelled(paths: Sequence[Path], seed: int) -> LabelledTexts:
    """Read every line of the files once, shuffled by `seed`.

    Raises CorpusError, also for a text of two labels and where all have one.
    """
    labels = dict[str, str]()
    for text, label in dict.fromkeys(read_lines(paths, LabelLine.parse)):
        if text in labels:
            wrong = f"the text {text!r:.200} has the labels {labels[text]!r} and {label!r}"
            raise CorpusError(f"{wrong}; keep the line with the right one")
        labels[text] = label
    if len(kinds := {*labels.values()}) == 1:
        wrong = f"all {len(labels)} texts have the label {kinds.pop()!r}"
        raise CorpusError(f"{wrong}; a classifier needs texts of another label, too")
    texts = shuffled(list(labels), seed)
    return LabelledTexts([(text,) for text in texts], [labels[text] for text in texts])


def with_labels(config: TransformerConfig, labels: Sequence[str]) -> TransformerConfig:
    """Return the configuration of a classifier, whose last layer scores labels, and no tokens.

    One of the same labels stays as it is, but for their scores, which become shares. Raises
    ConfigError for a model that makes no vectors.
    """
    pooling = config.pooling or Pooling(kind="last" if config.causal else "mean")
    if {*pooling.labels} == {*labels}:
        return replace(config, pooling=replace(pooling, label_activation="softmax"))
    own, names = pooling.projections, tuple(sorted({*labels}))
    made = replace(
        pooling,
        projections=(*(own[:-1] if pooling.labels else own), Projection(d_out=len(names))),
        normalize=False,
        labels=names,
        label_activation="softmax",
    )
    try:
        return replace(config, pooling=made, tied_embeddings=True, head_bias=False)
    except ConfigError as error:
        raise ConfigError(f"labels are for a model that makes vectors of texts: {error}") from None

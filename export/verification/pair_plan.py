"""Sources and targets to verify an encoder-decoder on, and steps over them as the server has them.

Each step computes a token of every target; target i of a run starts i steps later, so rows hold
different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvasir.export.verification.plan import Test, affordable_tokens
from kvasir.export.verification.segments import Case, Ids, Step
from kvasir.model.config import TransformerConfig
from kvasir.model.network.skeleton import count_parameters

_FEWEST, _MOST, _MOST_OF_TEXT = 768, 16384, 3072  # tokens of targets
_OF_LONG_ROW = 512, 2048  # tokens
_LONGEST = 128  # tokens of a source, or of a target
_ROWS = 16  # of a run
_SPAN, _WANTED = 128, 16  # positions of the long row, and those of them that want logits


@dataclass(frozen=True, slots=True)
class SamplePairs:
    """Sources and targets to verify on, and their name in the manifest.

    pairs: tokens of each source, and of its target without the prefix. are_translations: a target
    is what the model should make of its source.
    """

    name: str
    pairs: Sequence[tuple[Ids, Ids]]
    are_translations: bool = False


class PairPlan:
    """Targets, each with one token more than is run, their sources, and the graph's tests.

    The last pair is long: the tokens of many.
    """

    def __init__(self, config: TransformerConfig, sample: SamplePairs) -> None:
        assert config.encoder is not None
        n_parameters, prefix = count_parameters(config), np.array(config.target_prefix)
        most = _MOST if sample.are_translations else _MOST_OF_TEXT
        budget = affordable_tokens(n_parameters, _FEWEST, most)
        longest = min(_LONGEST, config.encoder.max_model_len)
        n_left = min(_LONGEST, config.max_model_len + 1 - len(prefix))
        n_tokens = np.cumsum([min(len(target), n_left) for _, target in sample.pairs])
        chosen = sample.pairs[: 1 + int((n_tokens < budget).sum())]
        chosen = sorted(chosen, key=lambda pair: (len(pair[1]), len(pair[0])))
        self.sources = [_cut(source, longest) for source, _ in chosen]
        self.rows = [np.concatenate((prefix, _cut(target, n_left))) for _, target in chosen]
        first = len(prefix) - 1  # the last token of the prefix; the next is a label
        self.tests = [
            _together(self.rows, self.sources, range(start, min(start + _ROWS, len(chosen))), first)
            for start in range(0, len(chosen), _ROWS)
        ]
        reach = affordable_tokens(n_parameters, *_OF_LONG_ROW)
        sources, targets = (np.concatenate(side) for side in zip(*sample.pairs, strict=True))
        n_source = min(config.encoder.max_model_len, reach)
        self.longest = min(config.max_model_len, reach)
        self.sources.append(np.resize(sources, n_source))
        self.rows.append(
            np.concatenate((prefix, np.resize(targets, self.longest)))[: self.longest + 1]
        )
        self.tests.append(_long(self.rows, self.sources))
        self.calibrated, self.long_rows = range(len(self.rows)), range(0)  # see Plan
        kind = "pairs" if sample.are_translations else "texts as sources and targets"
        self.text = f"{sample.name}, {len(chosen)} {kind}"


def _cut(ids: Ids, longest: int) -> Ids:
    """Return tokens of which the last is kept: it tells where a text ends."""
    return ids if len(ids) <= longest else np.append(ids[: longest - 1], ids[-1])


def _together(
    rows: Sequence[Ids], sources: Sequence[Ids], places: Sequence[int], first: int
) -> Test:
    """Decode some targets in one run, with the logits of their tokens from `first` on."""
    lengths, delays = np.array([len(rows[i]) - 1 for i in places]), np.arange(len(places))
    padded = np.zeros((len(places), lengths.max()), dtype=np.int64)
    for row, i, length in zip(padded, places, lengths, strict=True):
        row[:length] = rows[i][:-1]
    steps = []
    for time in range(int((lengths + delays).max())):
        place = time - delays
        wanted = np.flatnonzero((place >= first) & (place < lengths))
        # Nobody reads what a row computes before it starts, or after its end.
        held, rests = np.clip(place, 0, lengths - 1) + 1, np.flatnonzero(place < 0).tolist()
        steps.append(Step(1, held.tolist(), wanted.tolist(), decode=True, rests=rests))
    return Test(Case(padded, steps, [sources[i] for i in places]), places, for_perplexity=True)


def _long(rows: Sequence[Ids], sources: Sequence[Ids]) -> Test:
    """Decode the last target, with the logits of some of its tokens."""
    row = rows[-1][:-1]
    wanted = np.arange(len(row)) % (_SPAN // _WANTED) == 0
    steps = [Step(1, [i + 1], [0] if asked else [], decode=True) for i, asked in enumerate(wanted)]
    return Test(Case(row[None], steps, sources[-1:]), [len(rows) - 1])

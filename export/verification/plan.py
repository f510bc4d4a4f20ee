"""Rows of tokens, and steps over them in every way the server runs a graph.

All tokens are given. Their number follows from the number of parameters, which bounds the time for
a large model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvasir.export.verification.segments import Case, Ids, Step
from kvasir.model.config import TransformerConfig
from kvasir.model.network.skeleton import count_parameters

FEWEST_TOKENS = 256  # of a text; the second half makes long rows
_BUDGET = 2e11  # tokens · parameters
# Tokens of text for perplexity, of which more than 500 are decoded, and of long rows.
_OF_TEXT, _OF_LONG_ROWS = (768, 3072), (2048, 4096)
_LONGEST = 2048
_LARGEST_WINDOW = 4096  # that a long row reaches beyond
_CHUNK, _WANTED, _DECODES = 192, 16, 8  # of a long row; the wanted are of each chunk
_CONTEXTS, _PROMPT_SHARE = (64, 128), 4  # of rows of text, a quarter of which is their prompt
_TESTED = 2  # of long rows, which are more where a model's are short
_SHORT = 37  # tokens of a short prompt


@dataclass(frozen=True, slots=True)
class SampleText:
    """Tokens to verify on, their name in the manifest, and the tokenizer's tokens before a text."""

    name: str
    token_ids: Ids
    prefix: tuple[int, ...] = ()

    def rows(self, n_rows: int, n_tokens: int, *, at_end: bool = False) -> Ids:
        """Return [rows, tokens] of the text's beginning or end, each after the prefix.

        Neighbours share a token: the last of one, which is only a label, begins the next. There
        are fewer rows, or one shorter row, where the text is too short. The prefix is cut to leave
        room for two tokens.
        """
        prefix = np.array(self.prefix[: n_tokens - 2], dtype=np.int64)
        step = min(n_tokens - len(prefix), len(self.token_ids)) - 1
        n_rows = min(n_rows, (len(self.token_ids) - 1) // step)
        first = len(self.token_ids) - n_rows * step - 1 if at_end else 0
        starts = range(first, first + n_rows * step, step)
        stretches = (self.token_ids[start : start + step + 1] for start in starts)
        return np.stack([np.concatenate((prefix, stretch)) for stretch in stretches])


class Test(NamedTuple):
    """A case, its rows' places among the plan's, and whether it is for perplexity."""

    case: Case
    places: Sequence[int]
    for_perplexity: bool = False

    def wanted(self, step: Step) -> list[tuple[int, int]]:
        """Return the place of the row, and the position in it, of each wanted token."""
        indices, positions = np.array(step.wanted, dtype=np.int64), step.positions
        rows, offsets = np.divmod(indices, step.sequence)
        return [(self.places[i], int(positions[i, j])) for i, j in zip(rows, offsets, strict=True)]


class Plan:
    """The rows that PyTorch computes, each with one token more than is run, and the graph's tests.

    long_rows: the places of rows of the text's second half, the others being of its first; of
    random tokens where there is no text of FEWEST_TOKENS. calibrated: the places of rows by which
    weights are rounded, if `calibrates`: of `calibration`, or of the second half's beginning; where
    that is too short, the long rows. text: the name of what perplexity is measured on.
    """

    def __init__(
        self,
        config: TransformerConfig,
        text: SampleText | None,
        calibration: SampleText | None = None,
        *,
        calibrates: bool = False,
    ) -> None:
        self._config, self._generator = config, np.random.default_rng(0)
        self.sources: Sequence[Ids] = ()  # as only pairs have
        n_parameters = count_parameters(config)
        n_tokens = affordable_tokens(n_parameters, *_OF_LONG_ROWS)
        long_rows = self._make_long_rows(text, n_tokens)
        if text is not None and len(text.token_ids) >= FEWEST_TOKENS:
            half = len(text.token_ids) // 2
            rest = SampleText(text.name, text.token_ids[half:], text.prefix)
            if calibration is None and len(rest.token_ids) > 2 * long_rows.size:
                calibration = rest
            text = SampleText(text.name, text.token_ids[:half], text.prefix)
        short = min(_SHORT, config.max_model_len - 1)
        odd = sorted({end for end in (short // 3, short // 3 + 2, short) if 0 < end <= short})
        prompts = [self._stretch(text, short + 2) for _ in range(3)]
        self.rows = [*prompts, *long_rows]
        self.long_rows = range(3, len(self.rows))
        self.tests = [
            Test(_in_chunks(prompts[0][:short], [short]), [0]),
            Test(_in_chunks(prompts[0][:short], odd), [0]),
            Test(_in_chunks(prompts[0][:1], [1]), [0]),
            Test(_ragged(np.stack(prompts)[:, :-1]), range(3)),
            *(Test(_long(self.rows[i][:-1]), [i]) for i in self.long_rows[:_TESTED]),
        ]
        self.text: str | None = None
        if text is not None:
            stretches, n_given = self._text_rows(text, affordable_tokens(n_parameters, *_OF_TEXT))
            places = range(len(self.rows), len(self.rows) + len(stretches))
            self.tests.append(Test(_decoded(stretches[:, :-1], n_given), places, True))
            self.rows += list(stretches)
            self.text = f"{text.name}, {len(stretches)} x {stretches.shape[1] - 1} tokens"
        self.calibrated = self.long_rows
        if calibrates and calibration is not None:
            chosen = calibration.rows(*long_rows.shape)
            self.calibrated = range(len(self.rows), len(self.rows) + len(chosen))
            self.rows += list(chosen)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row that is run."""
        return max(map(len, self.rows)) - 1

    def _make_long_rows(self, text: SampleText | None, n_tokens: int) -> Ids:
        """Return rows [rows, tokens + 1] of a text's second half, or of random tokens."""
        window = min(self._config.sliding_window or 0, _LARGEST_WINDOW)
        longest = min(self._config.max_model_len, max(_LONGEST, window + _DECODES))
        n_rows = max(1, n_tokens // longest)
        if text is None or len(text.token_ids) < FEWEST_TOKENS:
            return self._generator.integers(self._config.vocab_size, size=(1, longest + 1))
        end = SampleText(text.name, text.token_ids[len(text.token_ids) // 2 :], text.prefix)
        return end.rows(n_rows, longest + 1, at_end=True)

    def _text_rows(self, text: SampleText, n_tokens: int) -> tuple[Ids, int]:
        """Return rows of a text's beginning [rows, context + 1], and their prompts' length."""
        context = int(np.clip(n_tokens // 12, *_CONTEXTS))
        context = min(context, self._config.max_model_len)
        rows = text.rows(n_tokens // context, context + 1)
        n_prefix = min(len(text.prefix), context - 1)
        return rows, max((rows.shape[1] - 1) // _PROMPT_SHARE, n_prefix)

    def _stretch(self, text: SampleText | None, count: int) -> Ids:
        """Return a random stretch of the text after its prefix; random ids if it is too short."""
        if text is None or len(text.token_ids) < count:
            return self._generator.integers(self._config.vocab_size, size=count)
        start = self._generator.integers(len(text.token_ids) - count + 1)
        stretch = text.token_ids[start : start + count]
        return np.concatenate((np.array(text.prefix, dtype=np.int64), stretch))[:count]


def affordable_tokens(n_parameters: int, fewest: int, most: int) -> int:
    """Return how many tokens to compute: seconds of a small model, minutes of a large one."""
    return max(fewest, min(most, int(_BUDGET / n_parameters)))


def _in_chunks(row: Ids, ends: Sequence[int]) -> Case:
    """Compute one row, cut at `ends`, with the logits of all its tokens."""
    sizes = np.diff([0, *ends]).tolist()
    steps = [Step(size, [end], range(size)) for size, end in zip(sizes, ends, strict=True)]
    return Case(row[None], steps)


def _ragged(rows: Ids) -> Case:
    """Compute prompts of different lengths, padded on the right, and then a token of each."""
    longest = rows.shape[1] - 1
    lengths = [longest, max(1, longest // 2), min(3, longest)]
    wanted = [i * longest + j for i, length in enumerate(lengths) for j in range(length)]
    decode = Step(1, [length + 1 for length in lengths], range(len(lengths)), decode=True)
    return Case(rows, [Step(longest, lengths, wanted), decode])


def _long(row: Ids) -> Case:
    """Compute a long row in chunks, with the logits of some tokens, and decode its last ones."""
    n_decodes = min(_DECODES, len(row) // 2)
    n_given = len(row) - n_decodes
    steps = []
    for start in range(0, n_given, _CHUNK):
        size = min(_CHUNK, n_given - start)
        wanted = np.unique(np.linspace(0, size - 1, _WANTED, dtype=np.int64)).tolist()
        steps.append(Step(size, [start + size], wanted))
    steps += [Step(1, [i + 1], [0], decode=True) for i in range(n_given, len(row))]
    return Case(row[None], steps)


def _decoded(rows: Ids, n_given: int) -> Case:
    """Compute the rows' first tokens without logits, and decode the others."""
    batch, context = rows.shape
    steps = [Step(n_given, [n_given] * batch)] if n_given else []
    steps += [Step(1, [i + 1] * batch, range(batch), decode=i > 0) for i in range(n_given, context)]
    return Case(rows, steps)

"""ONNX Runtime against PyTorch, in every way the server runs the graph: the manifest's figures.

Both compute a layer at a time over the same given tokens; on a GPU the graph runs whole. The number
of tokens follows from the number of parameters, which bounds the time for a large model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from export.verification.layers import LayeredDecoder, affordable_tokens
from export.verification.paged_session import PagedSession
from export.verification.segments import Case, Floats, Ids, SegmentedGraph, Step
from model.bundle import Verification
from model.config import TransformerConfig
from model.progress import Progress, unheard

MAX_LOGIT_ERROR = 1e-3  # fp32, relative to the standard deviation of the logits
_MOST_DOUBT = 0.05  # of a perplexity loss that was measured on few tokens
MAX_PERPLEXITY_LOSS = {"bf16": 0.01, "fp16": 0.01, "int8": 0.01, "int4": 0.05}  # relative
# Tokens of the long row and of text. Of the fewest, more than 500 are decoded for perplexity.
_FEWEST, _MOST = 1024, 4096
_LONGEST, _LONG_SHARE = 2048, 4  # a quarter of the tokens is in one long row
_CHUNK, _WANTED, _DECODES = 192, 8, 8  # of the long row; the wanted are of each chunk
_CONTEXTS, _PROMPT_SHARE = (64, 128), 4  # of rows of text, a quarter of which is their prompt
_SHORT = 37  # tokens of a short prompt
_NO_LABEL = -100
_LOGITS = 2**24  # numbers at a time, in PyTorch and in ONNX Runtime each


class VerificationError(Exception):
    """An exported graph that differs from PyTorch; the message has the figure and its limit."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """Tokens to verify on, their name in the manifest, and the tokenizer's tokens before a text."""

    name: str
    token_ids: Ids
    prefix: tuple[int, ...] = ()


class _Test(NamedTuple):
    """A case, its rows' places among the reference's, and whether it is for perplexity."""

    case: Case
    places: Sequence[int]
    for_perplexity: bool = False

    def wanted(self, step: Step) -> list[tuple[int, int]]:
        """Return the place of the row, and the position in it, of each wanted token."""
        indices, positions = np.array(step.wanted, dtype=np.int64), step.positions
        rows, offsets = np.divmod(indices, step.sequence)
        return [(self.places[i], int(positions[i, j])) for i, j in zip(rows, offsets, strict=True)]


class Verifier:
    """A comparison of an exported graph with its decoder.

    weights: of `LayeredDecoder`. session: a graph on a GPU; None is one on the CPU.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Tensor],
        path: Path,
        text: SampleText | None,
        session: PagedSession | None = None,
    ) -> None:
        self._config, self._path, self._text, self._session = config, path, text, session
        on_gpu = session is not None and torch.cuda.is_available()
        self._decoder = LayeredDecoder(config, weights, "cuda" if on_gpu else "cpu")
        self._generator = np.random.default_rng(0)

    def verify(self, progress: Progress = unheard) -> Verification:
        """Measure everything; see `Verification` for the figures' meaning."""
        tests, rows = self._plan()
        cases = [test.case for test in tests]
        hidden = self._decoder.run([row[:-1] for row in rows], progress)
        if self._session is None:
            found = SegmentedGraph(self._path, self._config).logits(cases, progress)
        else:
            found = _run_whole(self._session, cases)
        runs = [(test, step) for test in tests for step in test.case.steps]
        tally, outputs, labels, logits = _Tally(), list[Tensor](), list[int](), list[Tensor]()
        for done, ((test, step), of_step) in enumerate(zip(runs, found, strict=True), 1):
            wanted = test.wanted(step)
            outputs += [hidden[place][position] for place, position in wanted]
            labelled = test.for_perplexity
            labels += [int(rows[at][i + 1]) if labelled else _NO_LABEL for at, i in wanted]
            logits.append(torch.from_numpy(of_step))
            # Many tokens at a time, for each of which the head's weights are converted.
            if len(outputs) * self._config.vocab_size >= _LOGITS or done == len(runs):
                expected = self._decoder.logits(torch.stack(outputs)).cpu()
                tally.add(expected, torch.cat(logits), torch.tensor(labels))
                for pending in (outputs, labels, logits):
                    pending.clear()
            progress("comparing logits", done, len(runs))
        figures: dict[str, Any] = tally.figures()
        if self._text is not None:
            texts = next(test.case.rows for test in tests if test.for_perplexity)
            figures["text"] = f"{self._text.name}, {len(texts)} x {texts.shape[1]} tokens"
        # Not validated: `check` refuses a figure that is no number.
        return Verification.model_construct(**figures)

    def _plan(self) -> tuple[list[_Test], list[Ids]]:
        """Return the tests and the reference's rows, each with one token more than is run."""
        n_tokens = affordable_tokens(self._decoder.n_parameters, _FEWEST, _MOST)
        longest = min(self._config.max_model_len, _LONGEST, n_tokens // _LONG_SHARE)
        short = min(_SHORT, self._config.max_model_len - 1)
        odd = sorted({end for end in (short // 3, short // 3 + 2, short) if 0 < end <= short})
        prompts = [self._stretch(short + 2) for _ in range(3)]
        rows = [*prompts, self._stretch(longest + 1)]
        tests = [
            _Test(_in_chunks(prompts[0][:short], [short]), [0]),
            _Test(_in_chunks(prompts[0][:short], odd), [0]),
            _Test(_in_chunks(prompts[0][:1], [1]), [0]),
            _Test(_ragged(np.stack(prompts)[:, :-1]), range(3)),
            _Test(_long(rows[3][:-1]), [3]),
        ]
        if self._text is not None:
            stretches, n_given = self._text_rows(self._text, n_tokens - longest)
            tests.append(
                _Test(_decoded(stretches[:, :-1], n_given), range(4, 4 + len(stretches)), True)
            )
            rows += list(stretches)
        return tests, rows

    def _text_rows(self, text: SampleText, n_tokens: int) -> tuple[Ids, int]:
        """Return the text's first stretches [rows, context + 1], and the length of their prompts.

        They overlap by one token. The prefix is cut to leave room for one.
        """
        context = int(np.clip(n_tokens // 16, *_CONTEXTS))
        context = min(context, self._config.max_model_len)
        prefix, token_ids = np.array(text.prefix[: context - 1], dtype=np.int64), text.token_ids
        step = min(context - len(prefix), len(token_ids) - 1)
        n_rows = min(n_tokens // context, (len(token_ids) - 1) // step)
        stretches = (token_ids[i * step : (i + 1) * step + 1] for i in range(n_rows))
        rows = np.stack([np.concatenate((prefix, stretch)) for stretch in stretches])
        return rows, max((rows.shape[1] - 1) // _PROMPT_SHARE, len(prefix))

    def _stretch(self, count: int) -> Ids:
        """Return a random stretch of the text after its prefix; random ids if it is too short."""
        if self._text is None or len(self._text.token_ids) < count:
            return self._generator.integers(self._config.vocab_size, size=count)
        start = self._generator.integers(len(self._text.token_ids) - count + 1)
        stretch = self._text.token_ids[start : start + count]
        return np.concatenate((np.array(self._text.prefix, dtype=np.int64), stretch))[:count]


class _Tally:
    """Sums over compared tokens."""

    def __init__(self) -> None:
        self.n_tokens = self.n_equal = self.n_labels = 0
        self.largest_error = 0.0
        self.n_logits, self.sums = 0, np.zeros(2)  # of the reference's logits, and of squares
        self.losses = np.zeros(2)  # in PyTorch and in ONNX Runtime
        self.squares = 0.0  # of the differences between both

    def add(self, expected: Tensor, actual: Tensor, labels: Tensor) -> None:
        """Add logits [tokens, vocab]; labels: [tokens], each the next token or _NO_LABEL."""
        self.n_tokens += len(labels)
        self.n_equal += int((expected.argmax(dim=1) == actual.argmax(dim=1)).sum())
        self.n_labels += int((labels != _NO_LABEL).sum())
        variance, mean = (of.item() for of in torch.var_mean(expected, correction=0))
        self.n_logits += expected.numel()
        self.sums += expected.numel() * np.array([mean, variance + mean**2])
        losses = torch.stack(
            [
                functional.cross_entropy(of, labels, ignore_index=_NO_LABEL, reduction="none")
                for of in (expected, actual)
            ]
        ).double()
        self.losses += losses.sum(dim=1).numpy()
        self.squares += (losses[1] - losses[0]).square().sum().item()
        error = (actual - expected).abs_().max().item()
        self.largest_error = float(np.maximum(self.largest_error, error))  # max() may pass a NaN

    def figures(self) -> dict[str, Any]:
        """Return the fields of `Verification`, without the text."""
        mean, square = self.sums / self.n_logits
        deviation = math.sqrt(max(square - mean**2, 0.0)) or math.nan  # where all logits are equal
        figures: dict[str, Any] = {
            "max_logit_error": self.largest_error / deviation,
            "greedy_agreement": self.n_equal / self.n_tokens,
            "positions": self.n_tokens,
        }
        if self.n_labels:
            in_torch, in_onnx = np.exp(self.losses / self.n_labels).tolist()
            mean = (self.losses[1] - self.losses[0]) / self.n_labels
            variance = max(self.squares / self.n_labels - mean**2, 0.0)
            figures |= {"perplexity_torch": in_torch, "perplexity_onnx": in_onnx}
            figures["perplexity_error"] = math.sqrt(variance / self.n_labels)
        return figures


def check(verification: Verification, precision: str) -> None:
    """Raise VerificationError over the limit: on logits for fp32, else on perplexity."""
    in_torch, in_onnx = verification.perplexity_torch, verification.perplexity_onnx
    doubt = 0.0  # two standard errors, since a large model is measured on few tokens
    if precision == "fp32" or np.isnan(verification.max_logit_error):
        error, limit = verification.max_logit_error, MAX_LOGIT_ERROR
        what = "logits differ from PyTorch's, relative to their standard deviation,"
    elif in_torch is None or in_onnx is None:
        raise VerificationError(
            f"{precision} is measured on text, and the checkpoint has none; "
            "give --text FILE, or --precision fp32"
        )
    else:
        error, limit = in_onnx / in_torch - 1.0, MAX_PERPLEXITY_LOSS[precision]
        what = "perplexity is above PyTorch's"
        doubt = 2.0 * (verification.perplexity_error or 0.0)
    if not error - min(doubt, _MOST_DOUBT) <= limit:  # a NaN fails too
        raise VerificationError(
            f"the graph's {what} by {error:.2e}, more than {limit:.0e}; it must not be served"
        )


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


def _run_whole(session: PagedSession, cases: Sequence[Case]) -> Iterator[Floats]:
    """Yield the logits of each step's wanted tokens, as `SegmentedGraph.logits`."""
    for case in cases:
        session.clear(*case.rows.shape)
        for step in case.steps:
            tokens = step.inputs(case.rows)["input_ids"]
            logits = session.run(tokens, step.lengths, with_logits=bool(len(step.wanted)))
            yield logits.reshape(-1, logits.shape[-1])[np.array(step.wanted, dtype=np.int64)]

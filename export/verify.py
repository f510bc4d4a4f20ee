"""ONNX Runtime against PyTorch, in every way the server runs the graph: the figures that go into the manifest.

Deliberately plain: separate past and present arrays, one run at a time, nothing cached. The reference is the decoder's
uncached forward.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from export.graph import output_names, past_names, prompt_names
from export.paged_session import PagedSession
from model.bundle import DECODE_INPUT, GRAPH_ENVIRONMENT, Verification
from model.config import DecoderConfig
from model.network.decoder import Decoder
from model.progress import Progress, followed, unheard
from model.reference import generate

MAX_LOGIT_ERROR = 1e-3  # fp32, relative to the standard deviation of the logits
MAX_PERPLEXITY_LOSS = {"bf16": 0.01, "fp16": 0.01, "int8": 0.01, "int4": 0.05}  # relative
_PROMPT = 37
_CHUNK = 64
_GREEDY_PROMPTS = 4
_GREEDY_TOKENS = 32
_LONGEST = 2048  # tokens of a row that is run to its end
_PERPLEXITY_ROWS = 16
_PERPLEXITY_CONTEXT = 1024
_IN_ONNX = "perplexity in ONNX Runtime"

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class VerificationError(Exception):
    """The exported graph does not compute what PyTorch does; the message has the figure and its limit."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """Tokens to verify on, and what to call them in the manifest. prefix: what the tokenizer puts before any text."""

    name: str
    token_ids: Ids
    prefix: tuple[int, ...] = ()


class GraphSession:
    """The exported graph with its rows: `batch` rows of `n_positions` positions, run by run.

    rounds_cache: whether running sequences have rows of int8.
    """

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        os.environ.update(GRAPH_ENVIRONMENT)  # ONNX Runtime reads it when the session is built
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._config = config
        self.rounds_cache = any(value.name == DECODE_INPUT for value in self._session.get_inputs())
        self._running: list[NDArray[Any]] = []
        self._prompts: list[NDArray[Any]] = []

    def clear(self, batch: int, n_positions: int) -> None:
        shape = (batch, self._config.n_kv_head, n_positions, self._config.head_dim)
        self._running = [np.zeros(shape, dtype=np.float32) for _ in past_names(self._config)]
        if self.rounds_cache:
            self._prompts = self._running
            self._running = [rows.astype(np.int8) for rows in self._running]

    def run(
        self, tokens: Ids, lengths: Sequence[int], *, decode: bool = False, with_logits: bool = True
    ) -> Floats:
        """Append tokens [batch, sequence], of which row b then holds lengths[b]; logits [batch, sequence, vocab].

        decode: on the rows of running sequences, where prompts have others.
        """
        batch, sequence = tokens.shape
        starts = np.maximum(np.array(lengths) - sequence, 0)
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": tokens,
            "seqlens_k": np.array(lengths, dtype=np.int32) - 1,
            "total_sequence_length": np.array(max(lengths), dtype=np.int32),
            "position_ids": starts[:, None] + np.arange(sequence),
            "logits_indices": np.arange(batch * sequence if with_logits else 0),
        }
        running, prompts = past_names(self._config), prompt_names(self._config)
        feeds |= dict(zip(running, self._running, strict=True))
        _, *presents = output_names(self._config)
        if self.rounds_cache:
            feeds |= {
                DECODE_INPUT: np.array(decode),
                **dict(zip(prompts, self._prompts, strict=True)),
            }
        if self.rounds_cache and not decode:
            presents = [f"prompt_{name}" for name in presents]
        logits, *rows = self._session.run(["logits", *presents], feeds)
        if decode or not self.rounds_cache:
            self._running = rows
        else:
            self._prompts = rows
            with np.errstate(invalid="ignore"):  # what is no number shows in the logits
                self._running = [np.clip(np.rint(row), -127, 127).astype(np.int8) for row in rows]
        shaped: Floats = logits.reshape(batch, -1, self._config.vocab_size)
        return shaped

    def run_in_chunks(self, tokens: Ids, ends: Sequence[int]) -> Iterator[Floats]:
        """One row, from empty, cut at `ends`; each chunk's logits [tokens, vocab]."""
        self.clear(1, len(tokens))
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield self.run(tokens[None, start:end], [end])[0]


class Verifier:
    """Compares one exported graph with the decoder it came from, on whatever device that is.

    session: of a graph for another device; None is the CPU's.
    """

    def __init__(
        self,
        decoder: Decoder,
        path: Path,
        text: SampleText | None,
        session: PagedSession | None = None,
    ) -> None:
        self._decoder = decoder.eval()
        self._config = decoder.config
        self._session = session or GraphSession(path, decoder.config)
        self._text = text
        self._generator = np.random.default_rng(0)

    def verify(self, progress: Progress = unheard) -> Verification:
        """Measure everything; see `Verification` for what the figures mean."""
        error, agreement = _largest(self._errors(progress)), self._greedy_agreement(progress)
        figures = Verification(max_logit_error=error, greedy_agreement=agreement)
        if self._text is None:
            return figures
        rows, n_prefix = self._rows(self._text)
        in_torch, in_onnx = self._perplexities(rows, n_prefix, progress)
        text = f"{self._text.name}, {len(rows)} x {rows.shape[1] - 1} tokens"
        return figures.model_copy(
            update={"perplexity_torch": in_torch, "perplexity_onnx": in_onnx, "text": text}
        )

    def _errors(self, progress: Progress) -> list[float]:
        longest = min(self._config.max_model_len, _LONGEST)
        short = min(_PROMPT, longest)
        prompt, full = self._tokens(short), self._tokens(longest)
        odd = sorted({end for end in (short // 3, short // 3 + 2, short) if 0 < end <= short})
        cut = [
            (prompt, [short]),  # the whole prompt at once
            (prompt, odd),  # chunks at odd boundaries
            (prompt[:1], [1]),
            (
                full,
                [*range(_CHUNK, longest, _CHUNK), longest],
            ),  # to the row's last position, or far
        ]
        return [self._chunk_error(*one) for one in followed(cut, "comparing logits", progress)] + [
            self._ragged_error()
        ]

    def _chunk_error(self, tokens: Ids, ends: Sequence[int]) -> float:
        expected = self._reference(tokens)
        parts = np.split(
            expected, ends[:-1]
        )  # what a long row's logits take is much: chunks are compared as they come
        logits = self._session.run_in_chunks(tokens, ends)
        return _largest([_difference(*pair) for pair in zip(logits, parts, strict=True)]) / _spread(
            expected
        )

    def _ragged_error(self) -> float:
        """Rows of different lengths: a prompt padded on the right, then one token each."""
        longest = min(_PROMPT, self._config.max_model_len - 1)
        lengths = [longest, max(1, longest // 2), min(3, longest)]
        tokens = np.stack([self._tokens(max(lengths) + 1) for _ in lengths])
        self._session.clear(len(lengths), max(lengths) + 1)
        prompt = self._session.run(tokens[:, : max(lengths)], lengths)
        rows = np.arange(len(lengths))
        ends = [length + 1 for length in lengths]
        decoded = self._session.run(tokens[rows, lengths][:, None], ends, decode=True)
        errors = []
        for i, length in enumerate(lengths):
            reference = self._reference(tokens[i, : length + 1])
            errors += [
                _relative_error(prompt[i, :length], reference[:-1]),
                _relative_error(decoded[i], reference[-1:]),
            ]
        return _largest(errors)

    def _greedy_agreement(self, progress: Progress) -> float:
        """Share of the oracle's greedy tokens that the graph would choose too, given the oracle's text so far."""
        equal = total = 0
        n_tokens = min(_GREEDY_TOKENS, self._config.max_model_len // 2)
        for _ in followed(range(_GREEDY_PROMPTS), "comparing greedy tokens", progress):
            prompt = self._tokens(min(16, self._config.max_model_len - n_tokens))
            expected = generate(self._decoder, prompt.tolist(), max_tokens=n_tokens)
            self._session.clear(1, len(prompt) + n_tokens)
            logits = self._session.run(prompt[None], [len(prompt)])
            for i, token in enumerate(expected):
                equal += int(logits[0, -1].argmax()) == token
                total += 1
                logits = self._session.run(np.array([[token]]), [len(prompt) + i + 1], decode=True)
        return equal / total

    def _rows(self, text: SampleText) -> tuple[Ids, int]:
        """[rows, context + 1]: the first stretches of a text, which overlap by one token, each after the prefix; and
        how many tokens that has, cut where a row would hold nothing else.
        """
        longest = min(_PERPLEXITY_CONTEXT, self._config.max_model_len)
        prefix = np.array(text.prefix[: longest - 1], dtype=np.int64)
        token_ids, step = text.token_ids, min(longest - len(prefix), len(text.token_ids) - 1)
        n_rows = min(_PERPLEXITY_ROWS, (len(token_ids) - 1) // step)
        stretches = (token_ids[i * step : (i + 1) * step + 1] for i in range(n_rows))
        return np.stack([np.concatenate((prefix, stretch)) for stretch in stretches]), len(prefix)

    def _perplexities(self, rows: Ids, n_prefix: int, progress: Progress) -> tuple[float, float]:
        """exp of the mean next-token cross-entropy, in PyTorch and in ONNX Runtime, on the same rows.

        Neither the prefix nor the token after it is measured. Where running sequences have rows of int8, the first
        half of each row is a prompt, and the second is measured.
        """
        half = (rows.shape[1] - 1) // 2 if self._session.rounds_cache else 0
        n_given = max(half, n_prefix)
        in_torch = [
            _cross_entropy(self._reference(row[:-1])[n_given:], row[n_given + 1 :])
            for row in followed(list(rows), "perplexity in PyTorch", progress)
        ]
        if half:
            in_onnx = self._decoding_losses(rows, n_given, progress)
        else:
            logits = (self._session.run_in_chunks(row[:-1], [len(row) - 1]) for row in rows)
            in_onnx = [
                _cross_entropy(next(of_row)[n_given:], row[n_given + 1 :])
                for of_row, row in zip(
                    logits, followed(list(rows), _IN_ONNX, progress), strict=True
                )
            ]
        return float(np.exp(np.mean(in_torch))), float(np.exp(np.mean(in_onnx)))

    def _decoding_losses(self, rows: Ids, n_prompt: int, progress: Progress) -> list[float]:
        """Cross-entropy at each position after the prompts, a token of every row at a time."""
        batch, context = len(rows), rows.shape[1] - 1
        self._session.clear(batch, context)
        self._session.run(rows[:, :n_prompt], [n_prompt] * batch, with_logits=False)
        losses = []
        for i in followed(range(n_prompt, context), _IN_ONNX, progress):
            logits = self._session.run(rows[:, i : i + 1], [i + 1] * batch, decode=True)
            losses.append(_cross_entropy(logits[:, 0], rows[:, i + 1]))
        return losses

    @torch.inference_mode()
    def _reference(self, tokens: Ids) -> Floats:
        ids = torch.from_numpy(tokens)[None].to(self._decoder.embedding.weight.device)
        logits: Floats = self._decoder(ids)[0].cpu().numpy()
        return logits

    def _tokens(self, count: int) -> Ids:
        """A random stretch of the sample text after its prefix, or random ids when there is none or too little."""
        if self._text is None or len(self._text.token_ids) < count:
            return self._generator.integers(self._config.vocab_size, size=count)
        start = self._generator.integers(len(self._text.token_ids) - count + 1)
        stretch = self._text.token_ids[start : start + count]
        return np.concatenate((np.array(self._text.prefix, dtype=np.int64), stretch))[:count]


def check(verification: Verification, precision: str) -> None:
    """Raise VerificationError for a graph over its precision's limit: logits for fp32, perplexity for the others."""
    if precision == "fp32" or np.isnan(verification.max_logit_error):
        error, limit = verification.max_logit_error, MAX_LOGIT_ERROR
        what = "logits differ from PyTorch's, relative to their standard deviation,"
    elif verification.perplexity_torch is None or verification.perplexity_onnx is None:
        raise VerificationError(
            f"{precision} is measured on text, and the checkpoint has none; give --text FILE, or --precision fp32"
        )
    else:
        error, limit = (
            verification.perplexity_onnx / verification.perplexity_torch - 1.0,
            MAX_PERPLEXITY_LOSS[precision],
        )
        what = "perplexity is above PyTorch's"
    if not error <= limit:  # a NaN fails too
        raise VerificationError(
            f"the graph's {what} by {error:.2e}, more than {limit:.0e}; it must not be served"
        )


def _largest(errors: Sequence[float]) -> float:
    """Not Python's max, which passes over a NaN that does not come first."""
    return float(np.max(errors))


def _relative_error(actual: Floats, expected: Floats) -> float:
    return _difference(actual, expected) / _spread(expected)


def _difference(actual: Floats, expected: Floats) -> float:
    return float(np.abs(actual - expected).max())


def _spread(logits: Floats) -> float:
    """Their standard deviation, NaN where they are all the same; numpy's would make arrays as large as they are."""
    return torch.from_numpy(logits).std(correction=0).item() or math.nan


def _cross_entropy(logits: Floats, targets: Ids) -> float:
    wide = torch.from_numpy(logits.astype(np.float64))
    return torch.nn.functional.cross_entropy(wide, torch.from_numpy(targets)).item()

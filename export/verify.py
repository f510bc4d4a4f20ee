"""ONNX Runtime against PyTorch, in every way the server runs the graph: the manifest's figures.

Deliberately plain: separate past and present arrays, one run at a time, nothing cached. The
reference is the decoder's uncached forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from export.paged_session import Floats, Ids, PagedSession
from model.bundle import CACHE_OUTPUTS, DECODE_INPUT, Verification, cache_names
from model.config import DecoderConfig
from model.network.decoder import Decoder
from model.onnx_runtime import onnxruntime
from model.progress import Progress, followed, unheard
from model.reference import generate

MAX_LOGIT_ERROR = 1e-3  # fp32, relative to the standard deviation of the logits
MAX_PERPLEXITY_LOSS = {"bf16": 0.01, "fp16": 0.01, "int8": 0.01, "int4": 0.05}  # relative
_PROMPT = 37
_CHUNK = 64
_GREEDY_PROMPTS, _GREEDY_TOKENS = 4, 32
_LONGEST = 2048  # tokens of a row that is run to its end
_PERPLEXITY_ROWS, _PERPLEXITY_CONTEXT = 16, 1024


class VerificationError(Exception):
    """An exported graph that differs from PyTorch; the message has the figure and its limit."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """Tokens to verify on, their name in the manifest, and the tokenizer's tokens before a text."""

    name: str
    token_ids: Ids
    prefix: tuple[int, ...] = ()


class GraphSession:
    """The exported graph on the CPU; rounds_cache: running sequences have rows of int8."""

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._config = config
        self.rounds_cache = any(value.name == DECODE_INPUT for value in self._session.get_inputs())
        self._rows: dict[str, list[NDArray[Any]]] = {}  # by the inputs' name, of CACHE_OUTPUTS

    def clear(self, batch: int, n_positions: int) -> None:
        """Start with `batch` empty rows of `n_positions` positions."""
        shape = (batch, self._config.n_kv_head, n_positions, self._config.head_dim)
        n_blocks, empty = 2 * self._config.n_layer, np.zeros(shape, dtype=np.float32)
        self._rows = {"past_key_values": [empty] * n_blocks}
        if self.rounds_cache:
            self._rows["prompt_key_values"] = self._rows["past_key_values"]
            self._rows["past_key_values"] = [empty.astype(np.int8)] * n_blocks

    def run(
        self, tokens: Ids, lengths: Sequence[int], *, decode: bool = False, with_logits: bool = True
    ) -> Floats:
        """Append tokens [batch, sequence]; row b then holds lengths[b]. Returns logits of all.

        decode: use the rows of running sequences, where prompts have rows of their own.
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
        n_layer = self._config.n_layer
        for name, rows in self._rows.items():
            feeds |= zip(cache_names(name, n_layer), rows, strict=True)
        if self.rounds_cache:
            feeds[DECODE_INPUT] = np.array(decode)
        used = "prompt_key_values" if self.rounds_cache and not decode else "past_key_values"
        outputs = ["logits", *cache_names(CACHE_OUTPUTS[used], n_layer)]
        logits, *self._rows[used] = self._session.run(outputs, feeds)
        if used == "prompt_key_values":
            with np.errstate(invalid="ignore"):  # a NaN shows in the logits
                rounded = (np.clip(np.rint(rows), -127, 127) for rows in self._rows[used])
                self._rows["past_key_values"] = [rows.astype(np.int8) for rows in rounded]
        return cast("Floats", logits.reshape(batch, -1, self._config.vocab_size))


class Verifier:
    """A comparison of an exported graph with its decoder; session: None is the CPU's."""

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
        """Measure everything; see `Verification` for the figures' meaning."""
        error, agreement = self._logit_error(progress), self._greedy_agreement(progress)
        perplexity: dict[str, Any] = {}
        if self._text is not None:
            rows, n_prefix = self._rows(self._text)
            in_torch, in_onnx = self._perplexities(rows, n_prefix, progress)
            text = f"{self._text.name}, {len(rows)} x {rows.shape[1] - 1} tokens"
            perplexity = {"perplexity_torch": in_torch, "perplexity_onnx": in_onnx, "text": text}
        # Not validated: `check` refuses a figure that is no number.
        return Verification.model_construct(
            max_logit_error=error, greedy_agreement=agreement, **perplexity
        )

    def _logit_error(self, progress: Progress) -> float:
        longest = min(self._config.max_model_len, _LONGEST)
        short = min(_PROMPT, longest)
        prompt, full = self._tokens(short), self._tokens(longest)
        odd = sorted({end for end in (short // 3, short // 3 + 2, short) if 0 < end <= short})
        cuts = [
            (prompt, [short]),  # the whole prompt at once
            (prompt, odd),  # chunks at odd boundaries
            (prompt[:1], [1]),
            (full, [*range(_CHUNK, longest, _CHUNK), longest]),  # to the row's last position
        ]
        errors = []
        for tokens, ends in followed(cuts, "comparing logits", progress):
            expected = self._reference(tokens)
            # The logits of a long row take much memory: chunks are compared as they come.
            chunks = zip(self._in_chunks(tokens, ends), np.split(expected, ends[:-1]), strict=True)
            largest = np.max([np.abs(actual - wanted).max() for actual, wanted in chunks])
            errors.append(largest / _spread(expected))
        return float(np.max([*errors, self._ragged_error()]))  # max() passes over a later NaN

    def _ragged_error(self) -> float:
        """Measure rows of different lengths: a prompt padded on the right, then a token each."""
        longest = min(_PROMPT, self._config.max_model_len - 1)
        lengths = [longest, max(1, longest // 2), min(3, longest)]
        tokens = np.stack([self._tokens(longest + 1) for _ in lengths])
        self._session.clear(len(lengths), longest + 1)
        prompt = self._session.run(tokens[:, :longest], lengths)
        new, ends = tokens[range(len(lengths)), lengths][:, None], [n + 1 for n in lengths]
        decoded = self._session.run(new, ends, decode=True)
        errors = []
        for i, length in enumerate(lengths):
            reference = self._reference(tokens[i, : length + 1])
            pairs = (prompt[i, :length], reference[:-1]), (decoded[i], reference[-1:])
            for actual, wanted in pairs:
                errors.append(np.abs(actual - wanted).max() / _spread(wanted))
        return float(np.max(errors))

    def _greedy_agreement(self, progress: Progress) -> float:
        """Return the share of the oracle's greedy tokens that the graph chooses after its text."""
        equal = 0
        n_tokens = min(_GREEDY_TOKENS, self._config.max_model_len // 2)
        for _ in followed(range(_GREEDY_PROMPTS), "comparing greedy tokens", progress):
            prompt = self._tokens(min(16, self._config.max_model_len - n_tokens))
            expected = generate(self._decoder, prompt.tolist(), max_tokens=n_tokens)
            self._session.clear(1, len(prompt) + n_tokens)
            logits = self._session.run(prompt[None], [len(prompt)])
            for i, token in enumerate(expected):
                equal += int(logits[0, -1].argmax()) == token
                logits = self._session.run(np.array([[token]]), [len(prompt) + i + 1], decode=True)
        return equal / (_GREEDY_PROMPTS * n_tokens)

    def _rows(self, text: SampleText) -> tuple[Ids, int]:
        """Return its first stretches [rows, context + 1], and the length of their prefix.

        They overlap by one token. The prefix is cut to leave room for one.
        """
        longest = min(_PERPLEXITY_CONTEXT, self._config.max_model_len)
        prefix = np.array(text.prefix[: longest - 1], dtype=np.int64)
        token_ids, step = text.token_ids, min(longest - len(prefix), len(text.token_ids) - 1)
        n_rows = min(_PERPLEXITY_ROWS, (len(token_ids) - 1) // step)
        stretches = (token_ids[i * step : (i + 1) * step + 1] for i in range(n_rows))
        return np.stack([np.concatenate((prefix, stretch)) for stretch in stretches]), len(prefix)

    def _perplexities(self, rows: Ids, n_prefix: int, progress: Progress) -> tuple[float, float]:
        """Return exp of the mean next-token cross-entropy in PyTorch and in ONNX Runtime.

        Neither the prefix nor the token after it is measured. Over rows of int8 the first half of
        each row is a prompt, and the second is measured.
        """
        batch, context, label = len(rows), rows.shape[1] - 1, "perplexity in ONNX Runtime"
        n_given = max(context // 2 if self._session.rounds_cache else 0, n_prefix)

        def loss(logits: Floats, row: Ids) -> float:
            return _cross_entropy(logits[n_given:], row[n_given + 1 :])

        in_torch = [
            loss(self._reference(row[:-1]), row)
            for row in followed(list(rows), "perplexity in PyTorch", progress)
        ]
        if self._session.rounds_cache and context > 1:
            self._session.clear(batch, context)
            self._session.run(rows[:, :n_given], [n_given] * batch, with_logits=False)
            in_onnx = []
            for i in followed(range(n_given, context), label, progress):
                logits = self._session.run(rows[:, i : i + 1], [i + 1] * batch, decode=True)
                in_onnx.append(_cross_entropy(logits[:, 0], rows[:, i + 1]))
        else:
            in_onnx = [
                loss(next(self._in_chunks(row[:-1], [context])), row)
                for row in followed(list(rows), label, progress)
            ]
        return float(np.exp(np.mean(in_torch))), float(np.exp(np.mean(in_onnx)))

    def _in_chunks(self, tokens: Ids, ends: Sequence[int]) -> Iterator[Floats]:
        """Run one row from empty, cut at `ends`, and yield each chunk's logits [tokens, vocab]."""
        self._session.clear(1, len(tokens))
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield self._session.run(tokens[None, start:end], [end])[0]

    @torch.inference_mode()
    def _reference(self, tokens: Ids) -> Floats:
        ids = torch.from_numpy(tokens)[None].to(self._decoder.embedding.weight.device)
        return cast("Floats", self._decoder(ids)[0].cpu().numpy())

    def _tokens(self, count: int) -> Ids:
        """Return a random stretch of the text after its prefix; random ids if it is too short."""
        if self._text is None or len(self._text.token_ids) < count:
            return self._generator.integers(self._config.vocab_size, size=count)
        start = self._generator.integers(len(self._text.token_ids) - count + 1)
        stretch = self._text.token_ids[start : start + count]
        return np.concatenate((np.array(self._text.prefix, dtype=np.int64), stretch))[:count]


def check(verification: Verification, precision: str) -> None:
    """Raise VerificationError over the limit: on logits for fp32, else on perplexity."""
    in_torch, in_onnx = verification.perplexity_torch, verification.perplexity_onnx
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
    if not error <= limit:  # a NaN fails too
        raise VerificationError(
            f"the graph's {what} by {error:.2e}, more than {limit:.0e}; it must not be served"
        )


def _spread(logits: Floats) -> float:
    """Return the standard deviation, or NaN where all are equal; numpy's makes large copies."""
    return torch.from_numpy(logits).std(correction=0).item() or math.nan


def _cross_entropy(logits: Floats, targets: Ids) -> float:
    wide = torch.from_numpy(logits.astype(np.float64))
    return torch.nn.functional.cross_entropy(wide, torch.from_numpy(targets)).item()

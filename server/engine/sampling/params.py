"""Sampling parameters, counts of tokens for penalties, and log-probabilities."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.sampling.exponentials import LOG2_E, exp2, log

MAX_LOGPROBS = 20
_GROUPS = 1024  # of logits, whose sums and peaks are computed at once

Floats = NDArray[np.float32]
_LIKELY = struct.Struct("=id")  # a token id and its log-probability


@dataclass(frozen=True, slots=True)
class BeamParams:
    """The options of a beam search; see BeamSearch."""

    width: int
    length_penalty: float = 1.0
    early_stopping: Literal[True, False, "never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one sequence. The API's schemas validate the values.

    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or
    the output (Keskar et al. 2019). frequency_penalty, presence_penalty: subtracted per occurrence,
    or once, of a token in the output. logprobs, prompt_logprobs: number of alternatives beside the
    token itself; None is off. beams: search for the likeliest texts, without sampling; only the
    target of a source can be searched.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off (Holtzman et al. 2020)
    min_p: float = 0.0  # share of the likeliest token's probability (Nguyen et al. 2024)
    typical_p: float = 1.0  # 1 is off (Meister et al. 2022)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    sample_index: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beams: BeamParams | None = None

    def generator(self) -> np.random.Generator:
        """Return a new Philox stream (Salmon et al. 2011) keyed by (seed, sample index)."""
        key = np.array([self.seed % 2**64, self.sample_index], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    @property
    def n_rows(self) -> int:
        """The rows of the KV cache that a sequence takes."""
        return 1 if self.beams is None else self.beams.width

    @property
    def penalises(self) -> bool:
        """True if tokens are penalised for having occurred."""
        counts_output = self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return counts_output or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the raw model (before temperature, penalties and bias) at one position.

    rank: 1 if no token is likelier. packed: the likeliest, which would take ten times the memory as
    objects: thousands may wait for their answer.
    """

    token_id: int
    logprob: float
    packed: bytes
    rank: int = 1

    @classmethod
    def of(
        cls, token_id: int, logprob: float, top: Sequence[tuple[int, float]], rank: int
    ) -> TokenLogprobs:
        """Return the same of a token and the likeliest."""
        packed = b"".join(_LIKELY.pack(*alternative) for alternative in top)
        return cls(token_id, logprob, packed, rank)

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens first: (token id, log-probability)."""
        return tuple(_LIKELY.iter_unpack(self.packed))


class Occurrences:
    """Counts of the tokens of a sequence, kept up to date for penalties."""

    def __init__(self, given_ids: list[int], vocab_size: int) -> None:
        self.is_given = np.zeros(vocab_size, dtype=np.bool_)
        self.is_given[given_ids] = True
        self.in_output = np.zeros(vocab_size, dtype=np.int32)
        self._n_counted = 0

    def count(self, output_ids: list[int]) -> None:
        """Count the tokens that were appended since the last call."""
        for token_id in output_ids[self._n_counted :]:
            self.in_output[token_id] += 1
        self._n_counted = len(output_ids)


def token_logprobs(row: Floats, token_id: int, alternatives: int) -> TokenLogprobs:
    """Compute the log-softmax of a row [vocab] at `token_id`, and the likeliest alternatives."""
    log_total, top = likeliest(row, alternatives)
    rank = 1 + int(np.count_nonzero(row > row[token_id]))
    return TokenLogprobs.of(token_id, float(row[token_id]) - log_total, top, rank)


def likeliest(row: Floats, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log of the sum of a row's exponentials, and its n likeliest (token id, log-prob.).

    row: logits [vocab]. Of equally likely tokens, smaller ids come first. Every _GROUPS-th token is
    of one group, so that sums and peaks of all groups are fast; as n groups have peaks of at least
    the n-th largest peak, so have n tokens.
    """
    whole, maxima = row.size // _GROUPS * _GROUPS, peaks(row)
    peak = maxima.max()
    weights = row - peak
    weights *= np.float32(LOG2_E)
    exp2(weights)
    sums = weights[:whole].reshape(-1, _GROUPS).sum(axis=0)
    total = sums.sum(dtype=np.float64) + weights[whole:].sum(dtype=np.float64)
    log_total = float(peak) + log(float(total))
    if not n:
        return log_total, ()
    threshold = np.partition(maxima, -n)[-n] if n <= maxima.size else -np.inf
    candidates = np.flatnonzero(row >= threshold)
    best = candidates[np.argsort(-row[candidates], kind="stable")][:n]
    return log_total, tuple((int(i), float(row[i]) - log_total) for i in best)


def peaks(values: Floats) -> Floats:
    """Return the largest value of each group, and each of the rest."""
    whole = values.size // _GROUPS * _GROUPS
    groups = values[:whole].reshape(-1, _GROUPS)
    return np.append(groups.max(axis=0, initial=-np.inf), values[whole:])

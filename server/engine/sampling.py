"""From logits to tokens: sampling parameters, and a sampler vectorised over the vocabulary.

Every sequence draws from its own counter-based generator, keyed by (seed, sample index), so a token
never depends on the other sequences of a batch. Filters are thresholds on the row's own values:
ties at a threshold are all kept. Rows are sampled one by one, because one fits the CPU's cache.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.grammar.constraints import Constraint

MAX_LOGPROBS = 20
_BLOCK = 256  # weights that are summed at once
_FEW = 256  # weights of which one running sum is fast
_GROUPS = 1024  # of logits, whose sums and peaks are computed at once
_SAMPLE = 2048  # weights that tell roughly where a nucleus ends
# Of these, on each side of the estimate; the first is enough 19 times in 20.
_SAMPLE_MARGINS = (24, 96)

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
        of_output = self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return of_output or self.repetition_penalty != 1.0


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
        packed = b"".join(_LIKELY.pack(*one) for one in top)
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


class SampledSequence(Protocol):
    """The state of a sequence that sampling and speculation need."""

    params: SamplingParams
    output_ids: list[int]
    ending_ids: frozenset[int]
    generator: np.random.Generator
    occurrences: Occurrences | None
    constraint: Constraint | None

    @property
    def given_ids(self) -> list[int]:
        """The tokens before the output."""

    @property
    def token_ids(self) -> list[int]:
        """Those and the output."""


def sample(row: Floats, sequence: SampledSequence) -> int | None:
    """Choose a token after `row`, logits [vocab], which stays unchanged.

    None if there is none: the model gave no finite logits, or every token is banned.
    """
    params = sequence.params
    if is_adjusted(sequence):
        row = row.copy()
        _adjust(row, sequence)
    likeliest = int(row.argmax())  # a NaN, if there is one
    if not math.isfinite(row[likeliest]):
        return None
    if params.temperature == 0.0:
        return likeliest
    return _draw(row - row[likeliest], params, sequence.generator.random())


def is_adjusted(sequence: SampledSequence) -> bool:
    """Return whether logits change before a token is drawn."""
    params = sequence.params
    bans_endings = len(sequence.output_ids) < params.min_tokens
    is_constrained = sequence.constraint is not None
    return params.penalises or bool(params.logit_bias) or bans_endings or is_constrained


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
    whole, peaks = row.size // _GROUPS * _GROUPS, _peaks(row)
    peak = peaks.max()
    weights = row - peak
    np.exp(weights, out=weights)
    sums = weights[:whole].reshape(-1, _GROUPS).sum(axis=0)
    total = sums.sum(dtype=np.float64) + weights[whole:].sum(dtype=np.float64)
    log_total = float(peak) + math.log(total)
    if not n:
        return log_total, ()
    threshold = np.partition(peaks, -n)[-n] if n <= peaks.size else -np.inf
    candidates = np.flatnonzero(row >= threshold)
    best = candidates[np.argsort(-row[candidates], kind="stable")][:n]
    return log_total, tuple((int(i), float(row[i]) - log_total) for i in best)


def _peaks(values: Floats) -> Floats:
    """Return the largest value of each group, and each of the rest."""
    whole = values.size // _GROUPS * _GROUPS
    groups = values[:whole].reshape(-1, _GROUPS)
    return np.append(groups.max(axis=0, initial=-np.inf), values[whole:])


def _kth_largest(values: Floats, k: int) -> float:
    """Return the k-th largest of `values` [n], which is not below the k-th largest peak."""
    peaks = _peaks(values)
    if k <= peaks.size:
        values = values[np.flatnonzero(values >= np.partition(peaks, -k)[-k])]
    return float(np.partition(values, -k)[-k])


def _adjust(row: Floats, sequence: SampledSequence) -> None:
    """Apply penalties and bias; ban tokens that end it too early or violate its grammar."""
    params = sequence.params
    if params.penalises:
        occurrences = sequence.occurrences or Occurrences(sequence.given_ids, row.size)
        sequence.occurrences = occurrences
        occurrences.count(sequence.output_ids)
        counts = occurrences.in_output
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            seen = np.flatnonzero(occurrences.is_given | (counts > 0))
            row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
        if params.frequency_penalty or params.presence_penalty:
            penalty = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            row -= penalty.astype(np.float32)
    if params.logit_bias:
        row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    if len(sequence.output_ids) < params.min_tokens:
        row[list(sequence.ending_ids)] = -np.inf
    if sequence.constraint is not None:
        row += sequence.constraint.penalty


def _draw(scaled: Floats, params: SamplingParams, uniform: float) -> int:
    """Draw a token after temperature, top-k, top-p, min-p and typical-p, by inversion.

    scaled: [vocab], the logits minus the largest of them; overwritten.
    """
    scaled *= 1.0 / params.temperature
    weights = np.exp(scaled, out=scaled)  # unnormalised: the likeliest token weighs 1
    floor = 0.0  # lighter tokens are dropped
    if 0 < params.top_k < weights.size:
        floor = _kth_largest(weights, params.top_k)
    if params.top_p < 1.0:
        candidates = weights[np.flatnonzero(weights >= floor)] if floor else weights
        floor = _top_p_floor(candidates, params.top_p)
    floor = max(floor, params.min_p)
    if params.typical_p < 1.0:
        _keep_typical(weights, floor, params.typical_p)
    return _first_beyond(uniform, weights, floor)


def _top_p_floor(weights: Floats, p: float) -> float:
    """Return the smallest weight in the nucleus of `weights` [n].

    The nucleus is the fewest likeliest tokens whose mass reaches p of the whole. A sorted sample
    tells roughly where it ends, and only the weights near there are sorted. If the end is not among
    them, a wider margin is tried; the last covers all weights.
    """
    total = float(_block_sums(weights).sum())
    if p * total <= 1.0:
        return 1.0  # the likeliest token is enough
    outside = (1.0 - p) * total  # the mass of the lightest tokens, which are dropped
    step = max(1, weights.size // _SAMPLE)
    sample = np.sort(weights[::step])
    rank = int(sample.cumsum(dtype=np.float64).searchsorted(outside / step))
    for margin in (*_SAMPLE_MARGINS, sample.size + 1):
        low = float(sample[rank - margin]) if rank >= margin else 0.0
        high = float(sample[rank + margin]) if rank + margin < sample.size else math.inf
        kept = weights >= low
        # Several times as fast as indexing by the mask itself.
        part = np.sort(weights[np.flatnonzero(kept & (weights <= high))])
        running = part.cumsum(dtype=np.float64)
        left = outside - (total - float(_block_sums(weights, kept).sum()))
        if 0.0 <= left < running[-1]:
            break
    return float(part[_first_over(left, running)])


def _first_beyond(share: float, weights: Floats, floor: float) -> int:
    """Return where the running sum of weights from `floor` on exceeds a share of its total.

    Sums of blocks find the block, and a running sum in it the place, much faster than one running
    sum of all `weights` [n].
    """
    kept = weights >= floor
    if floor and (few := np.flatnonzero(kept)).size <= _FEW:  # as `candidates.choose` does
        running = weights[few].cumsum(dtype=np.float64)
        return int(few[_first_over(share * float(running[-1]), running)])
    running = _block_sums(weights, kept if floor else None).cumsum()
    target = share * float(running[-1])
    block = _first_over(target, running)
    inside = slice(block * _BLOCK, (block + 1) * _BLOCK)
    left = target - float(running[block - 1]) if block else target
    running = (weights[inside] * kept[inside]).cumsum(dtype=np.float64)
    return block * _BLOCK + _first_over(left, running)


def _block_sums(weights: Floats, kept: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """Sum each _BLOCK of `weights` [n], and the shorter rest; only those in the mask `kept` [n]."""
    whole = weights.size // _BLOCK * _BLOCK
    blocks, rest = weights[:whole].reshape(-1, _BLOCK), weights[whole:]
    sums = np.zeros(len(blocks) + 1)
    if kept is None:
        sums[:-1] = np.einsum("ij->i", blocks)
    else:
        sums[:-1] = np.einsum("ij,ij->i", blocks, kept[:whole].reshape(-1, _BLOCK))
        rest = rest[kept[whole:]]
    if rest.size:
        sums[-1] = rest.sum()
    return sums


def _first_over(target: float, running: NDArray[np.float64]) -> int:
    """Return the first place of a running sum above `target`, or its end if rounding left none."""
    return int(running.searchsorted(min(target, math.nextafter(running[-1], 0.0)), side="right"))


def _keep_typical(weights: Floats, floor: float, p: float) -> None:
    """Keep the tokens whose surprise is nearest the distribution's entropy, up to a mass of p."""
    alive = np.flatnonzero((weights >= floor) & (weights > 0.0))
    probabilities = weights[alive].astype(np.float64)
    probabilities /= probabilities.sum()
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    order = np.argsort(distance)
    mass = np.cumsum(probabilities[order])
    last = int((mass < p * mass[-1]).sum())
    weights[alive[distance > distance[order[last]]]] = 0.0

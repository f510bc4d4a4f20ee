"""From logits to tokens: what a request may ask for, and the sampler, vectorised over the vocabulary.

Every sequence draws from its own counter-based generator, keyed by (seed, sample index), so that a token never depends
on who shares the batch. Filters are thresholds on the row's own values: ties at a threshold are all kept. Rows are
taken one after the other, because one fits the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from server.engine.sequence import Sequence

MAX_LOGPROBS = 20
_BLOCK = 256  # weights summed at once on the way to a place in a running sum
_SAMPLE = 1024  # weights that tell about where a nucleus ends
_FEW = 2048  # weights that are sorted without asking a sample

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence is continued. Values are checked at the door (the API's schemas), not here.

    temperature: 0 is greedy. top_k: 0 is off. top_p, typical_p: 1 is off (Holtzman et al. 2020; Meister et al. 2022).
    min_p: share of the likeliest token's probability, 0 is off (Nguyen et al. 2024).
    repetition_penalty: divides positive and multiplies negative logits of tokens already seen in prompt or output
    (Keskar et al. 2019). frequency_penalty, presence_penalty: subtracted per occurrence, or once, of an output token.
    logprobs, prompt_logprobs: None is off, otherwise the number of alternatives beside the token itself.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
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

    def generator(self) -> np.random.Generator:
        """The sequence's own stream of uniforms: Philox (Salmon et al. 2011) keyed by (seed, sample index)."""
        key = np.array([self.seed % 2**64, self.sample_index], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    @property
    def penalises(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def reshapes_logits(self) -> bool:
        """Whether the raw logits have to change before a token is chosen, temperature and filters aside."""
        return bool(self.penalises or self.logit_bias or self.min_tokens)

    @property
    def logit_bias_arrays(self) -> tuple[NDArray[np.int64], Floats]:
        """The biased ids and their biases, in the same order."""
        ids = np.fromiter(self.logit_bias.keys(), dtype=np.int64, count=len(self.logit_bias))
        return ids, np.fromiter(
            self.logit_bias.values(), dtype=np.float32, count=len(self.logit_bias)
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the raw model (before temperature, penalties and bias) at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


class Occurrences:
    """Which tokens a sequence has seen, kept up to date for the penalties that ask."""

    def __init__(self, prompt_ids: list[int], vocab_size: int) -> None:
        self._in_prompt = np.zeros(vocab_size, dtype=np.bool_)
        self._in_prompt[prompt_ids] = True
        self.in_output = np.zeros(vocab_size, dtype=np.int32)  # how often
        self._n_counted = 0

    def count(self, output_ids: list[int]) -> None:
        for token_id in output_ids[self._n_counted :]:
            self.in_output[token_id] += 1
        self._n_counted = len(output_ids)

    @property
    def seen(self) -> NDArray[np.int64]:
        """Ids in the prompt or the output."""
        return np.flatnonzero(self._in_prompt | (self.in_output > 0))


def sample(logits: Floats, sequences: list[Sequence]) -> list[int | None]:
    """Choose one token for each row of `logits` [n, vocab], which is left as it was.

    None where there is none to choose: the model gave no finite logits, or every token is banned.
    """
    return [_choose(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]


def token_logprobs(row: Floats, token_id: int, alternatives: int) -> TokenLogprobs:
    """Log-softmax of one row [vocab] at `token_id`, with the likeliest alternatives (ties: the smaller id first)."""
    peak = row.max()
    log_total = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        threshold = np.partition(row, row.size - alternatives)[row.size - alternatives]
        candidates = np.flatnonzero(row >= threshold)
        best = candidates[np.argsort(-row[candidates], kind="stable")][:alternatives]
        top = tuple((int(i), float(row[i]) - log_total) for i in best)
    return TokenLogprobs(token_id, float(row[token_id]) - log_total, top)


def _choose(row: Floats, sequence: Sequence) -> int | None:
    params = sequence.params
    if params.reshapes_logits or sequence.constraint is not None:
        row = row.copy()
        _adjust(row, sequence)
    likeliest = int(row.argmax())  # a NaN, where there is one
    if not np.isfinite(row[likeliest]):
        return None
    if params.temperature == 0.0:
        return likeliest
    return _draw(row - row[likeliest], params, sequence.generator.random())


def _adjust(row: Floats, sequence: Sequence) -> None:
    """Penalties, bias, the ban on ending too early, and what a grammar bans."""
    params = sequence.params
    if params.penalises:
        if sequence.occurrences is None:
            sequence.occurrences = Occurrences(sequence.prompt_ids, row.size)
        sequence.occurrences.count(sequence.output_ids)
        _penalise(row, params, sequence.occurrences)
    if params.logit_bias:
        ids, values = params.logit_bias_arrays
        row[ids] += values
    if len(sequence.output_ids) < params.min_tokens:
        row[list(sequence.ending_ids)] = -np.inf
    if sequence.constraint is not None:
        assert sequence.constraint.penalty is not None
        row += sequence.constraint.penalty


def _penalise(row: Floats, params: SamplingParams, occurrences: Occurrences) -> None:
    if params.repetition_penalty != 1.0:
        seen = occurrences.seen
        values = row[seen]
        row[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.frequency_penalty or params.presence_penalty:
        counts = occurrences.in_output
        row -= (params.frequency_penalty * counts + params.presence_penalty * (counts > 0)).astype(
            np.float32
        )


def _draw(scaled: Floats, params: SamplingParams, uniform: float) -> int:
    """One inverse-CDF draw, in order of ids, after temperature, top-k, top-p, min-p and typical-p.

    scaled: [vocab], the logits less the largest of them; overwritten.
    """
    scaled *= 1.0 / params.temperature
    weights = np.exp(scaled, out=scaled)  # unnormalised: the likeliest token weighs 1
    floor = 0.0  # what weighs less is dropped
    if 0 < params.top_k < weights.size:
        floor = _top_k_floor(weights, params.top_k)
    if params.top_p < 1.0:
        floor = _top_p_floor(_at_least(floor, weights) if floor else weights, params.top_p)
    floor = max(floor, params.min_p)
    if params.typical_p < 1.0:
        _keep_typical(weights, floor, params.typical_p)
    return _first_beyond(uniform, weights, floor)


def _at_least(floor: float, weights: Floats) -> Floats:
    return weights[
        np.flatnonzero(weights >= floor)
    ]  # several times as fast as indexing by the mask itself


def _top_k_floor(weights: Floats, k: int) -> float:
    """The weight of the k-th likeliest token."""
    whole = weights.size // _BLOCK * _BLOCK
    maxima = weights[:whole].reshape(_BLOCK, -1).max(axis=0)
    if k <= maxima.size:  # at least k tokens weigh as much as the k-th of these
        weights = _at_least(float(np.partition(maxima, -k)[-k]), weights)
    return float(np.partition(weights, -k)[-k])


def _top_p_floor(weights: Floats, p: float) -> float:
    """The smallest weight in the nucleus, the fewest likeliest tokens whose mass reaches p of that of `weights` [n]."""
    total = float(_block_sums(weights).sum())
    if p * total <= 1.0:
        return 1.0  # the likeliest token is enough
    outside = (1.0 - p) * total  # the mass that may be left out, from the lightest on
    negligible = min(
        outside / weights.size, 1.0
    )  # all that weighs less than this does not add up to it
    sample = weights[:: max(1, weights.size // _SAMPLE)]
    if (
        weights.size <= _FEW
        or np.count_nonzero(sample >= negligible) * weights.size <= _FEW * sample.size
    ):
        part = _at_least(negligible, weights)
        left = outside - (total - float(part.sum(dtype=np.float64)))
    else:
        part, left = _part_beyond(outside, total, weights, np.sort(sample))
    part.sort()
    return float(part[_first_over(left, part.cumsum(dtype=np.float64))])


def _part_beyond(
    mass: float, total: float, weights: Floats, sample: Floats
) -> tuple[Floats, float]:
    """Some of `weights` [n], among which their running sum, the lightest first, exceeds `mass`; what they add to it.

    sample: a few of the weights, sorted. It names one near that place; how far off is then known exactly, and the
    sample names another on the far side. All between them are enough to sort; a sample that misleads costs time alone.
    """
    share = sample.size / weights.size
    running = sample.cumsum(dtype=np.float64)
    place = min(int(running.searchsorted(mass * share)), sample.size - 1)
    pivot = float(sample[place])
    missing = mass - (total - float(_block_sums(weights, pivot).sum()))
    sampled = abs(missing) * share
    margin = 4.0 * math.sqrt(sampled * pivot) + pivot  # some four standard deviations
    end = float(running[place]) + math.copysign(sampled + margin, missing)
    other = int(running.searchsorted(end))
    if missing < 0.0:
        bound = float(sample[other]) if end > 0.0 else 0.0
        between = (weights >= bound) ^ (weights >= pivot)
    else:
        bound = float(sample[other]) if other < sample.size else math.inf
        between = (weights >= pivot) ^ (weights > bound)
    part = weights[np.flatnonzero(between)]
    part_mass = float(part.sum(dtype=np.float64))
    if abs(missing) >= part_mass:
        return weights.copy(), mass
    return part, missing if missing >= 0.0 else missing + part_mass


def _first_beyond(share: float, weights: Floats, floor: float) -> int:
    """Where the running sum of `weights` [n], without those below `floor`, first exceeds a share of its end.

    Sums of blocks find the block, a running sum inside it the place: much cheaper than one running sum.
    """
    running = _block_sums(weights, floor).cumsum()
    target = share * float(running[-1])
    block = _first_over(target, running)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    left = target - float(running[block - 1]) if block else target
    return block * _BLOCK + _first_over(left, (inside * (inside >= floor)).cumsum(dtype=np.float64))


def _block_sums(weights: Floats, floor: float = 0.0) -> NDArray[np.float64]:
    """Sums of each _BLOCK `weights` [n] in turn, and of the fewer at the end, without those below `floor`."""
    whole = weights.size // _BLOCK * _BLOCK
    blocks, rest = weights[:whole].reshape(-1, _BLOCK), weights[whole:]
    sums = np.zeros(len(blocks) + 1)
    sums[:-1] = (
        np.einsum("ij,ij->i", blocks, blocks >= floor) if floor else np.einsum("ij->i", blocks)
    )
    if rest.size:
        sums[-1] = rest[rest >= floor].sum()
    return sums


def _first_over(target: float, running: NDArray[np.float64]) -> int:
    """The first place of a running sum that is greater than `target`; where rounding leaves none, that of its end."""
    return int(running.searchsorted(min(target, math.nextafter(running[-1], 0.0)), side="right"))


def _keep_typical(weights: Floats, floor: float, p: float) -> None:
    """Drop tokens but those whose surprise is nearest the distribution's entropy, up to a mass of p."""
    alive = np.flatnonzero((weights >= floor) & (weights > 0.0))
    probabilities = weights[alive].astype(np.float64)
    probabilities /= probabilities.sum()
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    order = np.argsort(distance)
    mass = np.cumsum(probabilities[order])
    last = int((mass < p * mass[-1]).sum())
    weights[alive[distance > distance[order[last]]]] = 0.0

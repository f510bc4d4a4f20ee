"""From logits to tokens: a sampler vectorised over the vocabulary.

Every sequence draws from its own counter-based generator, keyed by (seed, sample index), so a token
never depends on the other sequences of a batch. Filters are thresholds on the row's own values:
ties at a threshold are all kept. Rows are sampled one by one, because one fits the CPU's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.sampling.exponentials import LOG2_E, exp2
from kvasir.server.engine.sampling.params import Floats, Occurrences, SamplingParams, peaks
from kvasir.server.engine.sequence import Sequence

_BLOCK = 256  # weights that are summed at once
_FEW = 256  # weights of which one running sum is fast
_SLACK = 0.01  # of an exponent, far more than its rounding
_SAMPLE = 2048  # weights that tell roughly where a nucleus ends
# Of these, on each side of the estimate; the first is enough 19 times in 20.
_SAMPLE_MARGINS = (24, 96)


def sample(row: Floats, sequence: Sequence) -> int | None:
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


def is_adjusted(sequence: Sequence) -> bool:
    """Return whether logits change before a token is drawn."""
    params = sequence.params
    bans_endings = len(sequence.output_ids) < params.min_tokens
    is_constrained = sequence.constraint is not None
    return params.penalises or bool(params.logit_bias) or bans_endings or is_constrained


def verify(logits: Floats, sequence: Sequence, draft: list[int]) -> Iterator[int | None]:
    """Choose the 1 to n_draft + 1 tokens that a draft yields; the last may be None, see `sample`.

    logits: [n_draft + 1, vocab]; row i follows the sequence's tokens and the first i of the draft.
    The caller appends each token before it takes the next, and takes none after one that ends the
    sequence. So tokens, random draws and the grammar's positions are those of one token a step.
    This is rejection sampling with a point mass q as the draft's distribution: a token is kept with
    probability p = min(1, p / q), and its replacement follows max(0, p - q), which is p without
    that token, renormalised.
    """
    constraint = sequence.constraint
    for row, drafted in zip(logits, (*draft, None), strict=True):
        token = sample(row, sequence)
        yield token
        if token != drafted:
            return
        if constraint is not None:
            if constraint.is_slow:
                return
            constraint.compute_mask(row.size, sequence.ending_ids)


def _kth_largest(values: Floats, k: int) -> float:
    """Return the k-th largest of `values` [n], which is not below the k-th largest peak."""
    maxima = peaks(values)
    if k <= maxima.size:
        values = values[np.flatnonzero(values >= np.partition(maxima, -k)[-k])]
    return float(np.partition(values, -k)[-k])


def _adjust(row: Floats, sequence: Sequence) -> None:
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
    scaled *= np.float32(LOG2_E / params.temperature)
    kept = _not_light(scaled, params)
    weights = scaled if kept is None else scaled[kept]
    surprises = weights / -LOG2_E if params.typical_p < 1.0 else None
    exp2(weights)  # unnormalised: the likeliest token weighs 1
    floor = 0.0  # lighter tokens are dropped
    if 0 < params.top_k < weights.size:
        floor = _kth_largest(weights, params.top_k)
    if params.top_p < 1.0:
        candidates = weights[np.flatnonzero(weights >= floor)] if floor else weights
        floor = _top_p_floor(candidates, params.top_p)
    floor = max(floor, params.min_p)
    if surprises is not None:
        _keep_typical(weights, surprises, floor, params.typical_p)
    place = _first_beyond(uniform, weights, floor)
    return place if kept is None else int(kept[place])


def _not_light(exponents: Floats, params: SamplingParams) -> NDArray[np.int64] | None:
    """Return the tokens of `exponents` [vocab] that top-k and min-p may leave, or None for all."""
    least = -math.inf
    if 0 < params.top_k < exponents.size:
        least = _kth_largest(exponents, params.top_k) - _SLACK
    if params.min_p and params.top_p == 1.0:  # else all tokens count for the nucleus
        least = max(least, math.log2(params.min_p) - _SLACK)
    return np.flatnonzero(exponents >= least) if math.isfinite(least) else None


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
        # Several times as fast as indexing by masks.
        part = np.sort(weights[np.flatnonzero((weights >= low) & (weights <= high))])
        heavy = weights[np.flatnonzero(weights > high)]
        running = part.cumsum(dtype=np.float64)
        left = outside - (total - float(heavy.sum(dtype=np.float64) + running[-1]))
        if 0.0 <= left < running[-1]:
            break
    return float(part[_first_over(left, running)])


def _first_beyond(share: float, weights: Floats, floor: float) -> int:
    """Return where the running sum of weights from `floor` on exceeds a share of its total.

    Sums of blocks find the block, and a running sum in it the place, much faster than one running
    sum of all `weights` [n].
    """
    places = np.flatnonzero(weights >= floor) if floor else None
    if places is not None:
        weights = weights[places]
    if weights.size <= _FEW:  # as `candidates.choose` does
        running = weights.cumsum(dtype=np.float64)
        place = _first_over(share * float(running[-1]), running)
    else:
        running = _block_sums(weights).cumsum()
        target = share * float(running[-1])
        block = _first_over(target, running)
        left = target - float(running[block - 1]) if block else target
        running = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
        place = block * _BLOCK + _first_over(left, running)
    return place if places is None else int(places[place])


def _block_sums(weights: Floats) -> NDArray[np.float64]:
    """Sum each _BLOCK of `weights` [n], and the shorter rest."""
    whole = weights.size // _BLOCK * _BLOCK
    sums = np.zeros(whole // _BLOCK + 1)
    sums[:-1] = np.add.reduce(weights[:whole].reshape(-1, _BLOCK), axis=1)
    if whole < weights.size:
        sums[-1] = np.add.reduce(weights[whole:])
    return sums


def _first_over(target: float, running: NDArray[np.float64]) -> int:
    """Return the first place of a running sum above `target`, or its end if rounding left none."""
    return int(running.searchsorted(min(target, math.nextafter(running[-1], 0.0)), side="right"))


def _keep_typical(weights: Floats, surprises: Floats, floor: float, p: float) -> None:
    """Keep the tokens whose surprise is nearest the distribution's entropy, up to a mass of p.

    surprises: [n], the negative logarithms of `weights` [n]. Those of probabilities are larger by
    the same for all tokens, and so is the entropy.
    """
    alive = np.flatnonzero((weights >= floor) & (weights > 0.0))
    probabilities = weights[alive].astype(np.float64)
    probabilities /= probabilities.sum()
    surprise = surprises[alive].astype(np.float64)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    order = np.argsort(distance)
    # Sums of these integers are exact, whatever the order of ties.
    mass = np.cumsum(np.rint(probabilities[order] * 2.0**52))
    last = int((mass < p * mass[-1]).sum())
    weights[alive[distance > distance[order[last]]]] = 0.0

"""Tokens from the likeliest tokens of each row, for all rows of a step at once.

A token is chosen only where those tell which one `sampling.sample` would draw from the whole row:
what they leave open, as ties that may go on beyond them, is left to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.sampling.exponentials import LOG2_E, exp2
from kvasir.server.engine.sampling.logits import Candidates
from kvasir.server.engine.sampling.params import Floats, TokenLogprobs
from kvasir.server.engine.sampling.sampler import is_adjusted
from kvasir.server.engine.sequence import Sequence

_ROUNDING = 1e-5  # of an exponential in float32
_SUM_ROUNDING = 5e-5  # of a sum of a vocabulary's, on any device

Doubles = NDArray[np.float64]


def choose(
    candidates: Candidates, wanted: list[tuple[int, Sequence]], vocab_size: int
) -> dict[int, int]:
    """Return tokens by row, for sequences that want one after it, without undecided rows."""
    n = candidates.ids.shape[1]
    is_finite = np.isfinite(candidates.log_totals) & np.isfinite(candidates.logits[:, 0])
    possible = [
        (row, sequence)
        for row, sequence in wanted
        if is_finite[row]  # a NaN anywhere shows in the sum
        and not is_adjusted(sequence)
        and sequence.params.typical_p == 1.0
        and (sequence.params.top_k <= n or sequence.params.top_k >= vocab_size)
    ]
    tokens: dict[int, int] = {}
    for choices, pick in (
        ([choice for choice in possible if not choice[1].params.temperature], _pick_likeliest),
        ([choice for choice in possible if choice[1].params.temperature], _draw),
    ):
        if not choices:
            continue
        rows = np.array([row for row, _ in choices])
        order = candidates.ids[rows].argsort(axis=1)
        ids = np.take_along_axis(candidates.ids[rows], order, axis=1)
        logits = np.take_along_axis(candidates.logits[rows], order, axis=1)
        sequences = [sequence for _, sequence in choices]
        places = pick(logits, candidates.tempered_totals[rows], sequences, vocab_size)
        chosen = zip(rows.tolist(), ids[np.arange(len(rows)), places].tolist(), places, strict=True)
        tokens |= {row: token for row, token, place in chosen if place >= 0}
    return tokens


def candidate_logprobs(
    candidates: Candidates, row: int, token_id: int, alternatives: int
) -> TokenLogprobs | None:
    """Return what `token_logprobs` does, or None where that takes the whole row."""
    ids, logits = candidates.ids[row], candidates.logits[row]
    place = np.flatnonzero(ids == token_id)
    order = np.lexsort((ids, -logits))
    last = min(alternatives, ids.size) - 1
    if not place.size or (alternatives and logits[order[last]] <= logits.min()):
        return None
    log_total, logit = float(candidates.log_totals[row]), float(logits[place[0]])
    top = tuple((int(ids[i]), float(logits[i]) - log_total) for i in order[:alternatives])
    rank = 1 + int(np.count_nonzero(logits > logit))
    return TokenLogprobs.of(token_id, logit - log_total, top, rank)


def _pick_likeliest(
    logits: Floats, _tempered: Floats, _sequences: list[Sequence], _vocab_size: int
) -> NDArray[np.int64]:
    """Return the place of the smallest likeliest id of each row, or -1; logits: by id, [n, k]."""
    peaks = logits.max(axis=1, keepdims=True)
    return np.where(logits.min(axis=1) < peaks[:, 0], (logits == peaks).argmax(axis=1), -1)


def _draw(
    logits: Floats, tempered: Floats, sequences: list[Sequence], vocab_size: int
) -> NDArray[np.int64]:
    """Return the place of the token that each row draws, or -1; logits: by id, [n, k].

    tempered: [n], the tempered_totals of Candidates. An undecided row draws no random number.
    """
    params = [sequence.params for sequence in sequences]
    rates = np.array([LOG2_E / row_params.temperature for row_params in params], dtype=np.float32)
    weights = (logits - logits.max(axis=1, keepdims=True)) * rates[:, None]
    exp2(weights)  # as the sampler of whole rows
    lightest = weights.min(axis=1) * np.float32(1 + _ROUNDING)  # no other token is heavier
    heaviest = -np.sort(-weights, axis=1)
    floors = np.array([row_params.min_p for row_params in params], dtype=np.float32)
    top_k = np.array(
        [row_params.top_k if row_params.top_k < vocab_size else 0 for row_params in params]
    )
    of_top_k = heaviest[np.arange(len(params)), top_k - 1]
    floors = np.where(top_k > 0, np.maximum(floors, of_top_k), floors)
    kept = np.where((weights >= of_top_k[:, None]) | (top_k == 0)[:, None], weights, 0.0)
    inside = kept.sum(axis=1, dtype=np.float64)
    top_p = np.array([row_params.top_p for row_params in params])
    mass = np.where(top_k > 0, inside, np.exp(tempered, dtype=np.float64))
    low, high = (
        _top_p_floors(heaviest, top_p * mass * (1 + error))
        for error in (-_SUM_ROUNDING, _SUM_ROUNDING)
    )
    low, high = (np.where(top_p < 1.0, np.maximum(floors, floor), floors) for floor in (low, high))
    # Where others may tie with the last of top-k, it keeps them as well.
    knows_top_k = (top_k == 0) | (of_top_k > lightest)
    decided = (low == high) & (lightest < low) & knows_top_k
    uniforms = np.array(
        [
            sequence.generator.random() if is_decided else 0.0
            for sequence, is_decided in zip(sequences, decided, strict=True)
        ]
    )
    running = np.where(weights >= low[:, None], weights, np.float32(0)).cumsum(
        axis=1, dtype=np.float64
    )
    targets = np.minimum(uniforms * running[:, -1], np.nextafter(running[:, -1], 0.0))
    places = (running <= targets[:, None]).sum(axis=1)
    return np.where(decided, places, -1)


def _top_p_floors(heaviest: Floats, masses: Doubles) -> Floats:
    """Return the smallest of the fewest weights of each row [n, k] that reach its mass."""
    before = heaviest.cumsum(axis=1, dtype=np.float64) - heaviest
    n_kept = np.maximum((before < masses[:, None]).sum(axis=1), 1)
    floors: Floats = heaviest[np.arange(len(masses)), n_kept - 1]
    return floors

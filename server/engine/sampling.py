"""From logits to tokens: what a request may ask for, and the sampler, vectorised over the batch.

Every sequence draws from its own counter-based generator, keyed by (seed, sample index), so that a token never depends
on who shares the batch. Filters are thresholds on the row's own values: ties at a threshold are all kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from server.engine.sequence import Sequence

MAX_LOGPROBS = 20
_BLOCK = 256  # weights summed at once on the way to a place in a running sum
_GROUP_FLOATS = 2**17  # rows drawn from at once fit the cache; larger arrays cost page faults in every step

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
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def reshapes_logits(self) -> bool:
        """Whether the raw logits have to change before a token is chosen, temperature and filters aside."""
        return bool(self.penalises or self.logit_bias or self.min_tokens)

    @property
    def logit_bias_arrays(self) -> tuple[NDArray[np.int64], Floats]:
        """The biased ids and their biases, in the same order."""
        ids = np.fromiter(self.logit_bias.keys(), dtype=np.int64, count=len(self.logit_bias))
        return ids, np.fromiter(self.logit_bias.values(), dtype=np.float32, count=len(self.logit_bias))


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
    adjusted = _adjust(logits, sequences)
    tokens = adjusted.argmax(axis=1)
    possible = np.isfinite(adjusted[np.arange(len(tokens)), tokens])
    drawn = [i for i, sequence in enumerate(sequences) if possible[i] and sequence.params.temperature > 0.0]
    group = max(1, _GROUP_FLOATS // adjusted.shape[1])
    for start in range(0, len(drawn), group):
        rows = drawn[start : start + group]
        tokens[rows] = _draw(adjusted[rows], [sequences[i] for i in rows])
    return [int(token) if possible[i] else None for i, token in enumerate(tokens)]


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


def _adjust(logits: Floats, sequences: list[Sequence]) -> Floats:
    """Penalties, bias and the ban on ending too early; the same array when no sequence asks for any."""
    if not any(sequence.params.reshapes_logits for sequence in sequences):
        return logits
    adjusted = logits.copy()
    for row, sequence in zip(adjusted, sequences, strict=True):
        if sequence.params.reshapes_logits:
            _adjust_row(row, sequence)
    return adjusted


def _adjust_row(row: Floats, sequence: Sequence) -> None:
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


def _penalise(row: Floats, params: SamplingParams, occurrences: Occurrences) -> None:
    if params.repetition_penalty != 1.0:
        seen = occurrences.seen
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = occurrences.in_output
        row -= (params.frequency_penalty * counts + params.presence_penalty * (counts > 0)).astype(np.float32)


def _draw(logits: Floats, sequences: list[Sequence]) -> NDArray[np.int64]:
    """One inverse-CDF draw per row of `logits` [m, vocab], after temperature, top-k, top-p, min-p and typical-p.

    The logits are overwritten.
    """
    params = [sequence.params for sequence in sequences]
    temperature = np.array([p.temperature for p in params], dtype=np.float32)
    scaled = np.divide(logits, temperature[:, None], out=logits)
    scaled -= scaled.max(axis=1, keepdims=True)
    weights = np.exp(scaled, out=scaled)  # unnormalised: the likeliest token weighs 1
    _keep(weights, _top_k_floors(weights, params))
    _keep(weights, _top_p_floors(weights, params))
    _keep(weights, np.array([p.min_p for p in params], dtype=np.float32))
    _keep_typical(weights, params)
    uniforms = np.array([sequence.generator.random() for sequence in sequences])
    return _first_beyond(weights, uniforms)


def _keep(weights: Floats, floors: Floats) -> None:
    """Drop what weighs less than its row's floor."""
    if floors.any():
        np.multiply(weights, weights >= floors[:, None], out=weights)


def _top_k_floors(weights: Floats, params: list[SamplingParams]) -> Floats:
    """[m]: the weight of each row's k-th likeliest token."""
    floors = np.zeros(len(params), dtype=np.float32)
    vocab = weights.shape[1]
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
    if rows:
        places = np.array([vocab - params[i].top_k for i in rows])
        ordered = np.partition(weights[rows], np.unique(places), axis=1)
        floors[rows] = ordered[np.arange(len(rows)), places]
    return floors


def _top_p_floors(weights: Floats, params: list[SamplingParams]) -> Floats:
    """[m]: the smallest weight in each row's nucleus, the fewest likeliest tokens whose mass reaches top_p."""
    floors = np.zeros(len(params), dtype=np.float32)
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        ordered = weights[rows]
        ordered.sort(axis=1)
        outside = np.array([1.0 - params[i].top_p for i in rows])  # the mass that may be left out, from the lightest on
        floors[rows] = ordered[np.arange(len(rows)), _first_beyond(ordered, outside)]
    return floors


def _first_beyond(weights: Floats, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """[m]: where the running sum of each row of `weights` [m, vocab] first exceeds its share, in [0, 1], of the total.

    Sums of blocks find the block, a running sum inside it the place: much cheaper than one running sum.
    """
    m, vocab = weights.shape
    whole = vocab // _BLOCK * _BLOCK
    sums = np.empty((m, whole // _BLOCK + 1))
    weights[:, :whole].reshape(m, -1, _BLOCK).sum(axis=2, dtype=np.float64, out=sums[:, :-1])
    weights[:, whole:].sum(axis=1, dtype=np.float64, out=sums[:, -1])
    running = np.cumsum(sums, axis=1)
    targets = np.minimum(shares * running[:, -1], np.nextafter(running[:, -1], 0.0))
    blocks = (running <= targets[:, None]).sum(axis=1)
    places = np.empty(m, dtype=np.int64)
    for i, block in enumerate(blocks):
        inside = weights[i, block * _BLOCK : (block + 1) * _BLOCK]
        left = targets[i] - (running[i, block - 1] if block else 0.0)
        place = np.searchsorted(np.cumsum(inside, dtype=np.float64), left, side="right")
        # The block's sum and its running sum round differently: never go beyond its last weight.
        places[i] = block * _BLOCK + min(place, np.flatnonzero(inside)[-1])
    return places


def _keep_typical(weights: Floats, params: list[SamplingParams]) -> None:
    """Tokens whose surprise is nearest the distribution's entropy, up to a mass of typical_p."""
    for i, p in enumerate(params):
        if p.typical_p >= 1.0:
            continue
        alive = np.flatnonzero(weights[i])
        probabilities = weights[i, alive].astype(np.float64)
        probabilities /= probabilities.sum()
        surprise = -np.log(probabilities)
        distance = np.abs(surprise - (probabilities * surprise).sum())
        order = np.argsort(distance, kind="stable")
        mass = np.cumsum(probabilities[order])
        last = int((mass < p.typical_p * mass[-1]).sum())
        weights[i, alive[distance > distance[order[last]]]] = 0.0

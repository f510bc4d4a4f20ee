"""What recurrent heads keep: how much each token reads of what each earlier one wrote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.sampling.params import Floats

_Doubles = NDArray[np.float64]
_TOKENS = 16  # whose decays between each other are in memory at once


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a recurrent layer's heads in one text; a row is the token that reads.

    decays, weights: float [n_head, n_tokens, n_tokens], 0 for later tokens. Decays are products of
    all after the token that wrote, and the mean of a head's channels. The output is the sum of what
    tokens wrote, times weights.
    """

    decays: Floats
    weights: Floats


def measure_memory(
    n_head: int, queries: Floats, keys: Floats, decays: Floats, rates: Floats | None = None
) -> Memory:
    """Return the memory of a layer's heads, from what the operator got.

    queries, keys: [n_tokens, n_head · d_k]. decays, as logarithms: of each head [n_tokens, n_head],
    or of each of its channels [n_tokens, n_head · d_k]. rates: [n_tokens, n_head].

    Without rates the weights are (q[t] · k[s]) decay from s to t ("Transformers are SSMs", Dao &
    Gu, 2024, section 5). With them a token also takes away what its key reads, so they are
    multiplied by (I + L)⁻¹ diag(rates): see `model.network.recurrent.chunks`.
    """
    n = len(decays)
    query, key, decay = (
        part.reshape(n, n_head, -1).transpose(1, 0, 2).astype(np.float64)
        for part in (queries, keys, decays)
    )
    total = decay.cumsum(axis=1)
    shares = np.full_like(total, 1 / total.shape[-1])
    between = _faded(shares, np.ones_like(total), total)
    weights = _faded(query, key, total)
    if rates is not None:
        rate = rates.T.astype(np.float64)
        taken = np.tril(rate[:, :, None] * _faded(key, key, total), -1) + np.eye(n)
        solved = np.linalg.solve(taken.transpose(0, 2, 1), weights.transpose(0, 2, 1))
        weights = solved.transpose(0, 2, 1) * rate[:, None]
        weights *= query.shape[-1] ** -0.5
    return Memory(between.astype(np.float32), np.tril(weights).astype(np.float32))


def _faded(left: _Doubles, right: _Doubles, total: _Doubles) -> _Doubles:
    """Return the sums over channels of left[t] · right[s] · e^(total[t] - total[s]) for s ≤ t.

    left, right: [n_head, n_tokens, d]. total: of decays' logarithms, [n_head, n_tokens, 1 or d].
    Tokens before some are as they are at the first of these, where neither factor grows.
    """
    n_head, n, _ = total.shape
    sums = np.zeros((n_head, n, n))
    for start in range(0, n, _TOKENS):
        some, earlier, middle = slice(start, start + _TOKENS), slice(start), total[:, start, None]
        since = left[:, some] * np.exp(total[:, some] - middle)
        until = right[:, earlier] * np.exp(middle - total[:, earlier])
        sums[:, some, earlier] = since @ until.transpose(0, 2, 1)
        apart = np.exp(np.minimum(total[:, some, None] - total[:, None, some], 0.0))
        sums[:, some, some] = (left[:, some, None] * right[:, None, some] * apart).sum(axis=-1)
    return np.tril(sums)

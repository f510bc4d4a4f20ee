"""What recurrent heads keep: how much each token reads of what each earlier one wrote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvasir.server.engine.sampling.params import Floats


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a recurrent layer's heads in one text; a row is the token that reads.

    decays, weights: float [n_head, n_tokens, n_tokens], 0 for later tokens. Decays are products of
    all after the token that wrote. The output is the sum of what tokens wrote, times weights.
    """

    decays: Floats
    weights: Floats


def measure_memory(
    queries: Floats, keys: Floats, decays: Floats, rates: Floats | None = None
) -> Memory:
    """Return the memory of a layer's heads, from what the operator got.

    queries, keys: [n_tokens, n_head · d_k]. decays, as logarithms, rates: [n_tokens, n_head].

    Without rates the weights are (q[t] · k[s]) decay from s to t ("Transformers are SSMs", Dao &
    Gu, 2024, section 5). With them a token also takes away what its key reads, so they are
    multiplied by (I + L)⁻¹ diag(rates): see `model.network.recurrent.chunks`.
    """
    n, n_head = decays.shape
    query, key = (
        part.reshape(n, n_head, -1).transpose(1, 0, 2).astype(np.float64)
        for part in (queries, keys)
    )
    total = decays.T.astype(np.float64).cumsum(axis=-1)  # [n_head, n_tokens]
    between = np.exp(np.minimum(total[:, :, None] - total[:, None], 0.0)) * np.tri(n)
    columns = key.transpose(0, 2, 1)
    weights = query @ columns * between
    if rates is not None:
        rate = rates.T.astype(np.float64)
        taken = np.tril(rate[:, :, None] * (key @ columns) * between, -1) + np.eye(n)
        solved = np.linalg.solve(taken.transpose(0, 2, 1), weights.transpose(0, 2, 1))
        weights = solved.transpose(0, 2, 1) * rate[:, None]
        weights *= query.shape[-1] ** -0.5
    return Memory(between.astype(np.float32), np.tril(weights).astype(np.float32))

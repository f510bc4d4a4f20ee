"""Labels of heads by what they attend to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.sampling.params import Floats

_LEAST_SHARE = 0.3  # of attention that a label stands for
_LEAST_LIFT = 2.0  # of that share over even attention's
_LEAST_ROWS = 4  # that see a key of a kind; fewer say little
_FIRST_ROW = 2  # before it, the first token is also the previous one or the token itself


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One head's shares of attention by kind, and the kind that stands out, if one does."""

    label: str | None
    shares: dict[str, float]


def measure_behaviours(
    token_ids: list[int], weights: Floats, visible: NDArray[np.bool_]
) -> list[Behaviour]:
    """Measure how much of their attention heads give to keys of each kind, and label them.

    A share is the mean over the rows from the third on that see a key of the kind, four at least:
    "previous token", "first token", "same token" (the token itself, or others equal to it) and
    "induction": a token after an earlier one that equals the query (Olsson et al. 2022). A label
    needs a share of 0.3, and twice that of even attention. weights: [n_head, n, n]. visible: [n,
    n].
    """
    ids, position = np.array(token_ids), np.arange(len(token_ids))
    same = ids[:, None] == ids
    follows = np.zeros_like(same)
    follows[:, 1:] = same[:, :-1] & (position[:-1] < position[:, None])
    kinds = {
        "previous token": position[:, None] - 1 == position,
        "first token": np.broadcast_to(position == 0, same.shape),
        "induction": follows,
        "same token": same,
    }
    even = visible / visible.sum(axis=-1, keepdims=True)
    shares: list[dict[str, float]] = [{} for _ in weights]
    lifts: list[dict[str, float]] = [{} for _ in weights]
    for kind, keys in kinds.items():
        seen = keys & visible
        rows = seen.any(axis=-1) & (position >= _FIRST_ROW)
        if rows.sum() < _LEAST_ROWS:
            continue
        expected = float((even * seen)[rows].sum(axis=-1).mean())
        for head, of_head in enumerate(weights):
            share = float((of_head * seen)[rows].sum(axis=-1).mean())
            shares[head][kind], lifts[head][kind] = share, share / expected
    behaviours = []
    for of_head, lift in zip(shares, lifts, strict=True):
        likely = [k for k in of_head if of_head[k] >= _LEAST_SHARE and lift[k] >= _LEAST_LIFT]
        label = max(likely, key=of_head.__getitem__, default=None)
        behaviours.append(Behaviour(label, of_head))
    return behaviours

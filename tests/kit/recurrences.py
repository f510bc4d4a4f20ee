"""The oracle of recurrences over matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def run_by_token(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written, a token at a time. Decays are of heads or of channels."""
    query, key, value, matrix, decay, *rates = inputs
    decays, reads = decay if decay.dim() == 4 else decay[..., None], []
    for t in range(query.shape[1]):
        matrix = matrix * decays[:, t, :, :, None].exp()
        added = value[:, t]
        if rates:
            known = (matrix * key[:, t, :, :, None]).sum(dim=2)
            added = rates[0][:, t, :, None] * (added - known)
        matrix = matrix + key[:, t, :, :, None] * added[:, :, None]
        reads.append((matrix * query[:, t, :, :, None]).sum(dim=2))
    return torch.stack(reads, dim=1), matrix

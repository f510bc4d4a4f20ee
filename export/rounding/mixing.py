"""Mixing: what feed-forward's second product reads is spread over eight channels before rounding.

A gate times what it gates has few large numbers in each token, in channels that change from token
to token, so no factor of a channel takes them away. They cause most of int8's loss. With H the
Hadamard matrix of order 8, which is its own inverse but for a factor of 8, and W the product's
weights,

    W x = (W H / 8) (H x)

where H mixes channels j, j + K / 8, j + 2 K / 8, … of K. A large number becomes eight that are
smaller (Ashkboos et al., "QuaRot", 2024, which mixes all channels). H has only 1 and -1.
"""

from __future__ import annotations

import re

import numpy as np
import torch
from torch import Tensor

N_PARTS = 8
_MIXED = re.compile(r"feed_forward\.(shared\.)?down\.weight$")
_TWO = np.array([[1, 1], [1, -1]], dtype=np.float32)
HADAMARD = np.kron(_TWO, np.kron(_TWO, _TWO))


def is_mixed(name: str, n_in: int) -> bool:
    """Tell whether a product's int8 weights and inputs are mixed; name: of its weight."""
    return n_in % N_PARTS == 0 and _MIXED.search(name) is not None


def mix(x: Tensor) -> Tensor:
    """Return H x of each row of x [..., K]."""
    parts: Tensor = torch.from_numpy(HADAMARD).to(x) @ x.unflatten(-1, (N_PARTS, -1))
    return parts.flatten(-2)


def mix_weights(matrix: Tensor) -> Tensor:
    """Return W H / 8 of weights W [n_out, K]."""
    return mix(matrix) / N_PARTS

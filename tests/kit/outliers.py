"""Models with outliers: the same function, with a few channels many times the others."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from kvasir.export.rounding.places import places
from kvasir.model.config import TransformerConfig
from kvasir.model.network.skeleton import parameter_shapes

_SHARE = 16  # of a place's channels one is an outlier
_EXPONENTS = (2, 9)  # they are 4 to 256 times as large


def make_outliers(network: nn.Module, config: TransformerConfig, seed: int = 0) -> None:
    """Multiply some channels by powers of two wherever a network makes what matrices read."""
    generator, shapes = np.random.default_rng(seed), parameter_shapes(config)
    parameters = dict(network.named_parameters())
    for place in places(config):
        factors = np.ones(place.shape, dtype=np.float32)
        for of_channels in factors.reshape(-1, place.n_channels):  # of each expert
            chosen = generator.permutation(place.n_channels)[: max(1, place.n_channels // _SHARE)]
            exponents = generator.integers(*_EXPONENTS, size=len(chosen))
            of_channels[chosen] = 0.5 ** (exponents & ~1 if place.squares else exponents)
        with torch.no_grad():
            for name, multiplier in place.multipliers(factors, shapes).items():
                parameters[name].mul_(torch.from_numpy(multiplier))

"""The module of each kind of recurrence."""

from __future__ import annotations

from kvasir.model.config import ShortConvolution, TransformerConfig
from kvasir.model.network.recurrent.mixer import Mixer
from kvasir.model.network.recurrent.short_convolution import ShortConvolutionMixer

MIXERS: dict[type, type[Mixer]] = {ShortConvolution: ShortConvolutionMixer}


def make_mixer(config: TransformerConfig) -> Mixer:
    """Make the sublayer of a recurrent layer."""
    return MIXERS[type(config.recurrence)](config)

"""The module of each kind of recurrence."""

from __future__ import annotations

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import DeltaRule, Lstm, Mamba2, ShortConvolution
from kvasir.model.network.recurrent.delta_rule import DeltaRuleMixer
from kvasir.model.network.recurrent.lstm import LstmMixer
from kvasir.model.network.recurrent.mamba2 import Mamba2Mixer
from kvasir.model.network.recurrent.mixer import Mixer
from kvasir.model.network.recurrent.short_convolution import ShortConvolutionMixer

MIXERS: dict[type, type[Mixer]] = {
    DeltaRule: DeltaRuleMixer,
    Lstm: LstmMixer,
    Mamba2: Mamba2Mixer,
    ShortConvolution: ShortConvolutionMixer,
}


def make_mixer(config: TransformerConfig) -> Mixer:
    """Make the sublayer of a recurrent layer."""
    return MIXERS[type(config.recurrence)](config)

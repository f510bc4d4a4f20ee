"""The gated short convolution of LFM2 (2025)."""

from __future__ import annotations

from torch import Tensor, nn

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import ShortConvolution
from kvasir.model.network.recurrent.mixer import CausalConvolution, Mixer, State


class ShortConvolutionMixer(Mixer):
    """C · conv(B · x), with B, C and x made of each token by one matrix."""

    def __init__(self, config: TransformerConfig, recurrence: ShortConvolution) -> None:
        super().__init__(config)
        width, bias = config.d_model, recurrence.bias
        self.input = nn.Linear(width, 3 * width, bias=bias)
        self.convolution = CausalConvolution(width, recurrence.kernel, bias=bias, activates=False)
        self.output = nn.Linear(width, width, bias=bias)

    def mix(self, x: Tensor, state: State, n_new: Tensor) -> tuple[Tensor, State]:
        """See Mixer."""
        before, after, value = self.input(x).chunk(3, dim=-1)
        mixed, present = self.convolution(before * value, *state, n_new)
        output: Tensor = self.output(after * mixed)
        return output, (present,)

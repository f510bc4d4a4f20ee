"""The feed-forward sublayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from model.config import DecoderConfig

_gelu_tanh = partial(functional.gelu, approximate="tanh")
# By name: the activation, and whether it is gated.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "swiglu": (functional.silu, True),
    "geglu": (functional.gelu, True),
    "geglu_tanh": (_gelu_tanh, True),
    "gelu": (functional.gelu, False),
    "gelu_tanh": (_gelu_tanh, False),
    "relu": (functional.relu, False),
}


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) · up x), gate and up in one matrix (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation, self.gated = _ACTIVATIONS[config.feed_forward]
        widened = 2 * config.d_ff if self.gated else config.d_ff
        self.up = nn.Linear(config.d_model, widened, bias=config.feed_forward_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.feed_forward_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., d_model] to the same shape, each token on its own."""
        hidden = self.up(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        lowered: Tensor = self.down(hidden)
        return lowered

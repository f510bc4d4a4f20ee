"""Low-rank adapters beside linear layers: W x + s B A x (Hu et al. 2022), with W as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """The rows of a matrix of ours, which are rows of published modules times a factor.

    modules: as transformers names them. heights: the rows of each. order: [rows], the row of each
    of ours among all of theirs, one module below the other. transposed: the file has [in, out].
    """

    modules: tuple[str, ...]
    heights: tuple[int, ...]
    order: Tensor
    factor: float = 1.0
    transposed: bool = False


class Factors(NamedTuple):
    """The update of a module's matrix, scale · up · down; down: [r, in], up: [out, r]."""

    down: Tensor
    up: Tensor
    scale: float


class LowRank(nn.Module):
    """A linear layer that is left as it is, and the updates of the modules it was made of."""

    order: Tensor

    def __init__(
        self, base: nn.Linear, rows: PublishedRows, updates: Mapping[str, Factors]
    ) -> None:
        super().__init__()
        self.base, self.factor = base, rows.factor
        self.modules_and_heights = tuple(zip(rows.modules, rows.heights, strict=True))
        self.scales = {module: update.scale for module, update in updates.items()}
        self.down = nn.ParameterList(update.down for update in updates.values())
        self.up = nn.ParameterList(update.up for update in updates.values())
        self.ordered = torch.equal(rows.order, torch.arange(len(rows.order)))
        self.register_buffer("order", rows.order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        mapped: Tensor = self.base(x)
        return mapped + self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output for x [..., in]: [..., out]."""
        factors = zip(self.scales.items(), self.down, self.up, strict=True)
        made = {
            module: functional.linear(functional.linear(x, down), up) * (scale * self.factor)
            for (module, scale), down, up in factors
        }
        like = next(iter(made.values()))
        parts = [
            made[module] if module in made else like.new_zeros(*like.shape[:-1], height)
            for module, height in self.modules_and_heights
        ]
        whole = torch.cat(parts, dim=-1) if len(parts) > 1 else like
        return whole if self.ordered else whole[..., self.order]


def adapter_parameters(network: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of all updates by peft's names; without an adapter there are none."""
    named: dict[str, Tensor] = {}
    for layer in network.modules():
        if isinstance(layer, LowRank):
            for module, down, up in zip(layer.scales, layer.down, layer.up, strict=True):
                named |= {
                    f"base_model.model.{module}.lora_A.weight": down,
                    f"base_model.model.{module}.lora_B.weight": up,
                }
    return named

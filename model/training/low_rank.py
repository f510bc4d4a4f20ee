"""Low-rank adapters beside linear layers: W x + s B A x (Hu et al. 2022), with W as it was."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.adapters.layout import Layer, Part
from kvasir.model.adapters.peft import TENSOR, Factors


class Update(nn.Module):
    """The update of one published layer, for those of our outputs that are its own."""

    rows: Tensor
    scales: Tensor

    def __init__(self, part: Part, factors: Factors, layer: Layer) -> None:
        super().__init__()
        self.module = part.module
        self.down = nn.Parameter(torch.from_numpy(factors.a))  # [r, in]
        self.up = nn.Parameter(torch.from_numpy(factors.b))  # [published out, r]
        outputs = layer.outputs[part.first : part.first + len(part.rows), None]
        scales = torch.from_numpy(outputs * np.float32(factors.scaling))
        self.register_buffer("rows", torch.from_numpy(part.rows).long(), persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        up = self.up[self.rows] * self.scales
        return functional.linear(functional.linear(x, self.down), up)


class LowRank(nn.Module):
    """A linear layer that is left as it is, and updates of the published ones it was made of."""

    def __init__(self, base: nn.Linear, layer: Layer, factors: Mapping[str, Factors]) -> None:
        super().__init__()
        self.base = base
        self.widths = {part.module: len(part.rows) for part in layer.parts}
        own = (part for part in layer.parts if part.module in factors)
        self.updates = nn.ModuleList(Update(part, factors[part.module], layer) for part in own)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        mapped: Tensor = self.base(x)
        return mapped + self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output for x [..., in]: [..., out]."""
        made = {each.module: each(x) for each in self.updates if isinstance(each, Update)}
        like: Tensor = next(iter(made.values()))
        parts = [
            made[module] if module in made else like.new_zeros(*like.shape[:-1], width)
            for module, width in self.widths.items()
        ]
        return torch.cat(parts, dim=-1)


def adapter_parameters(network: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of all updates by peft's names; without an adapter there are none."""
    return {
        TENSOR.format(update.module, part): parameter
        for update in network.modules()
        if isinstance(update, Update)
        for part, parameter in (("A", update.down), ("B", update.up))
    }

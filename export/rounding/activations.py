"""What products read while PyTorch computes a sample of tokens."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvasir.model.network.feed_forward import ExpertLinear

_EVERY = 16  # of so many tokens one is kept in memory
_TOKENS = 256  # that `tokens` returns, about


class Activations:
    """The inputs of products, by the name of their weight: largest magnitudes and some tokens.

    folder: keeps all tokens, which may take more room than the weights; None keeps some in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.largest: dict[str, Tensor] = {}  # magnitudes, [n_in] each
        self._kept = defaultdict[str, list[Tensor]](list)
        self._experts = defaultdict[str, list[Tensor]](list)  # of each token that is kept
        # By which inputs are divided, [n_in] or, for each expert, [n_experts, n_in].
        self.columns: dict[str, Tensor] = {}
        # By parameter: what multiplies it to smooth them.
        self.multipliers = defaultdict[str, list[NDArray[np.float32]]](list)
        self.report: dict[str, Any] = {}  # for the manifest

    def describe(self, name: str, rows: Sequence[Sequence[int] | NDArray[np.int64]]) -> None:
        """Note which tokens these are of; name: of their text."""
        digest = hashlib.sha256(b"".join(np.asarray(row, dtype="<i8").tobytes() for row in rows))
        n_tokens = sum(map(len, rows))
        self.report |= {"text": name, "tokens": n_tokens, "sha256": digest.hexdigest()}

    @contextmanager
    def watch(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """Note the inputs of a module's products while the block runs; prefix: of their names."""
        with ExitStack() as hooks:
            for name, part in module.named_modules():
                if isinstance(part, nn.Linear | ExpertLinear):
                    note = partial(self._note, f"{prefix}{name}.weight")
                    hooks.enter_context(part.register_forward_pre_hook(note))
            yield

    def _note(self, name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.add(name, *arguments)

    def add(self, name: str, x: Tensor, expert: int = 0) -> None:
        """Take activations [..., n_in] into account; expert: that reads them."""
        x = x.detach().flatten(0, -2)
        if len(x):
            largest = x.abs().amax(dim=0).cpu()
            self.largest[name] = torch.maximum(largest, self.largest.get(name, largest))
            x = x[::_EVERY] if self._folder is None else x
            self._experts[name].append(torch.full((len(x),), expert))
            if self._folder is None:
                self._kept[name].append(x.to("cpu", torch.bfloat16, copy=True))
                return
            with (self._folder / name).open("ab") as file:
                x.to("cpu", torch.bfloat16).view(torch.int16).numpy().tofile(file)

    def check(self) -> None:
        """Raise ValueError for activations that are not finite, or whose squares are not."""
        for name, largest in self.largest.items():
            if not largest.square().isfinite().all():
                raise ValueError(
                    f"what {name} reads is not finite or too large; the model cannot be rounded"
                )

    def tokens(self, name: str) -> tuple[Tensor, Tensor]:
        """Return some tokens, [tokens, n_in], and the number of the expert that reads each."""
        kept = self._read(name)
        step = -(-len(kept) // _TOKENS)
        return kept[::step].float(), self.experts(name)[::step]

    def inputs(self, name: str) -> Tensor | None:
        """Return all tokens as the product reads them, [tokens, n_in]; None without a folder."""
        if self._folder is None or name not in self.largest:
            return None
        x, columns = self._read(name).float(), self.columns.get(name)
        if columns is None:
            return x
        return x / (columns if columns.dim() == 1 else columns[self.experts(name)])

    def experts(self, name: str) -> Tensor:
        """Return the number of the expert that reads each token that is kept; 0 without experts."""
        return torch.cat(self._experts[name])

    def _read(self, name: str) -> Tensor:
        if self._folder is None:
            return torch.cat(self._kept[name])
        values = torch.from_numpy(np.fromfile(self._folder / name, dtype=np.int16))
        return values.view(torch.bfloat16).view(-1, len(self.largest[name]))

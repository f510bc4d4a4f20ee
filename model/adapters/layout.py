"""The file that says how adapters of a published model fit an exported graph.

An importer joins a model's linear layers to ours and permutes their rows, and the exporter folds
factors into weights: attention's scale, the steps of an int8 cache, what smooths outliers. A layer
computes diag(outputs) W diag(inputs) of what was divided by `inputs`, so an adapter's B gets the
factors of outputs, and its A those of inputs.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

_KEY = "layout"  # of the metadata


@dataclass(frozen=True, slots=True)
class Part:
    """A published linear layer that makes the outputs [first, first + len(rows)) of one of ours.

    module: its name, as new adapters have it. rows: which of its n_out outputs each of ours is.
    """

    module: str
    n_out: int
    first: int
    rows: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of ours: its parts, and the factors of outputs [n_out] and inputs [n_in]."""

    parts: tuple[Part, ...]
    outputs: NDArray[np.float32]
    inputs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layout:
    """The layers that adapters may change, by the names of our weights.

    prefixes: of modules in a published model's adapters, each of which has one or none; the first
    is that of parts.
    """

    prefixes: tuple[str, ...]
    layers: Mapping[str, Layer]

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of each published layer."""
        return {
            part.module: (part.n_out, len(layer.inputs))
            for layer in self.layers.values()
            for part in layer.parts
        }

    def layers_of(self, modules: Container[str]) -> dict[str, Layer]:
        """Return the layers with a part among these published ones."""
        return {
            name: layer
            for name, layer in self.layers.items()
            if any(part.module in modules for part in layer.parts)
        }

    def part_name(self, module: str) -> str:
        """Return a module's name in an adapter as parts have it."""
        has = (prefix for prefix in self.prefixes if module.startswith(prefix))
        return self.prefixes[0] + module.removeprefix(max(has, key=len, default=""))

    def save(self, path: Path) -> None:
        """Write the file."""
        arrays, described = dict[str, NDArray[np.generic]](), {}
        for name, layer in self.layers.items():
            arrays[f"{name}.outputs"], arrays[f"{name}.inputs"] = layer.outputs, layer.inputs
            arrays[f"{name}.rows"] = np.concatenate([part.rows for part in layer.parts])
            described[name] = [
                (part.module, part.n_out, part.first, len(part.rows)) for part in layer.parts
            ]
        values = {"prefixes": self.prefixes, "layers": described}
        save_file(arrays, path, {_KEY: json.dumps(values)})

    @classmethod
    def load(cls, path: Path) -> Layout:
        """Read the file. Raises ValueError, in one line, for a damaged one."""
        try:
            with safe_open(path, framework="np") as file:
                values = json.loads(file.metadata()[_KEY])
                layers = {}
                for name, described in values["layers"].items():
                    rows = file.get_tensor(f"{name}.rows")
                    ends = np.cumsum([p[3] for p in described])
                    parts = zip(described, np.split(rows, ends[:-1]), strict=True)
                    layers[name] = Layer(
                        tuple(Part(module, n, at, own) for (module, n, at, _), own in parts),
                        file.get_tensor(f"{name}.outputs"),
                        file.get_tensor(f"{name}.inputs"),
                    )
            return cls(tuple(values["prefixes"]), layers)
        except (SafetensorError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None

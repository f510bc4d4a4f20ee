"""A safetensors file that is written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.progress import Progress, followed, unheard
from model.tensor_files import Shape, dtype_name


class UnsupportedError(ValueError):
    """A checkpoint that cannot be imported; one line with the file, key or tensor, and the fix."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to write; `make` returns its values, contiguous, when its turn comes."""

    name: str
    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write_safetensors(
    path: Path, tensors: Sequence[PlannedTensor], progress: Progress = unheard
) -> None:
    """Write a safetensors file with one tensor in memory at a time; the library needs them all.

    The format is the header's length (8 bytes, little-endian), the header (JSON), and the data.
    The widest types come first and the header is padded to 8 bytes, so every tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.dtype.itemsize * torch.Size(tensor.shape).numel()
        kind, offsets = dtype_name(tensor.dtype), (start, end)
        header[tensor.name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in followed(ordered, "writing tensors", progress):
            made = tensor.make()
            assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
            file.write(made.flatten().view(torch.uint8).numpy().data)

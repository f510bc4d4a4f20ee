"""The safetensors of a checkpoint folder, read and written a tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from model.checkpoint import WEIGHTS_FILE
from model.progress import Progress, followed, unheard

INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8  # of the data: the header is padded with spaces

Shape = tuple[int, ...]


class WeightsError(ValueError):
    """Weights that cannot be read; names the file, the tensor or the mend."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file that has not been read yet."""

    file: Path
    name: str
    shape: Shape
    dtype: torch.dtype

    def read(self) -> Tensor:
        # Opened anew for each tensor: what was read counts as memory of this process for as long as the file is open.
        with safe_open(self.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor to write, made when its turn comes. `make` gives it contiguous."""

    name: str
    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def n_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def stored_tensors(folder: Path, ignored: re.Pattern[str]) -> Iterator[Stored]:
    """Every tensor of a checkpoint in one file or in several, from their headers, but those with ignored names.

    Raises WeightsError.
    """
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if ignored.search(name):
                    continue
                tensor = file.get_slice(name)
                if (dtype := tensor.get_dtype()) not in _DTYPES:
                    raise WeightsError(
                        f"tensor {name!r} in {path.name} is {dtype}; there are {', '.join(_DTYPES)}"
                    )
                yield Stored(path, name, tuple(tensor.get_shape()), _DTYPES[dtype])


def _files(folder: Path) -> list[Path]:
    if (single := folder / WEIGHTS_FILE).is_file():
        return [single]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise WeightsError(
            f"it has neither {WEIGHTS_FILE} nor {INDEX_FILE}; where it has a pytorch_model.bin, save that as "
            "safetensors with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER)"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise WeightsError(
            f"{INDEX_FILE} has no weight_map of tensors to files; copy it again"
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(
                f"{INDEX_FILE} names {name!r}, which is not in the folder; copy it again"
            )
    return [folder / name for name in names]


def write_safetensors(path: Path, tensors: Sequence[Written], progress: Progress = unheard) -> None:
    """Write a file that `safetensors` reads, with one tensor in memory at a time.

    The format: the header's length in 8 bytes, little-endian; the header, JSON; the data. The widest types come first,
    so each tensor is aligned to its own.
    """
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.n_bytes
        name = _DTYPE_NAMES[tensor.dtype]
        header[tensor.name] = {
            "dtype": name,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in followed(ordered, "writing tensors", progress):
            made = tensor.make()
            assert made.shape == tensor.shape
            assert made.dtype == tensor.dtype
            file.write(made.flatten().view(torch.uint8).numpy().data)

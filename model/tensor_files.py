"""The tensors of safetensors files, and of other places, each read or made when it is needed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor

from kvasir.model.directory import sha256
from kvasir.model.platform.files import parse_object

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # of a checkpoint in several files
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # the types of weights that are written
# fmt: off
_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8,
    "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F64": torch.float64,
    "BOOL": torch.bool,
}
# fmt: on
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Shape = tuple[int, ...]


class TensorFileError(ValueError):
    """A file of tensors that cannot be used; one line with its name and the remedy."""


class LazyWeights(Mapping[str, Tensor]):
    """Tensors by name, each made anew whenever it is looked up, and not kept."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, or one made of several; `read` returns its values."""

    file: Path
    name: str
    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def __str__(self) -> str:
        return f"tensor {self.name!r} in {self.file.name}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name in safetensors."""
    return _DTYPE_NAMES[dtype]


def list_tensors(folder: Path, ignored: re.Pattern[str] | None = None) -> Iterator[StoredTensor]:
    """Yield every tensor in the headers of a folder's files, except ignored names.

    Raises TensorFileError, SafetensorError and OSError.
    """
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if ignored is not None and ignored.search(name):
                    continue
                tensor = file.get_slice(name)
                shape = tuple(tensor.get_shape())
                if (dtype := tensor.get_dtype()) not in _DTYPES:
                    place = f"tensor {name!r} in {path.name}"
                    supported = ", ".join(map(dtype_name, FLOATS))
                    raise TensorFileError(f"{place} is {dtype}; supported are {supported}")
                read = partial(_read, path, name)
                yield StoredTensor(path, name, shape, _DTYPES[dtype], read)


def _read(path: Path, name: str) -> Tensor:
    # An open file's tensors count as memory of this process, so it is opened for each tensor.
    with safe_open(path, framework="pt") as file:
        return cast("Tensor", file.get_tensor(name))


def hash_weights(files: Sequence[Path]) -> str:
    """Return the SHA-256, in hex, of the only file of weights or, of several, of their hashes."""
    hashes = [sha256(file) for file in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return a checkpoint's files of weights: one, or those of its index."""
    if (single := folder / WEIGHTS_FILE).is_file():
        return [single]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise TensorFileError(
            f"it has neither {WEIGHTS_FILE} nor {INDEX_FILE}; where it has a pytorch_model.bin, "
            "save that as safetensors with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER), for an "
            "encoder with AutoModel"
        )
    try:
        names = sorted(set(parse_object(index.read_bytes())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        message = f"{INDEX_FILE} has no weight_map of tensors to files; copy it again"
        raise TensorFileError(message) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            message = f"{INDEX_FILE} names {name!r}, which is not in the folder; copy it again"
            raise TensorFileError(message)
    return [folder / name for name in names]

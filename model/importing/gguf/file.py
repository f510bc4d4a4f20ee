"""GGUF files, as llama.cpp reads them: metadata, and tensors that are restored as they are read.

The header is parsed here and not by the `gguf` package, whose reader trusts every count and offset
of a file, and takes 14 s where this takes 0.5 s, for 150,000 tokens with their merges; its `quants`
restore the weights. Format: ggml-org/ggml, docs/gguf.md.

All scales are float16 in quantised types, so each value is a multiple of 2^-24, which float16
holds; it rounds values to 11 bits, where the integers have at most 8. Weights become float16, and
bfloat16 where scales are powers of two (MXFP4). Q4_0 becomes float32, in which integer · scale is
exact, so that an int4 export finds the same values again (`quantize_blocks` in
`export.rounding.formulas`).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.tensor_files import StoredTensor

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_KEYS, _MOST_TENSORS, _LONGEST_ARRAY, _LONGEST_STRING = 2**16, 2**20, 2**22, 2**26
_STRING, _ARRAY = 8, 9
_SCALARS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)  # struct's letters by the type's number
_PART = re.compile(r"(.*)-(\d{5})-of-(?!00000)(\d{5})\.gguf")
_AT_ONCE = 2**22  # numbers that are restored in float32 at a time
# The type's number: its name, the numbers in a block, and a block's bytes.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    39: ("MXFP4", 32, 17),
}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_RESTORED = {"Q4_0": torch.float32, "MXFP4": torch.bfloat16}  # all others become float16


@dataclass(frozen=True, slots=True)
class Gguf:
    """The contents of a model: a file, or all parts of a split one."""

    values: dict[str, Any]  # metadata; arrays of numbers are NumPy's
    tensors: list[StoredTensor]
    rounded: dict[str, str]  # by tensor: its type, where that is quantised
    files: list[Path]


def read_gguf(path: Path) -> Gguf:
    """Read a file's header, and those of its other parts. Raises UnsupportedError, OSError."""
    if not path.is_file():
        raise UnsupportedError("it does not exist")
    name = _PART.fullmatch(path.name)
    count = int(name[3]) if name else 1
    paths = [path]
    if name:
        paths = [path.with_name(f"{name[1]}-{i:05}-of-{name[3]}.gguf") for i in range(1, count + 1)]
    if missing := next((part_path.name for part_path in paths if not part_path.is_file()), None):
        raise UnsupportedError(f"it has {count} parts, and {missing} is not beside it")
    parts = [_read_part(part_path) for part_path in paths]
    values = parts[0].values
    split = values.get("split.count", 0)
    if type(split) is not int or split not in ([0, 1] if name is None else [count]):
        raise UnsupportedError(f"it is one of {split} parts, named NAME-00001-of-0000N.gguf")
    tensors = [tensor for part in parts for tensor in part.tensors]
    rounded = {name: kind for part in parts for name, kind in part.rounded.items()}
    return Gguf(values, tensors, rounded, paths)


class _Header:
    """The bytes of a file from its beginning, taken one value after another."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self._data, self._file, self.at = data, file, 0

    def numbers(self, letters: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{letters}")
        return struct.unpack(f"<{letters}", self._take(size))

    def number(self, letter: str, what: str, most: int) -> int:
        """Take a count. Raises UnsupportedError where it cannot be true."""
        (value,) = self.numbers(letter)
        if value > most:
            raise self.broken(f"{what} is {value:,}, more than {most:,}")
        return int(value)

    def string(self, what: str) -> str:
        content = self._take(self.number("Q", f"the length of {what}", _LONGEST_STRING))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self.broken(f"{what} is not UTF-8 text") from None

    def value(self, key: str) -> Any:
        kind = self._kind(key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            (value,) = self.numbers(_SCALARS[kind])
            return shortest(value) if _SCALARS[kind] == "f" else value
        item = self._kind(key)
        length = self.number("Q", f"the length of {key}", _LONGEST_ARRAY)
        if item == _ARRAY:
            raise self.broken(f"{key} is an array of arrays")
        if item == _STRING:
            return [self.string(key) for _ in range(length)]
        kind_of = np.dtype(f"<{_SCALARS[item]}")
        return np.frombuffer(self._take(length * kind_of.itemsize), kind_of)

    def _kind(self, key: str) -> int:
        (kind,) = self.numbers("I")
        if kind not in (*_SCALARS, _STRING, _ARRAY):
            raise self.broken(f"{key} is of the unknown type {kind}")
        return int(kind)

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise self.broken("it ends in the middle of its header")
        self.at += size
        return self._data[self.at - size : self.at]

    def broken(self, problem: str) -> UnsupportedError:
        return UnsupportedError(f"{self._file} is broken, copy it again: {problem}")


def shortest(value: float) -> float:
    """Return a float32 number with the fewest digits: 1e-05 and not 9.999999747e-06."""
    return float(str(np.float32(value)))


def _read_part(path: Path) -> Gguf:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise UnsupportedError(f"{path.name} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Header(data, path.name), len(data))


def _parse(path: Path, header: _Header, size: int) -> Gguf:
    if header.numbers("4s") != (_MAGIC,):
        raise UnsupportedError(f"{path.name} is not a GGUF file")
    (version,) = header.numbers("I")
    if version not in _VERSIONS:
        raise UnsupportedError(
            f"{path.name} is of GGUF version {version}; supported are {_VERSIONS[0]} and "
            f"{_VERSIONS[1]}, little-endian; convert the model again with a current llama.cpp"
        )
    n_tensors = header.number("Q", "the number of tensors", _MOST_TENSORS)
    values: dict[str, Any] = {}
    for _ in range(header.number("Q", "the number of keys", _MOST_KEYS)):
        if (key := header.string("a key")) in values:
            raise header.broken(f"it has the key {key!r} twice")
        values[key] = header.value(f"the key {key!r}")
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        if (name := header.string("a tensor's name")) in infos:
            raise header.broken(f"it has the tensor {name!r} twice")
        n_dims = header.number("I", f"the rank of {name!r}", 4)
        shape = tuple(reversed(header.numbers(f"{n_dims}Q")))
        infos[name] = shape, *header.numbers("IQ")
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**16:
        raise header.broken(f"general.alignment is {alignment!r}")
    start = -(-header.at // alignment) * alignment
    tensors, rounded = [], {}
    for name, (shape, number, offset) in infos.items():
        if number not in _TYPES:
            supported = ", ".join(kind for kind, *_ in _TYPES.values())
            raise UnsupportedError(
                f"tensor {name!r} in {path.name} is of ggml's type {number}; supported are "
                f"{supported}; take another file of this model"
            )
        kind, block, width = _TYPES[number]
        if not shape or 0 in shape or shape[-1] % block:
            raise header.broken(f"tensor {name!r} of {kind} has shape {list(shape)}")
        n_bytes, begin = math.prod(shape) // block * width, start + offset
        if begin + n_bytes > size:
            raise header.broken(f"tensor {name!r} ends at {begin + n_bytes:,} of {size:,} bytes")
        dtype = (_FLOATS | _RESTORED).get(kind, torch.float16)
        if kind not in _FLOATS:
            rounded[name] = kind
        read = partial(_read, path, begin, shape, shape[-1] // block * width, kind, dtype)
        tensors.append(StoredTensor(path, name, shape, dtype, read))
    return Gguf(values, tensors, rounded, [path])


def _read(
    path: Path, begin: int, shape: tuple[int, ...], width: int, kind: str, dtype: torch.dtype
) -> Tensor:
    """Return a tensor's numbers from rows of `width` bytes."""
    data = np.memmap(path, np.uint8, "r", begin, (math.prod(shape[:-1]), width))
    if kind in _FLOATS:
        return torch.from_numpy(np.array(data)).view(dtype).reshape(shape)
    # The package loads requests and yaml, so it is imported for a quantised tensor alone.
    from gguf import GGMLQuantizationType  # noqa: PLC0415
    from gguf.quants import dequantize  # noqa: PLC0415

    rows = torch.empty(len(data), shape[-1], dtype=dtype)
    step = max(1, _AT_ONCE // shape[-1])
    for i in range(0, len(data), step):
        values = dequantize(data[i : i + step], GGMLQuantizationType[kind])
        rows[i : i + step] = torch.from_numpy(values)
    return rows.reshape(shape)

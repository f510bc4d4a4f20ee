"""peft's folders of adapters, read for a model that they fit."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.model.adapters.config import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS_FILE,
    AdapterConfig,
    AdapterError,
    refuse,
)
from kvasir.model.adapters.layout import Layout
from kvasir.model.platform.files import in_words, parse_object, read_limited

TENSOR = "base_model.model.{}.lora_{}.weight"  # of a module, and of A or B
_TENSOR = re.compile(re.escape(TENSOR).replace(r"\{\}", "(.+)", 1).replace(r"\{\}", "([AB])"))
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_MOST_HEADER = 2**22  # bytes, for some 30,000 tensors


class _Stored(NamedTuple):
    """A tensor of a file, as its header describes it."""

    dtype: object
    shape: Any
    numbers: memoryview


@dataclass(frozen=True, slots=True)
class Factors:
    """An addition to one linear layer: A [r, n_in] and B [n_out, r], float32, and their factor."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scaling: float


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter that fits a model. modules: by their names as the layout's parts have them.

    digest: of its content. base: the model that it says it was trained on.
    """

    digest: bytes
    base: str | None
    modules: Mapping[str, Factors]


def base_name(folder: Path) -> str:
    """Return the last name of the model that an adapter says it is of; empty without one."""
    try:
        named = parse_object(read_limited(folder / ADAPTER_FILE)).get("base_model_name_or_path")
    except (OSError, ValueError):
        return ""
    path = Path(named if isinstance(named, str) else "")
    return path.parent.name if path.name.startswith("step-") else path.name  # of a run of training


def read_shapes(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of an adapter's tensors by name; none of a file that cannot be read."""
    path = folder / ADAPTER_WEIGHTS_FILE
    if not path.is_file():  # to open a pipe would wait
        return {}
    try:
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(min(int.from_bytes(length, "little"), _MOST_HEADER))
        return {key: (*held.shape,) for key, held in _tensors("", length + header).items()}
    except (OSError, AdapterError, TypeError):
        return {}


def fits(shapes: Mapping[str, tuple[Any, ...]], layout: Layout) -> bool:
    """Return whether tensors are of a model's layers, by their names and sizes."""
    sizes, found = layout.sizes, list[bool]()
    for key, shape in shapes.items():
        if (match := _TENSOR.fullmatch(key)) is not None:
            side = 0 if match[2] == "B" else 1  # of outputs, or of inputs
            size = sizes.get(layout.part_name(match[1]), (None, None))[side]
            found.append(shape[side : side + 1] == (size,))
    return bool(found) and all(found)


def read_adapter(
    folder: Path, name: str, layout: Layout, most_bytes: int = sys.maxsize
) -> PeftAdapter:
    """Read a folder. name: in errors. Raises AdapterError for what a model cannot be given."""
    try:
        described = read_limited(folder / ADAPTER_FILE)
        content = read_limited(folder / ADAPTER_WEIGHTS_FILE, most_bytes)
    except OSError as error:
        expected = f"a folder of peft with {ADAPTER_FILE} and {ADAPTER_WEIGHTS_FILE}"
        raise refuse(name, "folder", in_words(error), expected) from None
    config, sizes = AdapterConfig.read(described, name), layout.sizes
    digest = blake2b(described, digest_size=16)
    digest.update(content)
    tensors = _tensors(name, content)
    found: dict[str, dict[str, NDArray[np.float32]]] = {}
    full_names: dict[str, str] = {}
    for key in list(tensors):
        sleep(0)  # let Python's other threads go on: streams must not pause
        match = _TENSOR.fullmatch(key)
        module = "" if match is None else layout.part_name(match[1])
        if match is None or module not in sizes:
            example = next(iter(sizes), "")
            expected = f"lora_A and lora_B of linear layers in blocks, such as {example}"
            raise refuse(name, "tensor", repr(key), expected)
        found.setdefault(module, {})[match[2]] = _floats(name, key, tensors.pop(key))
        full_names[module] = match[1]
    if not found:
        raise refuse(name, ADAPTER_WEIGHTS_FILE, "empty", "lora_A and lora_B of some linear layer")
    modules = {}
    for module, pair in found.items():
        rank, scaling = config.rank(full_names[module]), config.scaling(full_names[module])
        n_out, n_in = sizes[module]
        for part, shape in (("A", (rank, n_in)), ("B", (n_out, rank))):
            given = pair[part].shape if part in pair else "missing"
            if given != shape:
                raise refuse(name, f"{module}.lora_{part}", str(given), f"shape {shape}")
        modules[module] = Factors(pair["A"], pair["B"], scaling)
    return PeftAdapter(digest.digest(), config.base_model_name_or_path, modules)


def _tensors(name: str, content: bytes) -> dict[str, _Stored]:
    """Return a safetensors file's tensors by name, without a copy, which would hold up all threads.

    The format: the length of the header, 8 bytes; the header, JSON; the numbers. Whatever a header
    says, nothing beyond the file is read.
    """
    length = int.from_bytes(content[:8], "little")
    numbers = memoryview(content)[8 + length :]
    try:
        if length > _MOST_HEADER:
            raise ValueError(f"has a header of {length:,} bytes")
        header = parse_object(content[8 : 8 + length])
        header.pop("__metadata__", None)
        return {
            key: _Stored(held["dtype"], held["shape"], numbers[begin:end])
            for key, held in header.items()
            for begin, end in [held["data_offsets"]]
        }
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(name, error) from None


def _damaged(name: str, error: Exception) -> AdapterError:
    return refuse(name, ADAPTER_WEIGHTS_FILE, f"damaged (it {error})", "a whole file")


def _floats(name: str, key: str, stored: _Stored) -> NDArray[np.float32]:
    if (dtype := _DTYPES.get(str(stored.dtype))) is None:
        raise refuse(name, f"tensor {key!r}", str(stored.dtype), " or ".join(_DTYPES))
    try:
        values = np.frombuffer(stored.numbers, dtype=dtype).reshape(stored.shape)
    except (ValueError, TypeError):
        raise _damaged(name, ValueError(f"lacks numbers of {key!r}")) from None
    if stored.dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    floats: NDArray[np.float32] = values.astype(np.float32)
    if not np.isfinite(floats).all():
        raise refuse(name, f"tensor {key!r}", "not finite", "finite numbers")
    return floats

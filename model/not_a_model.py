"""Folders and files that are named in place of a model, told apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from kvasir.model.adapters.config import ADAPTER_FILE
from kvasir.model.platform.files import parse_object, read_limited
from kvasir.model.platform.suggestions import nearest

_GENAI_FILE = "genai_config.json"  # of ONNX Runtime GenAI
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_ADDRESS = re.compile(r"[\w.-]+:\d+(/.*)?")
_POINTER = b"version https://git-lfs.github.com/"
_LONGEST_HEADER = 100 * 10**6  # bytes, of the format
_MOST_NAMES = 1000  # beside a path that does not exist, compared with its own
_LARGE = ("*.safetensors", "*.gguf", "*.onnx", "*.data", "tokenizer.json")


def find_mistake(source: Path) -> str | None:
    """Return in one line why a path cannot be a whole model, and the mend; None if it may be one.

    Of files only names, sizes and headers are read. Raises OSError.
    """
    if not source.exists():
        return _advice_on_missing(source)
    if source.is_file():
        if source.suffix == ".safetensors":
            return f"{source} is a file of weights alone; name its folder: {source.parent}"
        return next(_damages([source]), None)
    has_weights = any(source.glob("model*.safetensors"))
    if (source / ADAPTER_FILE).is_file() and not has_weights:
        base = _field(source / ADAPTER_FILE, "base_model_name_or_path")
        return f"{source} {of_adapter(base)}"
    if (source / _GENAI_FILE).is_file() and not has_weights:
        base = _field(source / "config.json", "_name_or_path")
        named = base if isinstance(base, str) and _HUB_ID.fullmatch(base) else "ORG/NAME"
        return (
            f"{source} is made for ONNX Runtime GenAI: its graph has weights that were fused and "
            f"rounded for that program; serve the model that it was made of: hf://{named}"
        )
    return next(_damages(path for kind in _LARGE for path in sorted(source.glob(kind))), None)


def _field(path: Path, name: str) -> object:
    """Return a field of a JSON file; None if there is none."""
    try:
        return parse_object(read_limited(path)).get(name)
    except (OSError, ValueError):
        return None


def _advice_on_missing(source: Path) -> str | None:
    kind = source.suffix  # alike in many names, so it says little
    beside = islice(source.parent.iterdir(), _MOST_NAMES) if source.parent.is_dir() else ()
    paths = {path.name.removesuffix(kind): path for path in beside}
    if near := nearest(source.name.removesuffix(kind), paths):
        return f"{source} does not exist; did you mean {paths[near]}?"
    if kind == ".gguf":
        return (
            f"{source} does not exist; name a GGUF file that is there, or one of Hugging Face's "
            f"hub: hf://ORG/NAME/{source.name}"
        )
    if _ADDRESS.fullmatch(str(source)):
        return f"{source} does not exist; a server is http://{source}"
    if _HUB_ID.fullmatch(str(source)):
        return f"{source} does not exist; a model of Hugging Face's hub is hf://{source}"
    return None


def of_adapter(base: object) -> str:
    """Return what is wrong with an adapter, for a line that begins with its name."""
    return (
        f"is a LoRA adapter of {base or 'another model'}, not a model; merge it into that with: "
        f"kvasir merge {base or 'MODEL'} ADAPTER --out DIR; or serve it beside that: kvasir serve "
        f"{base or 'MODEL'} --adapter NAME=ADAPTER"
    )


def _damages(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with path.open("rb") as file:
            begin, size = file.read(len(_POINTER)), path.stat().st_size
            if begin == _POINTER:
                yield (
                    f"{path} is a Git LFS pointer, not the file itself; fetch that with git lfs "
                    "pull, or the whole model with kvasir pull hf://ORG/NAME"
                )
            if path.suffix != ".safetensors":
                continue
            n_header = int.from_bytes(begin[:8], "little")
            if size < 8 or n_header > size - 8:
                yield f"{path} is cut off: it ends in its header; copy it again"
                continue
            if n_header > _LONGEST_HEADER:
                continue  # no safetensors file: what opens it says so
            file.seek(8)
            try:
                tensors = parse_object(file.read(n_header)).values()
                ends = (tensor["data_offsets"][1] for tensor in tensors if "data_offsets" in tensor)
                whole = 8 + n_header + max(ends, default=0)
            except (ValueError, LookupError, TypeError):
                continue
            if size < whole:
                yield f"{path} is cut off: it has {size:,} of {whole:,} bytes; copy it again"

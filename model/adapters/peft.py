"""peft's folders of adapters: what is read, and what is refused, in one line.

An adapter adds scaling · B A to a linear layer's weight, with A [r, n_in] and B [n_out, r] (Hu et
al., "LoRA", 2021). scaling is alpha / r, or alpha / √r with `use_rslora` (Kalajdzievski, 2023).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from kvasir.model.adapters.layout import Layout
from kvasir.model.platform.files import in_words, parse_object, read_limited

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 256
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MODULES = re.compile(r"\^?[\w.-]+\$?")  # of rank_pattern and alpha_pattern: a name's end
# Fields that are read here, or change nothing once an adapter is trained.
_READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_READ |= {"auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
_READ |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
_READ |= {"lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"}
# Other fields may be empty, or have these values. The ways to begin that are left out here change
# the weights of the model as well.
_ONLY: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class AdapterError(ValueError):
    """An adapter that cannot be served; one line with its name, the field, what is there."""


@dataclass(frozen=True, slots=True)
class LowRank:
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
    modules: Mapping[str, LowRank]


def read_adapter(folder: Path, name: str, layout: Layout, most_bytes: int) -> PeftAdapter:
    """Read a folder. name: in errors. Raises AdapterError for what a model cannot be given."""
    try:
        described = read_limited(folder / CONFIG_FILE)
        content = read_limited(folder / WEIGHTS_FILE, most_bytes)
    except OSError as error:
        expected = f"a folder of peft with {CONFIG_FILE} and {WEIGHTS_FILE}"
        raise _refuse(name, "folder", in_words(error), expected) from None
    try:
        config = parse_object(described)
    except ValueError as error:
        raise _refuse(name, CONFIG_FILE, f"unusable (it {error})", "peft's own") from None
    _check_config(name, config)
    sizes = {
        part.module: (part.n_out, len(layer.inputs))
        for layer in layout.layers.values()
        for part in layer.parts
    }
    found: dict[str, dict[str, NDArray[np.float32]]] = {}
    full_names: dict[str, str] = {}
    for key, tensor in _tensors(name, content).items():
        match = _KEY.fullmatch(key)
        module = "" if match is None else layout.plain_name(match[1])
        if match is None or module not in sizes:
            example = next(iter(sizes), "")
            expected = f"lora_A and lora_B of linear layers in blocks, such as {example}"
            raise _refuse(name, "tensor", repr(key), expected)
        found.setdefault(module, {})[match[2]] = _floats(name, key, tensor)
        full_names[module] = match[1]
    if not found:
        raise _refuse(name, WEIGHTS_FILE, "empty", "lora_A and lora_B of some linear layer")
    modules = {}
    for module, pair in found.items():
        rank, scaling = _rank_and_scaling(name, config, full_names[module])
        n_out, n_in = sizes[module]
        for part, shape in (("A", (rank, n_in)), ("B", (n_out, rank))):
            given = pair[part].shape if part in pair else "missing"
            if given != shape:
                raise _refuse(name, f"{module}.lora_{part}", str(given), f"shape {shape}")
        modules[module] = LowRank(pair["A"], pair["B"], scaling)
    digest = blake2b(described, digest_size=16)
    digest.update(content)
    base = config.get("base_model_name_or_path")
    return PeftAdapter(digest.digest(), base if isinstance(base, str) else None, modules)


def _refuse(name: str, field: str, found: str, expected: str) -> AdapterError:
    return AdapterError(f"adapter {name!r}: {field} is {found[:200]}; expected {expected}")


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    if "peft_type" not in config:
        raise _refuse(name, "peft_type", "missing", "'LORA'")
    for field, value in config.items():
        if field in _READ:
            continue
        allowed = _ONLY.get(field)
        if allowed is not None and not any(value is one or value == one for one in allowed):
            shown = " or ".join(map(repr, allowed))
            raise _refuse(name, field, repr(value), shown)
        if allowed is None and value not in (None, False, "", [], {}):
            raise _refuse(name, field, repr(value), "nothing: this is not computed")
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(field) or {}
        if not isinstance(patterns, dict) or not all(map(_MODULES.fullmatch, patterns)):
            raise _refuse(name, field, repr(patterns), "numbers by the ends of modules' names")


def _rank_and_scaling(name: str, config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return a module's rank, and the factor of its addition."""
    numbers = []
    for pattern, field in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        patterns = config.get(pattern) or {}
        keys = (key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", module))
        key = next(keys, None)
        value = config.get(field, 8) if key is None else patterns[key]
        if type(value) not in (int, float) or not math.isfinite(value):
            raise _refuse(name, field if key is None else pattern, repr(value), "a number")
        numbers.append(value)
    rank, alpha = numbers
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise _refuse(name, f"r of {module}", repr(rank), f"1 to {MOST_RANK}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _tensors(name: str, content: bytes) -> dict[str, dict[str, Any]]:
    try:
        return dict(deserialize(content))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise _refuse(name, WEIGHTS_FILE, f"damaged ({reason})", "a whole file") from None


def _floats(name: str, key: str, tensor: Mapping[str, Any]) -> NDArray[np.float32]:
    if (dtype := _TYPES.get(tensor["dtype"])) is None:
        raise _refuse(name, f"tensor {key!r}", tensor["dtype"], " or ".join(_TYPES))
    stored = np.frombuffer(tensor["data"], dtype=dtype)
    if tensor["dtype"] == "BF16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    values: NDArray[np.float32] = stored.astype(np.float32)
    if not np.isfinite(values).all():
        raise _refuse(name, f"tensor {key!r}", "not finite", "finite numbers")
    return values.reshape(tensor["shape"])

"""The keys and tensors of GGUF files about heads and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.families.family import Family
from kvasir.model.tensor_files import StoredTensor

FACTORS = "rope_freqs.weight"


def head_dim(kind: str, values: Mapping[str, Any]) -> int:
    """Return the channels of a head. Raises UnsupportedError for keys that do not say it."""
    names = ("attention.key_length", "embedding_length", "attention.head_count")
    given, width, heads = (values[f"{kind}.{name}"] for name in names)
    for name, size in zip(names, (given, width, heads), strict=True):
        if not (type(size) is int and size > 0) and not (size is None and size is given):
            raise UnsupportedError(f"its key {kind}.{name} must be a positive number, not {size!r}")
    length = values.get(f"{kind}.attention.value_length", given)
    if given is not None and length != given:
        raise UnsupportedError(
            f"its key {kind}.attention.value_length is {length!r}, and Kvasir computes only "
            f"the key_length, {given!r}"
        )
    return int(given or width // heads)


def rope_parameters(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_parameters, as a config.json has them."""
    width = head_dim(kind, values)
    turned = values.get(f"{kind}.rope.dimension_count", width)
    base = values.get(f"{kind}.rope.freq_base", 10000.0)
    scaling = {
        key.removeprefix(f"{kind}.rope.scaling."): value
        for key, value in values.items()
        if key.startswith(f"{kind}.rope.scaling.")
    }
    if type(turned) is not int or not 0 < turned <= width:
        raise UnsupportedError(
            f"its key {kind}.rope.dimension_count is {turned!r}, not from 1 to {width}"
        )
    if type(base) is not float or not base > 1.0:
        raise UnsupportedError(f"its key {kind}.rope.freq_base is {base!r}, not more than 1.0")
    rope: dict[str, Any] = {"rope_theta": base}
    if turned < width:  # the product with it is rounded down again
        rope["partial_rotary_factor"] = math.nextafter(turned / width, 1.0)
    rope["original_max_position_embeddings"] = scaling.get("original_context_length")
    factor = scaling.get("factor", values.get(f"{kind}.rope.scale_linear"))  # the former key
    # llama.cpp takes a factor without a type for a linear one.
    scaled = scaling.get("type", "none" if factor in (None, 0.0, 1.0) else "linear")
    if scaled != "none":
        rope |= {
            "rope_type": scaled,
            "factor": factor,
            "beta_fast": scaling.get("yarn_beta_fast"),
            "beta_slow": scaling.get("yarn_beta_slow"),
        }
    return rope


def llama3_scaling(
    values: Mapping[str, Any], family: Family, factors: StoredTensor
) -> dict[str, Any]:
    """Return the scaling of rotary positions that llama.cpp stores as a divisor of each frequency.

    Llama 3.1 and those after it differ only in the factor of the lowest frequencies.
    """
    divisors = factors.read().double().flatten()
    base, original = values["rope_parameters"]["rope_theta"], 8192
    rope = {"rope_type": "llama3", "factor": float(divisors.max())}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": original}
    turns = original * base ** -(torch.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    part = ((turns - 1.0) / 3.0).clamp(0.0, 1.0).double()  # between the lowest and the highest
    expected = 1.0 / ((1.0 - part) / rope["factor"] + part)
    if not torch.allclose(divisors, expected, rtol=1e-3) or "llama3" not in family.scalings:
        raise UnsupportedError(
            f"tensor {FACTORS!r} in {factors.file.name} does not scale rotary positions as Llama "
            "3.1 does; use the model's folder with config.json"
        )
    return rope

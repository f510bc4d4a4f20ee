"""Shapes of objects, which shapes.yaml describes: each field is asked for, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.checking import load

SHAPES = load(Path(__file__).with_suffix(".yaml"))


def misfits(value: Any, shape: Any, place: str) -> Iterator[str]:
    """Yield each place where a value does not have its shape."""
    if isinstance(shape, dict) and isinstance(value, dict):
        shapes = {name.rstrip("!"): one for name, one in shape.items()}
        needed = {name[:-1] for name in shape if name.endswith("!")}
        yield from (f"{place} has no {name}" for name in sorted(needed - value.keys()))
        for name, one in value.items():
            if name in shapes or "*" in shapes:
                yield from misfits(one, shapes.get(name, shapes.get("*")), f"{place}.{name}")
            else:
                yield f"{place}.{name} is not asked for: {one!r}"
    elif isinstance(shape, list) and isinstance(value, list) and value:
        for i, one in enumerate(value):
            found = [list(misfits(one, choice, f"{place}[{i}]")) for choice in shape]
            yield from min(found, key=len)
    elif isinstance(shape, dict | list) or not _fits(value, shape):
        yield f"{place} is {value!r} instead of {shape!r}"


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key with its value, at any depth; the entries of a list have the list's key."""
    for key, one in value.items() if isinstance(value, dict) else ():
        for entry in one if isinstance(one, list) else [one]:
            yield key, entry
            yield from walk(entry)


def _fits(value: Any, shape: Any) -> bool:
    if shape == "any":
        return True
    if shape == "int":
        return type(value) is int and value > 0
    if shape == "text":
        return isinstance(value, str) and value != ""
    if isinstance(shape, str) and shape[:1] == shape[-1:] == "/":
        return isinstance(value, str) and re.fullmatch(shape[1:-1], value) is not None
    return type(value) is type(shape) and value == shape

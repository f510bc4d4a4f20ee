"""The values of a published config.json, checked when they are read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from kvasir.model.importing.errors import UnsupportedError

_LARGEST = 2**31 - 1


def refuse(key: str, value: object, wanted: str) -> UnsupportedError:
    """Return the error for a value of config.json that the decoder does not compute."""
    return UnsupportedError(f"config.json's {key} is {value!r}, and Kvasir computes {wanted}")


def given(values: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a name; "a.b" is b in the object a.

    Raises UnsupportedError if a is something else.
    """
    outer, dot, inner = name.partition(".")
    if name in values or not dot:  # keys of GGUF files have dots
        return values.get(name, default)
    value = values.get(outer)
    if value is None:
        return default
    if not isinstance(value, Mapping):
        raise UnsupportedError(f"config.json's {outer} must be an object, not {value!r}")
    return value.get(inner, default)


class Options(dict[str, Any]):
    """The keys of config.json that a family reads, under their usual names, which are Llama's."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
        super().__init__(values)
        self.names = names  # the family's own names, which error messages use

    def whole(self, key: str, least: int = 1, most: int = _LARGEST) -> int:
        """Return a whole number. Raises UnsupportedError for another value."""
        value: Any = self[key]
        if type(value) is int and least <= value <= most:
            return value
        raise self._wrong(key, f"a whole number from {least} to {most}", value)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; null is the default. Raises UnsupportedError for another."""
        value: float | None = default if self.get(key) is None else self[key]
        if value is not None and type(value) in (int, float) and 0 < value <= sys.float_info.max:
            return value
        raise self._wrong(key, "a positive number", value)

    def same(self, key: str) -> int:
        """Return a whole number that may be listed for each layer; it must be the same in all."""
        value = self[key]
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise refuse(self.names.get(key, key), value, "the same number in all layers")
            self[key] = value[0]
        return self.whole(key)

    def layer_kinds(self, key: str, kinds: tuple[str, ...]) -> list[str] | None:
        """Return the kind of each layer; None where none are listed. Raises UnsupportedError."""
        given, n_layers = self.get(key), self.whole("num_hidden_layers")
        is_list = isinstance(given, list) and len(given) == n_layers
        if given is not None and (not is_list or any(kind not in kinds for kind in given)):
            raise refuse(key, given, f"{n_layers} layers of {' or '.join(kinds)}")
        return given

    def layers_of(self, kind: str, *others: str, key: str = "layer_types") -> tuple[int, ...]:
        """Return the layers of a kind in a key that lists those of all; none without the key."""
        kinds = self.layer_kinds(key, tuple(dict.fromkeys((kind, *others)))) or ()
        return tuple(layer for layer, own in enumerate(kinds) if own == kind)

    def layers(self, key: str) -> list[int]:
        """Return the layers that a key lists; null is none. Raises UnsupportedError."""
        listed, n_layers = self[key] or [], self.whole("num_hidden_layers")
        if not isinstance(listed, list) or not all(layer in range(n_layers) for layer in listed):
            raise refuse(key, listed, f"a list of layers from 0 to {n_layers - 1}")
        return listed

    def _wrong(self, key: str, wanted: str, value: object) -> UnsupportedError:
        name = self.names.get(key, key).partition("|")[0]
        return UnsupportedError(f"config.json's {name} must be {wanted}, not {value!r}")


def only(values: Iterable[Any]) -> str:
    """Return words for the values that a key may have."""
    return "only " + " or ".join(map(repr, values))

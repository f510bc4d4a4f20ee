"""Random satisfiable JSON schemas with every keyword that grammars enforce."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

_VALUES: tuple[Any, ...] = (
    *(0, -7, 2.5, True, False, None, "", "yes", 'quo"te\\', "ünïcode ☃"),
    *([1, "a"], {"k": [None]}, [], {}),
)
_PATTERNS = ("^[a-z]{1,5}$", "^(ab|cd)+$", r"^\d{2}-\d{2}$", "[a-m]", "^[A-Z][a-z]*(, [a-z]{2})?$")
_FORMATS = ("date", "ipv4", "ipv6", "uuid", "email")


def random_schema(chance: Random) -> Schema:
    return _any(chance, 3) if chance.random() < 0.9 else _linked(chance)


def _any(chance: Random, depth: int) -> Schema:
    branches: tuple[Callable[[Random, int], Schema], ...] = (_object, _array, _any_of)
    leaves = (_string, _integer, _number, _choice, _plain)
    return chance.choice(branches + leaves if depth else leaves)(chance, depth)


def _object(chance: Random, depth: int) -> Schema:
    names = chance.sample(
        ["id", "name", "a b", 'q"', "ключ", "x1", "tags", "on"], chance.randint(0, 5)
    )
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(chance, depth - 1) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
    }
    extra: Schema = chance.choice(
        [{"additionalProperties": False}, {"additionalProperties": {"type": "boolean"}}, {}]
    )
    return schema | extra


def _array(chance: Random, depth: int) -> Schema:
    least = chance.randint(0, 3)
    schema: Schema = {"type": "array", "items": _any(chance, depth - 1)}
    schema |= {"minItems": least, "maxItems": least + chance.randint(0, 3)}
    if chance.random() < 0.3:
        schema["prefixItems"] = [_any(chance, 0) for _ in range(2)]
    return schema


def _any_of(chance: Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth - 1) for _ in range(chance.randint(1, 4))]}


def _string(chance: Random, _depth: int) -> Schema:
    least = chance.randint(0, 4)
    bounded = {"minLength": least, "maxLength": least + chance.randint(0, 9)}
    pattern, shape = {"pattern": chance.choice(_PATTERNS)}, {"format": chance.choice(_FORMATS)}
    return {"type": "string"} | chance.choice([bounded, pattern, shape, {}])


def _integer(chance: Random, _depth: int) -> Schema:
    least = chance.randint(-2000, 2000)
    bounds = {
        "minimum": least,
        chance.choice(["maximum", "exclusiveMaximum"]): least + chance.randint(1, 3000),
    }
    return {"type": "integer"} | chance.choice([bounds, {}, {"multipleOf": chance.randint(2, 9)}])


def _number(chance: Random, _depth: int) -> Schema:
    least = round(chance.uniform(-50, 50), 3)
    most = round(least + chance.uniform(0.01, 90), 3)
    bounds = chance.choice(
        [{"minimum": least, "maximum": most}, {"exclusiveMinimum": least, "exclusiveMaximum": most}]
    )
    return {"type": "number"} | chance.choice([bounds, {}])


def _choice(chance: Random, _depth: int) -> Schema:
    values = chance.sample(_VALUES, chance.randint(1, 6))
    return chance.choice([{"enum": values}, {"const": values[0]}])


def _plain(chance: Random, _depth: int) -> Schema:
    return chance.choice(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null", "integer"]}]
    )


def _linked(chance: Random) -> Schema:
    """A linked list: references to the root."""
    link = {
        "type": "object",
        "properties": {"value": {"$ref": "#/$defs/leaf"}, "next": {"$ref": "#"}},
    }
    return link | {
        "required": ["value"],
        "additionalProperties": False,
        "$defs": {"leaf": _any(chance, 1)},
    }

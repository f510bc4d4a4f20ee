"""Bodies of the largest size, of every shape."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice

from kvasir.server.api.http.body import MOST_IN_BODY
from tests.faults.bodies import VALID, places, put

SIZE = 4 * 2**20  # the usual limit
_HERE = json.dumps("\u2620here").encode()
_CALL = b'{"function":{"name":"f","arguments":"{}"}}'
_TOOL = b'{"type":"function","function":{"name":"f"}}'

# Repeated in an array.
_ITEMS = {
    "numbers": b"1",
    "long numbers": b"1" * 4300,
    "floats": b"1.2345678901234567",
    "strings": b'"ab"',
    "arrays": b"[]",
    "objects": b"{}",
    "arrays of numbers": b"[1]",
    "deep arrays": b"[" * 100 + b"]" * 100,
    "messages": b'{"role":"user","content":"a"}',
    "parts": b'{"type":"text","text":"a"}',
    "calls": _CALL,
    "tools": _TOOL,
}
# Repeated in a string.
_PARTS = {
    "text": b"a",
    "wide text": "\U0001f600".encode(),
    "text of commas": b",",
    "text of arrays": b"[],",
    "text of quotes": rb"\"",
    "text of lines": rb"\n",
    "escapes": rb"\u00e9",
}
Place = tuple[str | int, ...]
Case = tuple[str, Place, str]
_WORST: tuple[Case, ...] = (  # a place and what fills it
    ("/v1/chat/completions", ("messages",), "numbers"),
    ("/v1/chat/completions", ("messages",), "messages"),
    ("/v1/chat/completions", ("messages", 1, "content"), "parts"),
    ("/v1/chat/completions", ("messages", 2, "tool_calls"), "calls"),
    ("/v1/chat/completions", ("tools",), "numbers"),
    ("/v1/chat/completions", ("tools", 0, "function", "parameters"), "keys"),
    ("/v1/completions", ("prompt",), "arrays of numbers"),
    ("/v1/completions", ("prompt",), "numbers"),
    ("/v1/completions", ("prompt",), "arrays"),
    ("/v1/completions", ("logit_bias",), "keys"),
    ("/v1/completions", ("unknown",), "text of commas"),
    ("/v1/completions", (), "keys"),
    ("/explain", ("layers",), "strings"),
    ("/detokenize", ("tokens",), "strings"),
    ("/detokenize", ("tokens",), "numbers"),
    ("/tokenize", ("prompt",), "text"),
)


def all_cases(n: int, chance: random.Random) -> Iterator[tuple[str, Place, str, bool]]:
    cases = _cases(chance)
    return islice(((*case, fits) for case in cases for fits in (False, True)), n)


def _cases(chance: random.Random) -> Iterator[Case]:
    yield from _WORST
    shapes = [*_ITEMS, *_PARTS, "keys", "opened arrays", "digits"]
    while True:
        path = chance.choice(list(VALID))
        place = chance.choice([(), ("unknown",), *places(VALID[path])])
        yield path, place, chance.choice(shapes)


def body_of(path: str, place: Place, shape: str, fits: bool) -> bytes:
    outside = json.dumps(put(VALID[path], place, json.loads(_HERE))).encode()
    room = SIZE - len(outside)
    if shape == "keys" and fits:
        room = min(room, 13 * (MOST_IN_BODY[0][2] // 2 - 100))
    if shape not in _ITEMS:
        return outside.replace(_HERE, _value(shape, room))
    item = _ITEMS[shape] + b","
    n = (room - 2) // len(item)
    for _, marks, most in MOST_IN_BODY if fits else ():
        in_item, in_rest = (sum(map(text.count, marks)) for text in (item, outside))
        n = min(n, (most - in_rest - 1) // in_item) if in_item else n
    return outside.replace(_HERE, b"[" + (item * n)[:-1] + b"]")


def _value(shape: str, room: int) -> bytes:
    """Return a value of this length that is no array of equal items."""
    if shape == "keys":
        return b"{" + b",".join(b'"k%07d":1' % i for i in range(room // 13)) + b"}"
    if shape == "opened arrays":
        return b"[" * room
    if shape == "digits":
        return b"1" * room
    part = _PARTS[shape]
    return b'"' + part * ((room - 2) // len(part)) + b'"'

"""Request bodies that no client should send: damaged valid ones, and bytes that are not JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}},
    "required": ["a"],
}
_JSON_SCHEMA = {"name": "s", "schema": _SCHEMA, "strict": True}
_FUNCTION = {"name": "f", "parameters": _SCHEMA, "strict": True}
_CALL = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
_COMMON: dict[str, Any] = {
    "model": "fake-model", "stream": True, "stream_options": {"include_usage": True}, "n": 2,
    "timeout_ms": 60_000,
}  # fmt: skip
_TGI = {
    "max_new_tokens": 3, "top_n_tokens": 2, "stop": ["stop"], "seed": 1, "temperature": 0.5,
    "min_tokens": 1, "timeout_ms": 60_000, "ignore_eos": True,
}  # fmt: skip
_DETAILS = {"details": True, "decoder_input_details": True, "return_full_text": True}

_ENCODER = {
    "model": "fake-model", "truncate": True, "truncate_prompt_tokens": 20,
    "truncation_direction": "left", "timeout_ms": 60_000, "priority": 1, "user": "somebody",
}  # fmt: skip

_OLLAMA: dict[str, Any] = {
    "model": "fake-model", "stream": True, "keep_alive": "5m",
    "options": {"num_predict": 5, "seed": 1, "top_k": 5, "stop": ["stop"], "num_ctx": 9},
}  # fmt: skip

_MESSAGES: dict[str, Any] = {
    "model": "fake-model", "system": "be brief",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "def"}]}],
    "tools": [{"name": "f", "input_schema": _SCHEMA}],
}  # fmt: skip

# By route, a valid body with as many fields as go together.
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": _COMMON | {
        "prompt": "def read", "max_tokens": 3, "echo": True, "logprobs": 2, "temperature": 0.5,
        "top_p": 0.9, "top_k": 5, "min_p": 0.01, "typical_p": 0.9, "seed": 1,
        "stop": ["stop", "end"], "stop_token_ids": [7], "logit_bias": {"5": 1.5},
        "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1,
        "truncate_prompt_tokens": 20, "user": "somebody",
        "response_format": {"type": "json_schema", "json_schema": _JSON_SCHEMA},
    },
    "/v1/chat/completions": _COMMON | {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "def"}], "name": "me"},
            {"role": "assistant", "tool_calls": [_CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2,
        "max_completion_tokens": 5, "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True, "seed": 1,
    },
    "/v1/responses": {
        "model": "fake-model", "input": [{"role": "user", "content": "def"}], "stream": True,
        "instructions": "be brief", "max_output_tokens": 5, "temperature": 0, "top_p": 0.9,
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}],
        "store": False, "metadata": {"a": "b"}, "timeout_ms": 60_000,
    },
    "/v1/messages": _MESSAGES | {
        "max_tokens": 5, "stream": True, "stop_sequences": ["stop"], "temperature": 0,
        "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": _MESSAGES,
    "/generate": {"inputs": "def read", "parameters": _TGI | _DETAILS | {"truncate": 20}},
    "/generate_stream": {"inputs": "def read", "parameters": _TGI},
    "/": {"inputs": "def read", "parameters": _TGI, "stream": True},
    "/tokenize": {
        "model": "fake-model", "prompt": "def read", "add_special_tokens": True,
        "return_token_strs": True,
    },
    "/detokenize": {"model": "fake-model", "tokens": [5, 6, 7]},
    "/v1/embeddings": _ENCODER | {
        "input": ["def", "read"], "encoding_format": "base64", "dimensions": 3,
        "prompt_name": "query",
    },
    "/embed": _ENCODER | {"inputs": "def", "normalize": True, "prompt_name": "query"},
    "/embed_all": _ENCODER | {"inputs": [[5, 6], [7]]},
    "/similarity": {
        "model": "fake-model",
        "inputs": {"source_sentence": "def", "sentences": ["read", "x"]},
        "parameters": {"truncate": True, "prompt_name": "query"},
    },
    "/rerank": _ENCODER | {
        "query": "def", "texts": ["read", "x"], "raw_scores": True, "return_text": True,
    },
    "/predict": _ENCODER | {"inputs": [["def", "read"], ["x"]], "raw_scores": False},
    "/v1/rerank": _ENCODER | {
        "query": "def", "documents": ["read", "x"], "top_n": 1, "return_documents": False,
    },
    "/v2/rerank": _ENCODER | {"query": "def", "documents": [{"text": "read"}, {"text": "x"}]},
    "/v1/classify": _ENCODER | {"input": ["def", "read"]},
    "/classify": _ENCODER | {"input": "def"},
    "/v1/score": _ENCODER | {"text_1": "def", "text_2": ["read", "x"]},
    "/score": _ENCODER | {"text_1": ["def", "x"], "text_2": ["read", "x"]},
    "/pooling": _ENCODER | {"input": ["def", "read"], "encoding_format": "base64"},
    "/v2/embed": {
        "model": "fake-model", "texts": ["def", "read"], "input_type": "search_query",
        "embedding_types": ["float", "binary"], "output_dimension": 8, "truncate": "END",
        "max_tokens": 20, "timeout_ms": 60_000, "priority": 1,
    },
    "/v1/embed": {"model": "fake-model", "texts": ["def", "read"], "input_type": "search_query"},
    "/api/chat": _OLLAMA | {
        "messages": [
            {"role": "user", "content": "def", "images": []},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "2", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}], "think": False,
        "logprobs": True, "top_logprobs": 2,
    },
    "/api/generate": _OLLAMA | {"prompt": "def", "raw": True, "format": _SCHEMA, "system": ""},
    "/api/show": {"model": "fake-model", "verbose": True},
    "/api/embed": {
        "model": "fake-model", "input": ["def", "read"], "truncate": True, "dimensions": 3,
        "keep_alive": "5m", "options": {"num_ctx": 9},
    },
    "/api/embeddings": {"model": "fake-model", "prompt": "def"},
    "/explain": {
        "model": "fake-model", "text": "def read", "layers": [0], "heads": [0], "top_k": 3,
        "position": 0, "without": [{"layer": 0, "head": 0}], "lens": 1, "entropies": True,
        "head_values": {"layer": 0, "head": 0},
    },
}  # fmt: skip

OF_ENCODERS = frozenset({
    "/v1/embeddings", "/embed", "/embed_all", "/similarity", "/rerank", "/predict", "/v1/rerank",
    "/v2/rerank", "/v1/classify", "/classify", "/v1/score", "/score", "/pooling", "/v2/embed",
    "/v1/embed", "/api/embed", "/api/embeddings",
})  # fmt: skip

_NUMBERS = (
    0, 1, -1, 0.1, -0.0, 300, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**400, 1e308, -1e308,
    5e-324,
)  # fmt: skip
_TEXTS = (
    "", "x", "\0\1\x1f\x7f", "\ud800", "\udfff\ud800", "\ufffe\u202e", "\U0001f600", "{{x}}",
    "{%", "x" * 5000,
)  # fmt: skip
_GRAMMARS = ("[", "((a*)*)*b", "a{0,99999}", "start: start", "start: /a/ start | start")
_LISTS: tuple[Any, ...] = (
    [], [[]], [None], [-1], [300], [2**40], [1, 2, 3], [[1], [2]], [[300]], ["a"] * 20, [1, "a"],
)  # fmt: skip
_OBJECTS: tuple[Any, ...] = (
    {}, {"": None}, {"type": "json_object"}, {"$ref": "#"}, {"role": "user", "content": "x"},
)  # fmt: skip
_VALUES = (None, True, False, *_NUMBERS, *_TEXTS, *_GRAMMARS, *_LISTS, *_OBJECTS)
_RAW = (
    b"NaN", b"-Infinity", b"1e999", b"01", b"0x1", b'"\xff"', b'"\xed\xa0\x80"', b'"\n"', b"", b",",
    b"[" * 300,
)  # fmt: skip
_HERE = "\u2620here"  # replaced by raw bytes

Make = Callable[[random.Random, dict[str, Any]], bytes]


def wrong_types(valid: dict[str, Any], names: set[str]) -> Iterator[bytes]:
    """Yield a valid body with each hostile value in each place and in each named field."""
    for place in [*places(valid), *((name,) for name in sorted(names - valid.keys()))]:
        for value in _VALUES:
            yield json.dumps(put(valid, place, value)).encode()
        encoded = json.dumps(put(valid, place, _HERE)).encode()
        for raw in _RAW:
            yield encoded.replace(json.dumps(_HERE).encode(), raw)


def random_body(chance: random.Random, valid: dict[str, Any]) -> bytes:
    """Make a body of one of the other kinds."""
    kinds: dict[Make, float] = {_noise: 2, _deep: 1, _damaged: 6, _several: 6, _grown: 0.2}
    (make,) = chance.choices(list(kinds), list(kinds.values()))
    return make(chance, valid)


def _noise(chance: random.Random, _valid: dict[str, Any]) -> bytes:
    return chance.randbytes(chance.randrange(200))


def _deep(chance: random.Random, _valid: dict[str, Any]) -> bytes:
    depth = chance.choice((10, 100, 1000, 100_000))
    opening, closing = chance.choice(
        ((b"[", b"]"), (b'{"prompt":', b"}"), (b'{"parameters":', b"}"))
    )
    return opening * depth + b"1" + closing * chance.choice((0, depth))


def _damaged(chance: random.Random, valid: dict[str, Any]) -> bytes:
    """Change a few bytes of a valid body."""
    body = bytearray(json.dumps(valid).encode())
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(body) + 1)
        span = body[at : at + chance.randint(1, 12)]
        new = chance.choice((b"", bytes(span) * 2, chance.randbytes(1), chance.choice(_RAW)))
        body[at : at + len(span)] = new
    return bytes(body)


def _several(chance: random.Random, valid: dict[str, Any]) -> bytes:
    """Put hostile values in a few places of a valid body."""
    body: Any = valid
    for place in chance.sample(places(valid), min(3, len(places(valid)))):
        body = put(body, place, chance.choice(_VALUES))
    return json.dumps(body).encode()


def _grown(chance: random.Random, valid: dict[str, Any]) -> bytes:
    """Put a megabyte in one place."""
    million = 10**6
    entries = {str(i): i for i in range(million // 16)}
    value = chance.choice(("x" * million, "\ud800" * (million // 6), [1] * (million // 3), entries))
    return json.dumps(put(valid, chance.choice(places(valid)), value)).encode()


def places(value: Any) -> list[tuple[str | int, ...]]:
    """Return the paths of everything inside."""
    if not isinstance(value, dict | list):
        return []
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        path
        for key, inner in items
        for path in [(key,), *((key, *deeper) for deeper in places(inner))]
    ]


def put(body: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy with a value in a place, or an equal copy if the place no longer exists."""
    if not place:
        return value
    first, rest = place[0], place[1:]
    if isinstance(body, dict):
        return {**body, first: put(body.get(first), rest, value)}
    if isinstance(body, list) and isinstance(first, int) and first < len(body):
        return [*body[:first], put(body[first], rest, value), *body[first + 1 :]]
    return body

"""Bodies that are refused: with 400, naming the field, and in the dialect of the route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kvasir.server.api.http import body as body_parsing
from kvasir.server.api.http.pieces import compact
from kvasir.server.api.openai.batches import BatchBody
from kvasir.server.api.routes import ROUTES
from kvasir.server.errors import InvalidRequestError
from tests.api_reference import body_type
from tests.faults.bodies import VALID
from tests.kit.dialects import GENERATE, GENERATE_STREAM, MESSAGES, RESPONSES, post
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, serving

LONG = "x" * 5000
# One of each kind: `test_openapi.py` sends all that the fields' schemas forbid, and
# `test_api_docs.py` compares their bounds with the documented ones.
COMPLETION: dict[str, Any] = {"prompt": "a"}
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 2, "n_predict": 2}, "n_predict"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"n": 17}, "n"),
    ({"stop": [""]}, "stop.0"),
    ({"seed": 2**64}, "seed"),
    ({"regex": "("}, "regex"),
    ({"grammar": "start: A"}, "grammar"),
    ({"response_format": {"type": "json"}}, "response_format.type"),
    ({"priority": -7}, "priority"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"ebnf": "root ::= missing"}, "ebnf"),
    ({"ebnf": 'root ::= "\\'}, "ebnf"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"tools": [{}]}, "tools"),
    ({"suffix": "x"}, "suffix"),
    ({"no_such_field": 1}, "no_such_field"),
]


def tool(schema: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema or {"type": "object"}, **more}
    return {"type": "function", "function": function}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def form(kind: str, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **more}}


CALLS = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
NAMED = {"name": "f"}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"pattern": "("}}}
CALL = {"tools": [tool()], "tool_choice": "required"}
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    (user(1), "messages.0.content"),
    (user([{"type": "image_url", "image_url": {}}]), "messages.0.content"),
    (user([{"type": "text", "text": 1}]), "messages.0.content.0.text"),
    (user([{"text": "x"}]), "messages.0.content.0.type"),
    (user("x", tool_calls=CALLS), "messages.0"),
    (user(LONG), "messages"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool({"type": "string"})]}, "tools.0.function.parameters"),
    ({"tools": [tool(BAD_SCHEMA)], "tool_choice": "required"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": ["auto"]}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"function": {}}}, "tool_choice.function.name"),
    ({"tools": [tool()], "tool_choice": {"type": "f", "function": NAMED}}, "tool_choice.type"),
    (
        {"tools": [tool()], "tool_choice": {"NamedTool": 1, "function": NAMED}},
        "tool_choice.NamedTool",
    ),
    ({"tools": [tool()], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
    (
        {
            "tools": [tool()],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "g"}}]},
            },
        },
        "tool_choice",
    ),
    (form("json", value=1), "response_format.value"),
    (form("json_object", value="{"), "response_format.value"),
    (form("json_schema", value={"str": {}}), "response_format.value.schema"),
    (form("regex", value={}), "response_format.value"),
    (form("text", value="x"), "response_format"),
    (form("json_schema", json_schema={"name": "x"}), "response_format.json_schema.schema"),
    (form("text", schema={}), "response_format"),
    (
        form("json_schema", json_schema={"name": 1, "schema": {}}),
        "response_format.json_schema.name",
    ),
    (CALL | {"regex": "a"}, "regex"),
    ({"tools": [tool()], "regex": "a"}, "regex"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    (
        {"messages": [{"role": "assistant", "tool_calls": CALLS}], "continue_final_message": True},
        "messages",
    ),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"functions": [{}]}, "functions"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"modalities": ["text", "audio"]}, "modalities"),
]
TOKENS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    (user("a") | {"prompt": "a"}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "a", "inputs": "b"}, "prompt"),
    ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ({"prompt": [1, 2]}, "prompt"),
]
TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": [5, 300]}, "tokens"),
    ({"tokens": [-1]}, "tokens.0"),
    ({"tokens": "5"}, "tokens"),
]


@pytest.mark.parametrize(
    ("path", "base", "refused"),
    [
        ("/v1/completions", COMPLETION, COMPLETIONS),
        ("/v1/chat/completions", user("Weather?"), CHATS),
        ("/tokenize", {}, TOKENS),
        ("/detokenize", {}, TEXTS),
    ],
)
async def test_a_bad_field_is_named(
    path: str, base: dict[str, Any], refused: list[tuple[dict[str, Any], str]]
) -> None:
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=256)) as served:
        for change, param in refused:
            response = await served.client.post(path, json=base | change)
            assert response.status_code == 400, (change, response.text)
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), change
            is_too_long = error["code"] == "context_length_exceeded"
            assert param.partition(".")[0] in error["message"] or is_too_long, change


def parameters(**values: Any) -> dict[str, Any]:
    return {"parameters": values}


PIXEL = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": PIXEL}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
USED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
TGI: list[tuple[dict[str, Any], str]] = [
    ({"inputs": None}, "inputs"),
    ({"inputs": 1}, "inputs"),
    ({"inputs": ""}, "prompt"),
    ({"stream": True}, "stream"),
    ({"parameters": []}, "parameters"),
    (parameters(max_new_tokens=0), "parameters.max_new_tokens"),
    (parameters(stop_token_ids=[VOCAB_SIZE]), "parameters.stop_token_ids"),
    (parameters(logit_bias={str(VOCAB_SIZE): 1}), "parameters.logit_bias"),
    (parameters(grammar={"type": "json"}), "parameters.grammar.value"),
    (parameters(grammar={"type": "regex", "value": "("}), "parameters.grammar"),
    (parameters(grammar={"type": "json", "value": "[1]"}), "parameters.grammar"),
    (parameters(grammar={"type": "lark", "value": "a"}), "parameters.grammar"),
    (parameters(best_of=2), "parameters.best_of"),
    (parameters(watermark=True), "parameters.watermark"),
    (parameters(max_new_tokens=64), "64 tokens"),
]
WRONG_SCHEMA = {"type": "json_schema", "schema": {"type": "strin"}}
BY_MESSAGE: dict[str, list[tuple[dict[str, Any], str]]] = {  # by what a message names
    GENERATE: TGI,
    GENERATE_STREAM: [*TGI, (parameters(decoder_input_details=True), "decoder_input_details")],
    MESSAGES: [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server"),
        ({"messages": [{"role": "user", "content": [USED]}]}, "tool_use"),
        ({"messages": [{"role": "assistant", "content": [USED]}]}, "continue"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "input_schema"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool"),
        ({"output_config": {"format": WRONG_SCHEMA}}, "output_config.format: "),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"system": LONG}, "prompt is too long"),
    ],
    RESPONSES: [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "custom"),
        ({"tool_choice": {"type": "file_search"}}, "file_search"),
        ({"tool_choice": "sometimes"}, "sometimes"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "'f'"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "file_search_call.results"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ({"input": [{"type": "mcp_call", "id": "a"}]}, "mcp_call"),
        ({"input": [{"type": ["message"]}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "arguments"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"text": {"format": WRONG_SCHEMA | {"name": "a"}}}, "text.format: "),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_output_tokens": 10**6}, "context"),
        ({"n": 2}, "'n'"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": "x" * 2**17}}, "metadata"),
        ({"max_tokens": 5}, "use max_output_tokens"),
    ],
}


@pytest.mark.parametrize("path", BY_MESSAGE)
async def test_a_message_names_what_is_wrong(path: str) -> None:
    """In the form of the dialect."""
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=64)) as served:
        for change, named in BY_MESSAGE[path]:
            answer = await post(served, path, status=400, **change)
            if path in (GENERATE, GENERATE_STREAM):
                assert answer["error_type"] == "validation"
                message = answer["error"]
            else:
                assert answer["error"]["type"] == "invalid_request_error"
                message = answer["error"]["message"]
            assert named in message, change


async def test_a_body_that_makes_no_sense_is_a_400() -> None:
    async with serving() as served:
        for raw in (
            b"",
            b"{",
            b"[]",
            b'"text"',
            b"null",
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "\xff"}',
            b'{"prompt": "a\x00b"}',
            b'{"prompt": "a", "temperature": NaN}',
            b'{"prompt": "a", "temperature": Infinity}',
            b'{"prompt": "a", "temperature": 1e999}',
            b'{"prompt": "a", "metadata": {"a": NaN}}',
            b'{"prompt": "a", "max_tokens": ' + b"9" * 6000 + b"}",
            b"[" * 10_000,
            b'{"prompt": "a", "stream_options": {"include_usage": true}}',
            b'{"prompt": "a", "stream": true, "stream_options": {"continuous_usage_stats": true}}',
            b'{"prompt": "a", "stream": true, "stream_options": {"usage": true}}',
            b'{"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}',
        ):
            response = await served.client.post("/v1/completions", content=raw)
            assert response.status_code == 400, raw[:99]
            assert response.json()["error"]["message"]


def counts(value: Any) -> list[int]:
    """Return the counts that MOST_IN_BODY limits."""
    if isinstance(value, str):
        return [2, 0, 0, 0]
    if not isinstance(value, dict | list):
        return [0, 0, 0, sum(map(json.dumps(value).count, ".e"))]
    items = [*value, *value.values()] if isinstance(value, dict) else value
    own = [0, max(0, len(value) - 1), 1, 0]
    return [sum(column) for column in zip(own, *map(counts, items), strict=True)]


MARKED = st.text(st.sampled_from('"\\\\,[{}]: a\n\u2603'), max_size=9)
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | MARKED,
    lambda inner: st.lists(inner) | st.dictionaries(MARKED, inner),
)


@settings(max_examples=40)
@given(JSON_VALUES, st.integers(0, 3), st.integers(-1, 1), st.booleans())
def test_what_a_body_holds_is_counted_outside_strings(
    value: Any, which: int, change: int, is_ascii: bool
) -> None:
    name, marks, _ = body_parsing.MOST_IN_BODY[which]
    count = counts(value)[which]
    limits = [(other, its_marks, 10**9) for other, its_marks, _ in body_parsing.MOST_IN_BODY]
    limits[which] = (name, marks, count + change)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_parsing, "MOST_IN_BODY", tuple(limits))
        raw = json.dumps(value, ensure_ascii=is_ascii).encode()
        if change >= 0:
            body_parsing.check_amount(raw)
        else:
            with pytest.raises(
                InvalidRequestError, match=f"{count} {name}, more than {count - 1};"
            ):
                body_parsing.check_amount(raw)


def test_long_numbers_are_refused_outside_strings() -> None:
    for text in ("1" * 400, '"' + "1" * 5000 + '"', '"\\"' + "1" * 401 + '"'):
        body_parsing.check_amount(f'{{"a": [{text}, 1.5]}}'.encode())
    for text in ("1" * 401, "-" + "1" * 5000, "0." + "1" * 401, '"1", ' + "1" * 401):
        with pytest.raises(InvalidRequestError, match="has a number of more than 400 digits;"):
            body_parsing.check_amount(f'{{"a": [{text}]}}'.encode())


async def test_a_message_quotes_little_of_a_body() -> None:
    async with serving() as served:
        for body in ({"prompt": "a", "x" * 50_000: 1}, {"prompt": "a", "model": "y" * 50_000}):
            response = await served.client.post("/v1/completions", json=body)
            assert response.status_code in (400, 404)
            assert len(response.content) < 5000


async def test_prompts_of_many_token_ids_are_parsed() -> None:
    ids = [65] * 131_072
    async with serving(FakeRunner(VOCAB_SIZE)) as served:
        response = await served.client.post("/v1/completions", json={"prompt": ids})
    assert "the prompt has 131072" in response.json()["error"]["message"]


async def test_a_refusal_names_the_equivalent() -> None:
    """A field of another server by its name here, and the route that a path may mean."""
    async with serving(FakeRunner(VOCAB_SIZE)) as served:
        for name, here in (("max_new_tokens", "max_tokens"), ("num_predict", "max_tokens")):
            response = await served.client.post("/v1/completions", json={"prompt": "a", name: 1})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
            assert here in response.json()["error"]["message"]
        response = await served.client.post("/v1/chat/completion", json={})
        assert response.status_code == 404
        assert "/v1/chat/completions" in response.json()["error"]["message"]
        response = await served.client.post("/somewhere/else", json={})
        assert "did you mean" not in response.json()["error"]["message"]


async def test_a_refusal_lists_the_values_that_are_allowed() -> None:
    """Each field of a body that takes only some values, and each that may ask for nothing."""
    async with serving(FakeRunner(VOCAB_SIZE)) as served:
        n_fields = 0
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            (route,) = (one for one in ROUTES if one.path == path)
            for name, field in TypeAdapter(body_type(route)).json_schema()["properties"].items():
                parts = [] if field is True else field.get("anyOf", [field])
                allowed = [
                    value
                    for part in parts
                    for value in part.get("enum", [part["const"]] if "const" in part else [])
                ]
                if not allowed or any(part.get("type") == "object" for part in parts):
                    continue
                n_fields += 1
                body = VALID[path] | {name: "no-such-value"}
                response = await served.client.post(path, json=body)
                message = response.json()["error"]["message"]
                assert response.status_code == 400
                for value in set(map(compact, allowed)) - {"null"}:
                    known = value.strip('"')
                    assert known in message or known.title() in message, (path, name, message)
    assert n_fields > 70


NEAR: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "max_tokenz": 1}, "max_tokens"),
    ("/v1/completions", {"promt": "a"}, "prompt"),
    ("/v1/completions", {"prompt": "a", "repetition_penality": 1}, "repetition_penalty"),
    ("/v1/messages", {**VALID["/v1/messages"], "sistem": "a"}, "system"),
    (
        "/v1/completions",
        {"prompt": "a", "stream": True, "stream_options": {"include_usge": True}},
        "include_usage",
    ),
    ("/explain", {"text": "a", "without": [{"layers": 0, "head": 0}]}, "layer"),
]


async def test_the_nearest_known_field_is_suggested() -> None:
    async with serving() as served:
        for path, body, suggestion in NEAR:
            response = await served.client.post(path, json=body)
            assert response.status_code == 400
            assert f"did you mean '{suggestion}'?" in response.json()["error"]["message"]


def lists_and_objects(schema: Any, holder: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the parts of a core schema that may have many entries, with the type of the holder."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            yield schema, holder
        holder = schema.get("type", holder)
        schema = [part for name, part in schema.items() if "json_schema" not in name]
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from lists_and_objects(part, holder)


def test_of_many_wrong_entries_one_is_reported() -> None:
    """A body may have hundreds of thousands, and to report them all stops every stream."""
    hints = (get_type_hints(route.endpoint, include_extras=True) for route in ROUTES)
    for kind in (BatchBody, *filter(None, (of_route.get("body") for of_route in hints))):
        for part, holder in lists_and_objects(TypeAdapter(kind).core_schema):
            if part["type"] == "list":
                assert part.get("fail_fast") or part.get("max_length"), (kind, part)
            elif part.get("values_schema", {"type": "any"})["type"] != "any":
                assert holder == "function-before", (kind, part)

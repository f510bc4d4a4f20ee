"""The OpenAPI document describes every route, and every answer that schemathesis gets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import schemathesis.pytest
from hypothesis import HealthCheck, settings
from pydantic import TypeAdapter
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    missing_required_header,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from kvasir.server.api import routes
from kvasir.server.api.openai.responses.schemas import LOGPROBS
from kvasir.server.api.routes import ROUTES, document
from tests.kit.dialects import parsed
from tests.kit.fake_encoder import encoder_app, encoder_model_dir
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.live import KEY, Live, live, live_app
from tests.kit.serving import VOCAB_SIZE, fake_app

Fields = dict[str, Any]

# Without positive_data_acceptance: a body that fits its schema may still be too long for the model,
# or name tokens that it lacks.
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    missing_required_header,
    unsupported_method,
    allow_header_conformance,
]
TASKS = {one.path_format: (getattr(one, "tasks", ()) or ("generate",))[0] for one in ROUTES}
# A field that several objects of requests have is read by one piece of code, and schemathesis sends
# each a dozen times: this object is tested first, the others with fields that are new. What asks
# for nothing has no title, and one name stands for all whose schema is the same.
FIRST = "CompletionsBody"
OF_ALL = {"suffix", "user"}  # a field of other servers of each kind


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    """The document of a server that answers batches too."""
    batches = tmp_path_factory.mktemp("batches")
    app = fake_app(FakeRunner(VOCAB_SIZE), api_key=KEY, batch_dir=batches)
    app.state.batches.store.close()
    return document(app)


@pytest.fixture(scope="module")
def api(described: Fields) -> BaseSchema:
    schemas, seen = dict(described["components"]["schemas"]), set[str]()
    for name in dict.fromkeys((FIRST, *schemas)):
        schema = schemas[name]
        if schema.get("additionalProperties") == {"type": "null"}:  # of a request
            needed, new = OF_ALL.union(schema.get("required", ())), {}
            for field, about in schema["properties"].items():
                key = json.dumps([field, about] if {"title", "$ref"} & about.keys() else about)
                if field in needed or key not in seen:
                    new[field] = about
                seen.add(key)
            schemas[name] = schema | {"properties": new}
    short = described | {"components": described["components"] | {"schemas": schemas}}
    return schemathesis.openapi.from_dict(short)


# schemathesis takes seconds for the bodies: every worker that collects this file would make them.
operations = schemathesis.pytest.from_fixture("api")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    batches = tmp_path_factory.mktemp("batches")
    with live(FakeRunner(VOCAB_SIZE, max_model_len=256), batch_dir=batches) as started:
        yield started


@pytest.fixture(scope="module")
def servers(server: Live) -> Iterator[dict[str, Live]]:
    """A server of each task."""
    with ExitStack() as stack:
        started = {"generate": server}
        for task, labels in (("embed", ()), ("classify", ("relevant",))):
            app, _ = encoder_app(encoder_model_dir(labels, max_model_len=256), api_key=KEY)
            started[task] = stack.enter_context(live_app(app))
        yield started


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as kept:
        kept.trust_env = False  # or it looks for proxies before each of thousands of requests
        yield kept


@pytest.fixture
def _named(request: pytest.FixtureRequest) -> None:
    request.node._nodeid = request.node.nodeid  # schemathesis 4.32 reads pytest 9.1's name of it


@pytest.mark.usefixtures("_named")
@operations.parametrize()
@settings(max_examples=4, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(
    case: schemathesis.Case[Any], servers: dict[str, Live], session: requests.Session
) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    response = case.call_and_validate(
        base_url=servers[TASKS[case.path]].url,
        session=session,
        headers=key,
        checks=CHECKS,
        timeout=TIMEOUT,
    )
    assert (
        response.status_code < 500 or response.status_code == 504
    )  # for a deadline of a millisecond


def test_names_are_those_of_a_programs_identifiers(described: Fields) -> None:
    """Clients generated from the document are named by them, and know no schema `true`."""
    operations = [one for path in described["paths"].values() for one in path.values()]
    for names in (
        [one["operationId"] for one in operations],
        [*described["components"]["schemas"]],
    ):
        assert all(re.fullmatch("[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*", name) for name in names)
        assert len({name.lower() for name in names}) == len(names)
    assert not re.search("server__|-Input|-Output", json.dumps(described))
    for name, schema in described["components"]["schemas"].items():
        assert schema.get("title", name) == name
        for one in schema.get("properties", {}).values():
            assert not isinstance(one.get("default"), dict)
            assert not any(isinstance(value, dict | list) for value in one.get("enum", ()))
            for enum in (kind.get("enum", ()) for kind in one.get("anyOf", [one])):
                assert len({str(value).lower() for value in enum}) == len(enum)
    wanted = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert {*re.findall(r'"(#/[^"]*)"', json.dumps(described))} <= wanted


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/completions", "CompletionsBody", {"prompt": "a"}),
        ("/v1/chat/completions", "ChatBody", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", "ResponsesBody", {"input": "a"}),
    ],
)
def test_a_client_may_send_every_default(
    path: str, name: str, body: Fields, server: Live, described: Fields
) -> None:
    properties = described["components"]["schemas"][name]["properties"]
    defaults = {key: one["default"] for key, one in properties.items() if "default" in one}
    with server.http() as client:
        response = client.post(path, json=defaults | body)
    assert response.status_code == 200, response.text


def test_all_but_open_routes_want_a_key(
    server: Live, session: requests.Session, described: Fields
) -> None:
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            response = session.request(method, server.url + re.sub("{.*?}", "x", path))
            is_open = not operation["security"]
            assert (response.status_code != 401) is is_open, (method, path)
            assert ("401" in operation["responses"]) is not is_open


CHAT = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "strict": True}}
FUNCTION = {"type": "function", "name": "f"}
REQUIRED = {"tool_choice": "required"}
LONG = {"ignore_eos": True}  # a stream of one token would show no event but the last
ANTHROPIC: Fields = {
    "messages": CHAT,
    "max_tokens": 9,
    "tools": [{"name": "f", "input_schema": {}}],
}
FULL: dict[str, list[Fields]] = {
    "/v1/completions": [
        {"prompt": ["ab", "c"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 3},
        LONG | {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}},
        LONG | {"prompt": "ab", "stream": True, "echo": True, "logprobs": 0},
        {"prompt": "ab", "prompt_logprobs": 2, "best_of": 3, "max_tokens": 3},
    ],
    "/v1/chat/completions": [
        {"messages": CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 9},
        {"messages": CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        {"messages": CHAT, "tools": [TOOL], "tool_choice": "required", "stream": True},
        LONG | {"messages": CHAT, "stream": True, "logprobs": True, "max_tokens": 5},
        {"messages": CHAT, "prompt_logprobs": 0, "max_tokens": 3},
    ],
    "/v1/responses": [
        {"input": "ab", "tools": [FUNCTION], "tool_choice": "required"},
        {"input": CHAT, "include": [LOGPROBS], "top_logprobs": 2},
        {"input": "ab", "tools": [FUNCTION], "stream": True, **REQUIRED},
        LONG | {"input": "ab", "stream": True, "include": [LOGPROBS]},
    ],
    "/v1/messages": [
        ANTHROPIC | {"thinking": {"type": "enabled"}},
        ANTHROPIC | {"tool_choice": {"type": "any"}, "max_tokens": 60},
        ANTHROPIC | {"tool_choice": {"type": "any"}, "stream": True},
        ANTHROPIC | LONG | {"stream": True},
    ],
    "/v1/messages/count_tokens": [{"messages": CHAT}],
    "/generate": [
        {"inputs": "ab", "parameters": {"details": True, "decoder_input_details": True}},
        {"inputs": "ab", "parameters": {"details": True, "top_n_tokens": 2, "seed": 1, "top_k": 5}},
        {"inputs": "ab", "parameters": {"best_of": 2, "do_sample": True, "details": True}},
    ],
    "/generate_stream": [
        {"inputs": "ab", "parameters": LONG | {"top_n_tokens": 2, "do_sample": True}}
    ],
    "/": [{"inputs": "ab", "parameters": LONG, "stream": True}, {"inputs": "ab"}],
    "/tokenize": [
        {"prompt": "naïve ☃", "return_token_strs": True},
        {"messages": [{"role": "user", "content": "a"}]},
        {"inputs": "naïve ☃"},
    ],
}


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in FULL.items() for body in bodies]
)
def test_full_answers_are_as_described(path: str, body: Fields, server: Live) -> None:
    """Answers with every optional part fit the types that the document is made of."""
    route = next(one for one in ROUTES if one.path == path and "POST" in (one.methods or ()))
    with server.http() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        TypeAdapter(route.response_model).validate_json(response.content)
    else:
        assert len(parsed(path, response.text)) > 1


def test_keys_and_root_path_are_in_the_document(server: Live, described: Fields) -> None:
    with server.http() as client:
        assert client.get("/openapi.json").json() == described
    other = document(fake_app(FakeRunner(VOCAB_SIZE), root_path="/llm"))
    assert other["paths"]["/version"]["get"]["security"] == []
    assert other["servers"] == [{"url": "/llm"}]


def test_requests_at_once_make_the_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second of CPU time, and a flood of requests would make it in 40 threads."""
    app = fake_app(FakeRunner(VOCAB_SIZE))
    request: Any = SimpleNamespace(app=app)
    made, make = list[Thread](), routes.get_openapi  # type: ignore[attr-defined]

    def counted(**fields: Any) -> Fields:
        made.append(Thread(target=routes.openapi, args=(request,)))
        if len(made) == 1:
            made[0].start()
        return make(**fields)

    monkeypatch.setattr(routes, "get_openapi", counted)
    routes.openapi(request)
    made[0].join(TIMEOUT)
    assert len(made) == 1

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
import schemathesis.pytest
from hypothesis import HealthCheck, settings
from schemathesis.python import asgi
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
from kvasir.server.api.routes import ROUTES, document
from tests.kit.dialects import CHAT, COMPLETIONS, LEAST, RESPONSES
from tests.kit.fake_encoder import encoder_app, encoder_model_dir
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import VOCAB_SIZE, fake_app

Fields = dict[str, Any]
KEY = {"x-api-key": "a-key"}

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
# A field that several objects of requests have is read by one piece of code, and so are fields of
# equal schemas; schemathesis sends each a dozen times. This object is tested first, the others with
# fields that are new.
FIRST = "CompletionsBody"
OF_ALL = {"suffix", "user"}  # a field of other servers of each kind
FOR_READERS = {"title", "description", "default"}


def told_apart(field: str, about: Fields) -> str:
    """Return what tells a field from those that the same code reads."""
    schema = {key: value for key, value in about.items() if key not in FOR_READERS}
    return json.dumps([field, schema] if "$ref" in json.dumps(schema) else schema)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, asgi.ASGIClient]]:
    """An application of each task, called in this process: sockets would take half of the time."""
    runner, folder = FakeRunner(VOCAB_SIZE, max_model_len=256), tmp_path_factory.mktemp("batches")
    apps: dict[str, Any] = {}
    apps["generate"] = fake_app(runner, api_key=KEY["x-api-key"], batch_dir=folder)
    for task, labels in (("embed", ()), ("classify", ("relevant",))):
        model_dir = encoder_model_dir(labels, max_model_len=256)
        apps[task] = encoder_app(model_dir, api_key=KEY["x-api-key"])[0]
    with ExitStack() as stack:
        stack.callback(asgi.shutdown_lifespans)
        clients = {task: asgi.get_client(app) for task, app in apps.items()}
        for client in clients.values():
            client.trust_env = False  # or it looks for proxies before each of thousands of requests
            stack.enter_context(client)
        yield clients


@pytest.fixture(scope="module")
def described(sessions: dict[str, asgi.ASGIClient]) -> Fields:
    """The document of a server that answers batches too."""
    found: Fields = sessions["generate"].get("/openapi.json", headers=KEY).json()
    return found


@pytest.fixture(scope="module")
def api(described: Fields) -> BaseSchema:
    schemas, seen = dict(described["components"]["schemas"]), set[str]()
    for name in dict.fromkeys((FIRST, *schemas)):
        schema = schemas[name]
        if schema.get("additionalProperties") == {"type": "null"}:  # of a request
            needed, new = OF_ALL.union(schema.get("required", ())), {}
            for field, about in schema["properties"].items():
                key = told_apart(field, about)
                if field in needed or key not in seen:
                    new[field] = about
                seen.add(key)
            schemas[name] = schema | {"properties": new}
    short = described | {"components": described["components"] | {"schemas": schemas}}
    return schemathesis.openapi.from_dict(short)


# schemathesis takes seconds for the bodies: every worker that collects this file would make them.
operations = schemathesis.pytest.from_fixture("api")


@pytest.fixture
def _named(request: pytest.FixtureRequest) -> None:
    request.node._nodeid = request.node.nodeid  # schemathesis 4.32 reads pytest 9.1's name of it


@pytest.mark.usefixtures("_named")
@operations.parametrize()
@settings(max_examples=2, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(
    case: schemathesis.Case[Any], sessions: dict[str, asgi.ASGIClient]
) -> None:
    response = case.call_and_validate(
        base_url="http://localhost",
        session=sessions[TASKS[case.path]],
        headers=KEY,
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


def test_a_client_may_send_every_default(
    sessions: dict[str, asgi.ASGIClient], described: Fields
) -> None:
    for path, name in (
        (COMPLETIONS, "CompletionsBody"),
        (CHAT, "ChatBody"),
        (RESPONSES, "ResponsesBody"),
    ):
        properties = described["components"]["schemas"][name]["properties"]
        defaults = {key: one["default"] for key, one in properties.items() if "default" in one}
        response = sessions["generate"].post(path, json=defaults | LEAST[path], headers=KEY)
        assert response.status_code == 200, response.text


def test_all_but_open_routes_want_a_key(
    sessions: dict[str, asgi.ASGIClient], described: Fields
) -> None:
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            response = sessions["generate"].request(method, re.sub("{.*?}", "x", path))
            is_open = not operation["security"]
            assert (response.status_code != 401) is is_open, (method, path)
            assert ("401" in operation["responses"]) is not is_open


def test_settings_are_in_the_document(described: Fields) -> None:
    """Keys, a path of a proxy, and routes that are switched off."""
    other = document(fake_app(FakeRunner(VOCAB_SIZE), root_path="/llm", explain=False))
    assert other["paths"]["/version"]["get"]["security"] == []
    assert other["servers"] == [{"url": "/llm"}]
    absent = {"/explain", "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"}
    absent |= {path for path in described["paths"] if path.startswith("/v1/batches")}
    assert described["paths"].keys() - other["paths"].keys() == absent


def test_requests_at_once_make_the_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second of CPU time, and a flood of requests would make it in 40 threads."""
    app = fake_app(FakeRunner(VOCAB_SIZE))
    request: Any = SimpleNamespace(app=app)
    made, absent = list[Thread](), ("HTTPValidationError", "ValidationError")

    def counted(**_: Any) -> Fields:
        made.append(Thread(target=routes.openapi, args=(request,)))
        if len(made) == 1:
            made[0].start()
        return {"paths": {}, "components": {"schemas": dict.fromkeys(absent)}}

    monkeypatch.setattr(routes, "get_openapi", counted)
    routes.openapi(request)
    made[0].join(TIMEOUT)
    assert len(made) == 1

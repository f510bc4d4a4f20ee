"""GET /openapi.json: the API as an OpenAPI 3.1 document. A table of all routes; a test holds the routes to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response

from server.api import answers
from server.api.explain import ExplainBody
from server.api.openai.chat_schemas import ChatBody
from server.api.responses import service_of
from server.api.schemas import CompletionsBody, GenerateBody
from server.api.tgi import CompatibleBody
from server.api.tokenize import DetokenizeBody, TokenizeBody, TokenizeChatBody, TokenizeInputsBody
from server.telemetry.metrics import CONTENT_TYPE

router = APIRouter()

OPEN = (431, 500)
READ = (*OPEN, 401)
ASK = (400, 401, 404, 413, 431, 500)
GENERATE = (*ASK, 429, 503, 504)

DESCRIPTIONS = {
    400: "What was asked is malformed, out of range, not supported, or longer than the model takes.",
    401: "No valid API key.",
    404: "There is no such model, or no such path.",
    405: "The path does not take this method.",
    413: "The body is larger than `max_body_bytes`.",
    429: "Too many requests wait or run already, or not even the first text of this one could end in time.",
    431: "The URL and the headers, or what is around a chunked body, are longer than `max_header_bytes`.",
    500: "The engine failed.",
    503: "The model is loading, or the server is shutting down.",
    504: "The deadline passed before the first token, or came too near while the request waited.",
}
_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route. `answer` and `body`: types; a str is a media type of text. `event`: of a stream. `tgi`: its errors."""

    method: str
    path: str
    summary: str
    answer: Any
    body: Any = None
    event: Any = None
    errors: tuple[int, ...] = READ
    tgi: bool = False
    is_open: bool = False

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def error(self) -> Any:
        return answers.GenerateError if self.tgi else answers.Error


OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer in a conversation, as OpenAI does.",
        body=ChatBody,
        answer=answers.Chat,
        event=answers.ChatChunk,
        errors=GENERATE,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue prompts, as OpenAI does.",
        body=CompletionsBody,
        answer=answers.Completion,
        event=answers.CompletionChunk,
        errors=GENERATE,
    ),
    Operation(method="get", path="/v1/models", summary="The one model.", answer=answers.Models),
    Operation(
        method="get",
        path="/v1/models/{model_id}",
        summary="The model by its name.",
        answer=answers.Model,
        errors=(*READ, 404),
    ),
    Operation(
        method="get",
        path="/model",
        summary="Shape, precision, verification and files of the model.",
        answer=answers.ModelCard,
    ),
    Operation(
        method="post",
        path="/generate",
        summary="Continue a text, as TGI does.",
        body=GenerateBody,
        answer=answers.Generated,
        errors=GENERATE,
        tgi=True,
    ),
    Operation(
        method="post",
        path="/generate_stream",
        summary="The same as a stream.",
        body=GenerateBody,
        answer=None,
        event=answers.GeneratedToken,
        errors=GENERATE,
        tgi=True,
    ),
    Operation(
        method="post",
        path="/",
        summary="Either, by `stream`, for TGI's clients that know a base URL.",
        body=CompatibleBody,
        answer=list[answers.Generated],
        event=answers.GeneratedToken,
        errors=GENERATE,
        tgi=True,
    ),
    Operation(
        method="get",
        path="/info",
        summary="Model and limits, as TGI tells them.",
        answer=answers.Info,
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="Text or messages to tokens, as vLLM does; where the text is called `inputs`, as TGI does.",
        body=TokenizeBody | TokenizeChatBody | TokenizeInputsBody,
        answer=answers.Tokens | list[answers.SimpleToken],
        errors=ASK,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="Tokens to text.",
        body=DetokenizeBody,
        answer=answers.Detokenized,
        errors=ASK,
    ),
    Operation(
        method="post",
        path="/explain",
        summary="What the model attends to in a text, and what it would say next.",
        body=ExplainBody,
        answer=answers.Explanation,
        errors=(*ASK, 429, 503),
    ),
    *(
        Operation(
            method="get",
            path=path,
            summary=summary,
            answer=answers.Health,
            errors=OPEN,
            is_open=True,
        )
        for path, summary in (
            ("/health", "As /health/ready."),
            (
                "/health/live",
                "200 while the process is of use, also while the model loads; else 503.",
            ),
            ("/health/ready", "200 while requests are taken; 503 while loading and draining."),
            ("/health/startup", "200 once the model has been loaded and warmed up; 503 before."),
        )
    ),
    Operation(
        method="get",
        path="/metrics",
        summary="Everything that is measured, for Prometheus.",
        answer=CONTENT_TYPE,
        errors=OPEN,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/metrics/router",
        summary="Three gauges to balance by.",
        answer=CONTENT_TYPE,
        errors=OPEN,
        is_open=True,
    ),
    Operation(method="get", path="/version", summary="What runs.", answer=answers.Version),
    Operation(
        method="get",
        path="/debug/batch",
        summary="Who shares the batch now; never text.",
        answer=answers.Batch,
    ),
    *(
        Operation(
            method=method, path="/", summary=summary, answer="text/html", errors=OPEN, is_open=True
        )
        for method, summary in (("get", "The playground."), ("head", "Its headers."))
    ),
    Operation(method="get", path="/openapi.json", summary="This document.", answer=dict[str, Any]),
)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    settings = service_of(request).settings
    has_keys = settings.api_key is not None or settings.api_key_file is not None
    return JSONResponse(document(settings.root_path, has_keys=has_keys))


@cache
def document(root_path: str = "", *, has_keys: bool = False) -> dict[str, Any]:
    types = {o.name + kind: t for o in OPERATIONS for kind, t in _types(o).items() if _is_type(t)}
    schemas, definitions = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(kind)) for name, kind in types.items()], ref_template=_REF
    )
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        known = {
            kind: schemas.get((operation.name + kind, "validation")) for kind in _types(operation)
        }
        paths.setdefault(operation.path, {})[operation.method] = _describe(
            operation, known, has_keys=has_keys
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": version("kvasir-lm"),
            "description": "A decoder language model.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}} if has_keys else {},
        },
    }


def _types(operation: Operation) -> dict[str, Any]:
    return {
        " body": operation.body,
        " answer": operation.answer,
        " event": operation.event,
        " error": operation.error,
    }


def _is_type(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, str)


def _describe(operation: Operation, schemas: dict[str, Any], *, has_keys: bool) -> dict[str, Any]:
    statuses: Iterable[int] = (status for status in operation.errors if status != 401 or has_keys)
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": "_".join(
            part for part in operation.name.replace("{", "").replace("}", "").split("/")
        ).strip(),
        "responses": {"200": _success(operation, schemas)}
        | {str(status): _failure(status, schemas[" error"]) for status in statuses},
        "security": [{"key": []}] if has_keys and not operation.is_open else [],
    }
    if operation.answer is answers.Health:
        described["responses"]["503"] = _response(
            "It is not.", {"application/json": {"schema": schemas[" answer"]}}
        )
    if operation.body is not None:
        content = {"application/json": {"schema": schemas[" body"]}}
        described["requestBody"] = {"required": True, "content": content}
    if "{model_id}" in operation.path:
        described["parameters"] = [
            {
                "name": "model_id",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
        ]
    return described


def _success(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": {"type": "string"}}
    elif operation.answer is not None:
        content["application/json"] = {"schema": schemas[" answer"]}
    text = "The answer."
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _events(operation, schemas)}
        text += " A stream is server-sent events" + (
            "." if operation.tgi else ", the last of them `[DONE]`."
        )
    return _response(text, content)


def _events(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    """Of one event. A failure after the first is an event too."""
    content = {"anyOf": [schemas[" event"], schemas[" error"]]}
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": content,
    }
    if not operation.tgi:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _failure(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    response = _response(DESCRIPTIONS[status], {"application/json": {"schema": schema}})
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        seconds = {
            "description": "Seconds until it is worth trying again.",
            "schema": {"type": "string"},
        }
        response["headers"]["retry-after"] = {"required": True, **seconds}
    return response


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    request_id = {
        "description": "The request's own, or a new one.",
        "required": True,
        "schema": {"type": "string"},
    }
    return {"description": description, "headers": {"x-request-id": request_id}, "content": content}

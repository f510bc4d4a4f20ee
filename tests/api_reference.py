"""The tables of docs/api.md, from the code: `python -m tests.api_reference` rewrites them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fastapi.routing import APIRoute
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from kvasir.model.directory import load_model_dir
from kvasir.server.api.embeddings.openai import EmbeddingsBody
from kvasir.server.api.http.responses import STATUSES
from kvasir.server.api.openai.chat_schemas import ChatBody
from kvasir.server.api.openai.responses.schemas import ResponsesBody
from kvasir.server.api.openai.schemas import CompletionsBody
from kvasir.server.api.other_servers import IGNORED, NO_OPS
from kvasir.server.api.routes import ROUTES
from kvasir.server.api.schemas import RequestBody, field_names
from kvasir.server.errors import KvasirError
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.setting_values import shown_default
from kvasir.server.settings import Settings, load_settings

EXAMPLE = Path(__file__).parent.parent / "examples/stdlib"
PAGE = Path(__file__).parent.parent / "docs/api.md"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _bodies(kind: type[RequestBody]) -> Iterator[type[RequestBody]]:
    for body in kind.__subclasses__():
        yield body
        yield from _bodies(body)


BODIES = {body.__name__: body for body in _bodies(RequestBody)}
OF_REQUESTS = (
    "max_model_len", "max_num_seqs", "max_queue", "max_body_bytes", "default_timeout_ms",
    "send_timeout", "tool_call_format", "reasoning_format", "api_key", "api_key_file",
    "share_prefix_cache", "cors_origins", "allowed_hosts", "root_path", "explain", "adapter",
    "adapter_dir", "adapter_memory", "adapter_admin_key", "models_dir", "models_memory",
    "keep_alive", "models_admin_key", "batch_dir", "batch_dir_bytes",
    "stored_responses_memory", "salt", "salt_file", "state_url", "state_url_file",
)  # fmt: skip

# What the openai package may send to a route, and what the route reads.
OPENAI: dict[str, tuple[Any, type[RequestBody]]] = {
    "/v1/chat/completions": (chat_params.CompletionCreateParamsNonStreaming, ChatBody),
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsNonStreaming, CompletionsBody
    ),
    "/v1/responses": (response_create_params.ResponseCreateParamsNonStreaming, ResponsesBody),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams, EmbeddingsBody),
}  # fmt: skip


def openai_fields(path: str) -> tuple[set[str], set[str], set[str], set[str]]:
    """Return the package's fields that are read, may have idle values, are ignored, are refused."""
    params, body = OPENAI[path]
    known, read = {*get_type_hints(params)}, field_names(body)
    idle, ignored = (known & names.keys() - read for names in (NO_OPS, dict.fromkeys(IGNORED)))
    return known & read, idle, ignored, known - read - idle - ignored


def body_type(route: APIRoute) -> Any:
    """Return the type of the body that a route takes."""
    return get_type_hints(route.endpoint, include_extras=True)["body"]


def bodies_of_routes() -> set[str]:
    """Return the names of the types of bodies, and of those whose fields they inherit."""
    bodies = {get_type_hints(route.endpoint).get("body") for route in ROUTES}
    kinds = {kind for body in bodies for kind in get_args(body) or [body]}
    bases = {base for kind in kinds if kind for base in kind.__mro__}
    return {name for name, body in BODIES.items() if body in bases and body.__annotations__}


def with_tables(page: str) -> str:
    """Return the page with every marked table rewritten."""
    return MARKED.sub(lambda found: f"{found[1]}\n{_table(found[2])}\n{found[3]}", page)


def _table(name: str) -> str:
    if name == "endpoints":
        head, rows = (
            "| | |",
            [
                f"| `{' '.join(one.methods or ())} {one.path_format}` | {one.summary} |"
                for one in ROUTES
            ],
        )
    elif name == "errors":
        head, rows = "| status | `type` | `code` | when |", sorted(set(_errors(KvasirError)))
    elif name == "settings":
        head, rows = "| setting | default | |", [_setting(name) for name in OF_REQUESTS]
    elif name == "openai":
        head, rows = "| route | read | idle values only | ignored | refused |", [*_openai()]
    elif name == "metrics":
        head, rows = "| metric | kind | |", list(_metrics())
    elif name == "idle":
        head = "| field | as |"
        rows = [f"| `{field}` | anything |" for field in sorted(IGNORED)]
        rows += [
            f"| `{field}` | {' or '.join(map(_code, values))} |" for field, values in NO_OPS.items()
        ]
    else:
        head, rows = "| field | | default | |", list(_fields(BODIES[name]))
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *rows, ""])


def _code(value: object) -> str:
    return f"`{json.dumps(value)}`"


def _openai() -> Iterator[str]:
    """Yield a row for each of OpenAI's routes: the number of fields it reads, and the others."""
    for path in OPENAI:
        read, *others = openai_fields(path)
        shown = (", ".join(f"`{name}`" for name in sorted(names)) for names in others)
        yield f"| `{path}` | {len(read)} | {' | '.join(shown)} |"


def _errors(kind: type[KvasirError]) -> Iterator[str]:
    for error in kind.__subclasses__():
        code = error.code and f"`{error.code}`"
        yield f"| {error.status} | `{error.type}` | {code or ''} | {STATUSES[error.status]} |"
        yield from _errors(error)


def _setting(name: str) -> str:
    field = Settings.model_fields[name]
    default = "" if field.default is None else f"`{shown_default(field.default)}`"
    description = str(field.description).replace("<", "\\<")  # no tag of HTML
    return f"| `{name}` | {default} | {description} |"


def _metrics() -> Iterator[str]:
    """Yield a row for each of Kvasir's own metrics, as they are at the start."""
    served = ServedModel(load_settings(model=EXAMPLE), load_model_dir(EXAMPLE))
    for metric in served.metrics.server.registry.collect():
        if not metric.name.startswith("kvasir_"):
            continue
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
        shown = f"`{name}{{{', '.join(labels)}}}`" if labels else f"`{name}`"
        yield f"| {shown} | {metric.type} | {metric.documentation} |"


def _fields(body: type[RequestBody]) -> Iterator[str]:
    """Yield a row for each field that a body adds to inherited ones."""
    schema = body.model_json_schema()
    for given in body.__annotations__:
        name = body.model_fields[given].alias or given
        field = schema["properties"][name]
        default = "" if field.get("default") is None else f"`{json.dumps(field['default'])}`"
        shown = "required" if name in schema.get("required", ()) else default
        kind = _kind(field, schema.get("$defs", {}))
        yield f"| `{name}` | {kind} | {shown} | {field['description']} |"


def _kind(schema: dict[str, Any], known: dict[str, Any]) -> str:
    """Return a type in words."""
    if "$ref" in schema:
        return _kind(known[schema["$ref"].rpartition("/")[2]], known)
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        kinds = (_kind(one, known) for one in alternatives if one != {"type": "null"})
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join('`""`' if value == "" else f"`{value}`" for value in values)
    if schema["type"] == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_kind(schema['items'], known)}{most}"
    return str(schema["type"]) + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    """Return bounds in words, without the largest integers and without a minimum of 0."""
    above, least, most = (schema.get(key) for key in ("exclusiveMinimum", "minimum", "maximum"))
    most = None if most is None or most >= 2**31 - 1 else most
    if above is not None:
        return f", above {above:g}, at most {most:g}"
    if most is not None:
        return f", {least:g} to {most:g}"
    return "" if least is None or least < -1 or least == 0 else f", at least {least:g}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""docs/api.md: tables match the code, requests are accepted, and answers have today's form."""

from __future__ import annotations

import re

import pytest
from pydantic import TypeAdapter

from kvasir.server.api.openai.chat_schemas import ChatBody
from kvasir.server.api.openai.schemas import CompletionsBody
from kvasir.server.api.routes import ROUTES
from kvasir.server.api.schemas import Error
from kvasir.server.settings import Settings
from tests.api_reference import PAGE, bodies_of_routes, body_type, with_tables
from tests.kit.dialects import parsed

TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLE = re.compile(
    r"```sh\ncurl (?:-N )?localhost:8000(\S+)(?: -H '[^']*')?(?: -d '(.*?)')?\n```"
    r"\n\n```(json)?\n(.*?)```",
    re.DOTALL,
)
EXAMPLES = EXAMPLE.findall(TEXT)


def test_tables_are_up_to_date() -> None:
    assert with_tables(TEXT) == TEXT, "run: python -m tests.api_reference"


def test_every_body_has_its_table_and_every_example_is_tested() -> None:
    assert all(f"<!-- table: {name} -->" in TEXT for name in bodies_of_routes())
    assert TEXT.count("```sh\n") == len(EXAMPLES)


def test_names_for_newcomers_exist() -> None:
    table = TEXT.partition("## Coming from another server")[2].partition("\n## ")[0]
    here = " ".join(row.rsplit(" | ", 1)[1] for row in table.splitlines() if row.startswith("| "))
    options = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    assert set(re.findall("--[a-z-]+", here)) <= options | {"--precision", "--out"}
    fields = CompletionsBody.model_fields.keys() | ChatBody.model_fields.keys()
    assert set(re.findall("`([a-z_]+)`", here)) <= fields | {"json_schema", "enable_thinking"}


@pytest.mark.parametrize(
    ("path", "body", "language", "answer"), EXAMPLES, ids=[path for path, *_ in EXAMPLES]
)
def test_an_example_has_todays_form(path: str, body: str, language: str, answer: str) -> None:
    method = "POST" if body else "GET"
    route = next(one for one in ROUTES if one.path == path and method in (one.methods or ()))
    if '"error"' in answer:
        Error.model_validate_json(answer)
        return
    if body:
        TypeAdapter(body_type(route)).validate_json(body)
    if language:
        TypeAdapter(route.response_model).validate_json(answer)
    elif path.endswith(("completions", "stream")):
        assert parsed(path, f"{answer}\n")

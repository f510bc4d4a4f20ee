"""docs/api.md: tables are of what they describe, requests are taken, and answers are as they would be now."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import TypeAdapter

from server.api import answers
from server.api.openapi import OPERATIONS, Operation
from tests.api_reference import BODIES, PAGE, with_tables

TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLE = re.compile(
    r"```sh\ncurl (?:-N )?localhost:8000(\S+)(?: -d '(.*?)')?\n```\n\n```(json)?\n(.*?)```",
    re.DOTALL,
)
EXAMPLES = EXAMPLE.findall(TEXT)


def operation_of(path: str, body: str) -> Operation:
    return next(
        one for one in OPERATIONS if (one.method, one.path) == ("post" if body else "get", path)
    )


def test_tables_are_up_to_date() -> None:
    assert with_tables(TEXT) == TEXT, "run: python -m tests.api_reference"


def test_every_body_has_its_table_and_every_example_is_looked_at() -> None:
    assert all(f"<!-- table: {name} -->" in TEXT for name in BODIES)
    assert TEXT.count("```sh\n") == len(EXAMPLES)


@pytest.mark.parametrize(
    ("path", "body", "language", "answer"), EXAMPLES, ids=[path for path, *_ in EXAMPLES]
)
def test_an_example_is_what_it_would_be_now(
    path: str, body: str, language: str, answer: str
) -> None:
    operation = operation_of(path, body)
    if '"error"' in answer:
        answers.Error.model_validate_json(answer)
        return
    if body:
        TypeAdapter(operation.body).validate_json(body)
    if language:
        TypeAdapter(operation.answer).validate_json(answer)
    elif operation.event is not None:
        events: list[Any] = [
            line.removeprefix("data:").strip() for line in answer.split("\n\n") if line
        ]
        for event in events[: None if operation.tgi else -1]:
            TypeAdapter(operation.event).validate_python(json.loads(event))

"""Hints of clients: fields that cannot change an answer are accepted, named and counted."""

from __future__ import annotations

import re
import typing
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from kvasir.server.api.embeddings.openai import EmbeddingsBody
from kvasir.server.api.openai.chat_schemas import ChatBody
from kvasir.server.api.openai.responses.schemas import ResponsesBody
from kvasir.server.api.openai.schemas import CompletionsBody
from kvasir.server.api.other_servers import IGNORED, NO_OPS
from kvasir.server.api.schemas import RequestBody, field_names
from tests.kit.dialects import COMPLETIONS, LEAST, MESSAGES, RESPONSES
from tests.kit.serving import serving

BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "seed": 1}
HEADER = "x-kvasir-ignored"


@pytest.mark.parametrize("value", ["flex", 1, True, {"a": [1]}, [], None])
async def test_no_value_of_a_hint_changes_an_answer(value: object) -> None:
    hints = dict.fromkeys(sorted(IGNORED), value)
    async with serving() as served:
        plain = await served.client.post(COMPLETIONS, json=BODY)
        hinted = await served.client.post(COMPLETIONS, json=BODY | hints)
        page = (await served.client.get("/metrics")).text
    assert (plain.status_code, hinted.status_code) == (200, 200)
    assert hinted.json()["choices"] == plain.json()["choices"]
    assert HEADER not in plain.headers
    named = [] if value is None else sorted(IGNORED)
    assert hinted.headers.get(HEADER) == (", ".join(named) or None)
    counted = re.findall(r'kvasir_ignored_fields_total{field="(\w+)"} 1.0', page)
    assert sorted(counted) == named


async def test_only_what_has_no_effect_is_named() -> None:
    """Also on a stream, and inside of objects; not what a route has a field for."""
    options = {"stream": True, "stream_options": {"include_usage": True, "provider": "x"}}
    async with serving() as served:
        asked = [
            (COMPLETIONS, BODY | options | {"user": "me"}),
            (RESPONSES, LEAST[RESPONSES] | {"metadata": {"a": "b"}}),
            (MESSAGES, LEAST[MESSAGES] | {"max_tokens": 1, "session_id": "x"}),
            (COMPLETIONS, BODY | {"user": "me", "audio": {}}),
        ]
        streamed, kept, said, refused = [
            await served.client.post(path, json=body) for path, body in asked
        ]
    assert streamed.headers[HEADER] == "provider, user"
    assert HEADER not in kept.headers
    assert (said.status_code, said.headers[HEADER]) == (200, "session_id")
    assert (refused.status_code, HEADER in refused.headers) == (400, False)
    assert refused.json()["error"]["param"] == "audio"


@pytest.mark.parametrize(
    ("kind", "params", "refused"),
    [
        (
            ChatBody,
            chat_params.CompletionCreateParamsNonStreaming,
            {"audio", "moderation", "web_search_options"},
        ),
        (CompletionsBody, completion_create_params.CompletionCreateParamsNonStreaming, set()),
        (
            ResponsesBody,
            response_create_params.ResponseCreateParamsNonStreaming,
            {
                *("access_programs", "context_management", "conversation", "image"),
                *("moderation", "prompt"),
            },
        ),
        (EmbeddingsBody, embedding_create_params.EmbeddingCreateParams, set()),
    ],
)
def test_every_field_of_openais_package_is_decided(
    kind: type[RequestBody], params: Any, refused: set[str]
) -> None:
    known = field_names(kind) | IGNORED | NO_OPS.keys()
    assert typing.get_type_hints(params).keys() - known - {"prediction"} == refused

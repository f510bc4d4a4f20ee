"""Hints of clients: fields that cannot change an answer are accepted, named and counted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvasir.server.api.other_servers import IGNORED
from tests.api_reference import openai_fields
from tests.kit.dialects import CHAT, COMPLETIONS, LEAST, MESSAGES, RESPONSES
from tests.kit.serving import serving

BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "seed": 1}
HEADER = "x-kvasir-ignored"


async def test_no_value_of_a_hint_changes_an_answer() -> None:
    values: list[Any] = ["flex", 1, True, {"a": [1]}, [], None]
    async with serving() as served:
        plain = await served.client.post(COMPLETIONS, json=BODY)
        assert HEADER not in plain.headers
        for value in values:
            hints = dict.fromkeys(sorted(IGNORED), value)
            hinted = await served.client.post(COMPLETIONS, json=BODY | hints)
            assert hinted.status_code == 200, value
            assert hinted.json()["choices"] == plain.json()["choices"]
            named = None if value is None else ", ".join(sorted(IGNORED))
            assert hinted.headers.get(HEADER) == named
        page = (await served.client.get("/metrics")).text
    counted = re.findall(r'kvasir_ignored_fields_total{field="(\w+)"} 5.0', page)
    assert sorted(counted) == sorted(IGNORED)


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
    ("path", "refused"),
    [
        (CHAT, {"audio", "moderation", "web_search_options"}),
        (COMPLETIONS, set()),
        (
            RESPONSES,
            {
                *("access_programs", "context_management", "conversation", "image"),
                *("moderation", "prompt"),
            },
        ),
        ("/v1/embeddings", set()),
    ],
)
def test_every_field_of_openais_package_is_decided(path: str, refused: set[str]) -> None:
    assert openai_fields(path)[-1] == refused

"""Chat templates against transformers, on templates written as published ones are."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
from jinja2 import TemplateError

from kvasir.model.template.chat_template import ChatTemplate, ChatTemplateError
from tests.kit.chat_templates import CHATML, LLAMA_3, TEMPLATES, TOKENS, by_transformers

USER = {"role": "user", "content": "  Is 1 < 2 & 'é' \"quoted\"?\n"}
ANSWER = {"role": "assistant", "content": "Yes.\n\n  It is. "}
SYSTEM = {"role": "system", "content": "Be <brief> & kind."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": "<&>"}}}
    ],
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a + b <&'é\">", "parameters": {"type": "object"}},
}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, ANSWER, USER],
    [SYSTEM, USER, ANSWER],
    [USER, CALL, {"role": "tool", "content": "3", "name": "add"}, ANSWER],
    [USER, {**ANSWER, "thinking": "hm"}],
    [USER, {**ANSWER, "reasoning": "hm"}],
    [ANSWER, USER, USER],  # in a wrong order
    [USER, ANSWER] * 12,
]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_what_is_rendered_is_what_transformers_renders(template: str) -> None:
    """Untrimmed blocks, HTML escapes, unknown tags or missing tokens would change the text."""
    ours = ChatTemplate(template, TOKENS)
    for chat, prompted, tools in product(CHATS, [False, True], [None, [TOOL, TOOL]]):
        options: dict[str, Any] = {"add_generation_prompt": prompted, "tools": tools}
        expected = outcome(partial(by_transformers, template, chat, **options))
        actual = outcome(partial(ours.render, chat, **options))
        assert actual.removeprefix("the chat template cannot render this: ") == expected


def outcome(render: Callable[[], str]) -> str:
    """The text, or what the template refused it with."""
    try:
        return render()
    except (ChatTemplateError, TemplateError) as error:
        return str(error)


def test_variables_reach_the_template() -> None:
    chatml = ChatTemplate(CHATML).render([USER], add_generation_prompt=True, enable_thinking=False)
    assert chatml == by_transformers(
        CHATML, [USER], add_generation_prompt=True, enable_thinking=False
    )
    assert chatml.endswith("<think>\n\n</think>\n\n")
    assert "Today: never" in ChatTemplate(LLAMA_3, TOKENS).render([USER], date_string="never")


def test_rendering_changes_no_message() -> None:
    messages = [{"role": "user", "content": "x", "thinking": "y"}]
    ChatTemplate(LLAMA_3, TOKENS).render(messages)
    assert messages == [{"role": "user", "content": "x", "thinking": "y"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages", "the chat template is not valid: unexpected end of template"),
        ("{% generation %}x", "the chat template is not valid: "),
        ("{{ raise_exception('No roles!') }}", "the chat template cannot render this: No roles!"),
        (
            "{{ messages[0].content + 1 }}",
            "the chat template cannot render this: can only concatenate str",
        ),
        ("{{ messages.append(1) }}", "the chat template cannot render this: "),
        ("{{ ''.__class__.__mro__ }}", "the chat template cannot render this: "),
        (
            "{% set n = namespace(_x=1) %}",
            "the chat template cannot render this: a namespace may not hold '_x'",
        ),
        (
            "{% set n = namespace() %}{% set n.__x = 1 %}",
            "the chat template cannot render this: a namespace may not",
        ),
    ],
)
def test_a_template_that_is_wrong_or_reaches_out_of_the_sandbox_is_an_error(
    source: str, message: str
) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert str(caught.value).startswith(message)


def test_files_may_hold_a_template_and_its_tokens() -> None:
    """Published files have tokens as texts, or as objects."""
    assert ChatTemplate.parse({}) is None
    template = "{{ bos_token }}{{ messages[0].content }}é".encode()
    for tokens, expected in (
        ({}, "xé"),
        (TOKENS, "<s>xé"),
        ({"bos_token": {"content": "<b>", "lstrip": False}}, "<b>xé"),
    ):
        files = {
            "chat_template.jinja": template,
            "special_tokens_map.json": json.dumps(tokens).encode(),
        }
        parsed = ChatTemplate.parse(files)
        assert parsed is not None
        assert parsed.render([{"role": "user", "content": "x"}]) == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("special_tokens_map.json", b"{"),
        ("special_tokens_map.json", b"[1]"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes) -> None:
    with pytest.raises(ChatTemplateError, match=name):
        ChatTemplate.parse({"chat_template.jinja": b"x", name: content})

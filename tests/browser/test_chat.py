"""Conversations in the playground."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.playground import figure, generate, part, setting


@pytest.fixture
def page(open_page: Callable[..., Page], chat_url: str) -> Page:
    page = open_page(chat_url)
    setting(page, "max_tokens").fill("8")
    return page


def test_an_edited_conversation_is_sent(page: Page) -> None:
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Your message").fill("def main():")
    before = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "def main():"},
    ]
    first = generate(page)
    assert first["messages"] == before
    page.get_by_label("Your message").fill("a draft")
    again = generate(page, "Regenerate")
    assert again["messages"] == before
    assert again["seed"] != first["seed"]
    expect(page.get_by_label("Your message")).to_have_value("a draft")
    part(page, "keep").click()
    page.get_by_label("assistant", exact=True).fill("    pass")
    page.get_by_label("Your message").fill("more")
    after = [
        *before,
        {"role": "assistant", "content": "    pass"},
        {"role": "user", "content": "more"},
    ]
    assert generate(page)["messages"] == after
    page.reload()
    expect(page.get_by_label("assistant", exact=True).first).to_have_value("    pass")


def test_what_cannot_be_sent_is_kept(page: Page) -> None:
    message, send = page.get_by_label("Your message"), page.get_by_role("button", name="Generate")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.method))
    message.fill("")
    send.first.click()
    expect(message).to_be_focused()
    assert message.evaluate("box => box.validationMessage")
    message.fill("def main():")
    setting(page, "temperature").fill("-1")
    send.first.click()
    expect(setting(page, "temperature")).to_be_focused()
    expect(message).to_have_value("def main():")
    assert page.locator("#turns li").count() == 0
    assert "POST" not in asked
    setting(page, "temperature").fill("1")
    generate(page)


def test_an_answer_survives_another_mode_and_a_reload(page: Page) -> None:
    page.get_by_label("Your message").fill("def main():")
    generate(page)
    text = part(page, "text").text_content() or ""
    assert text != ""
    page.get_by_label("Completion").check()
    expect(part(page, "text")).to_be_empty()
    page.get_by_label("Chat", exact=True).check()
    expect(page.get_by_label("assistant", exact=True)).to_have_value(text)
    page.reload()
    expect(page.get_by_label("assistant", exact=True)).to_have_value(text)
    page.get_by_label("Your message").fill("more")
    assert [turn["content"] for turn in generate(page)["messages"]] == ["def main():", text, "more"]
    part(page, "keep").press("Enter")
    expect(page.get_by_label("assistant", exact=True).last).to_be_focused()


@pytest.mark.refusals
def test_answers_and_errors_are_scrolled_into_view(page: Page) -> None:
    setting(page, "max_tokens").fill("250")
    setting(page, "form").select_option("regex")
    setting(page, "form-rule").fill("(a\\n){60}")  # taller than the window
    for _ in range(2):
        page.get_by_label("Your message").fill("def main():")
        with page.expect_request("**/v1/chat/completions"):
            page.get_by_label("System message").press(
                "Control+Enter"
            )  # the focus is above the conversation
        expect(page.locator("#generation-status")).to_have_text("Done. Finish reason: stop.")
        expect(part(page, "text").locator("span").last).to_be_in_viewport()
        expect(figure(page, "ending")).to_be_in_viewport()
    error = {"message": "too many wait", "type": "overloaded", "param": None, "code": None}
    answer = {"status": 429, "headers": {"retry-after": "3"}, "json": {"error": error}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    page.get_by_label("System message").press("Control+Enter")
    expect(part(page, "error")).to_have_text("too many wait · retry in 3 s")
    expect(part(page, "error")).to_be_in_viewport()


CALL: dict[str, Any] = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather"},
}
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "They want "},
    {"reasoning_content": "the weather."},
    {"content": "Let me look."},
    {"tool_calls": [{**CALL, "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
]


def test_reasoning_is_folded_and_calls_are_cards(
    page: Page, look: Callable[[Page, str], None], axe_findings: Callable[[Page], list[str]]
) -> None:
    def answer(route: Route) -> None:
        ends = [*([None] * len(DELTAS)), "stop"]
        events = [
            {"choices": [{"index": 0, "delta": one, "finish_reason": end}]}
            for one, end in zip([*DELTAS, {}], ends, strict=True)
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(content_type="text/event-stream", body=body + "data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    setting(page, "tools").fill(json.dumps(tools))
    page.get_by_label("Your message").fill("How is Oslo?")
    assert generate(page)["tools"] == tools
    reasoning = part(page, "reasoning")
    expect(reasoning.locator("p")).to_be_hidden()
    reasoning.locator("summary").click()
    expect(reasoning.locator("p")).to_have_text("They want the weather.")
    expect(part(page, "text")).to_have_text("Let me look.")
    card = part(page, "calls").locator("article")
    expect(card).to_contain_text("weather")
    expect(card.locator("pre")).to_have_text('{\n  "city": "Oslo"\n}', use_inner_text=False)
    look(page, "playground-calls")
    assert axe_findings(page) == []
    part(page, "keep").click()
    page.get_by_label("result of the tool").fill("rain")
    called = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert generate(page)["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": called}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]
    page.reload()  # the second answer has become a turn, with its call
    expect(page.locator("#turns article")).to_have_count(2)


@pytest.mark.refusals
def test_branches_keep_reasoning_and_errors(page: Page) -> None:
    top = [
        {"token": one, "token_id": i, "logprob": -1.0, "bytes": [65 + i]}
        for i, one in enumerate("AB")
    ]
    events: list[dict[str, Any]] = [
        {"delta": {"reasoning_content": "Why not?"}, "prompt_token_ids": [5, 6]},
        {"delta": {"content": "A"}, "logprobs": {"content": [top[0] | {"top_logprobs": top}]}},
        {"delta": {}, "finish_reason": "stop"},
    ]
    lines = [f"data: {json.dumps({'choices': [{'index': 0, **one}]})}\n\n" for one in events]
    body = "".join([*lines, "data: [DONE]\n\n"])
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    page.route("**/v1/completions", lambda route: route.fulfill(status=500, body=""))
    page.route("**/detokenize", lambda route: route.fulfill(status=500, body=""))
    page.get_by_label("Your message").fill("Is it?")
    generate(page)
    token = part(page, "text").locator("> span")
    token.click()
    expect(part(page, "error")).to_contain_text("500")
    page.unroute("**/detokenize")
    page.keyboard.press("Escape")
    token.click()
    expect(page.get_by_role("link", name="Why this token?")).to_have_attribute(
        "href", re.compile("^#attention")
    )
    page.locator("#token-popover li button").click()
    tree = page.get_by_role("navigation", name="Branches").locator("li > button")
    reasoning = part(page, "reasoning").locator("p")
    for _ in range(2):
        expect(part(page, "text")).to_have_text("B")
        expect(part(page, "error")).to_contain_text("500")
        expect(reasoning).to_have_text("Why not?")
        tree.nth(0).click()
        expect(part(page, "text")).to_have_text("A")
        expect(reasoning).to_have_text("Why not?")
        tree.nth(1).click()


def exported(page: Page, folder: Path) -> list[str]:
    """Export the conversation, and return the contents of its messages."""
    with page.expect_download() as saved:
        page.locator("#conversation-export").click()
    saved.value.save_as(folder / "conversation.json")
    messages = json.loads((folder / "conversation.json").read_text(encoding="utf-8"))["messages"]
    return [one["content"] for one in messages]


def test_conversations_are_kept_and_exported(page: Page, tmp_path: Path) -> None:
    page.get_by_label("Your message").fill("def first():")
    generate(page)
    answered = part(page, "text").text_content()
    page.get_by_label("Your message").fill("a draft")
    assert exported(page, tmp_path) == ["def first():", answered]
    page.get_by_label("Your message").fill("")
    page.get_by_role("button", name="New", exact=True).click()
    expect(page.locator("#turns li")).to_have_count(0)
    page.get_by_label("Your message").fill("def second():")
    page.reload()
    expect(page.get_by_label("Your message")).to_have_value("def second():")
    chosen = page.locator("#conversation-list")
    expect(chosen.locator("option")).to_have_text(["def first():", "def second():"])
    chosen.select_option(index=0)
    expect(page.get_by_label("assistant", exact=True)).to_have_value(answered or "")
    assert exported(page, tmp_path) == ["def first():", answered]
    page.locator("#conversation-delete").click()
    expect(chosen.locator("option")).to_have_text(["def second():"])
    expect(page.get_by_label("Your message")).to_have_value("def second():")

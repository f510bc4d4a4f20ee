"""Conversations in the playground."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

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
    again = generate(page, "Regenerate")
    assert again["messages"] == before
    assert again["seed"] != first["seed"]
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


def test_regenerating_keeps_the_unsent_message(page: Page) -> None:
    page.get_by_label("Your message").fill("def main():")
    first = generate(page)
    page.get_by_label("Your message").fill("a draft")
    assert generate(page, "Regenerate")["messages"] == first["messages"]
    expect(page.get_by_label("Your message")).to_have_value("a draft")


def test_an_invalid_setting_keeps_the_message(page: Page) -> None:
    page.get_by_label("Your message").fill("def main():")
    setting(page, "temperature").fill("-1")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(setting(page, "temperature")).to_be_focused()
    expect(page.get_by_label("Your message")).to_have_value("def main():")
    assert page.locator("#turns li").count() == 0


def test_an_answer_survives_a_reload_and_can_be_edited(page: Page) -> None:
    page.get_by_label("Your message").fill("def main():")
    generate(page)
    text = part(page, "text").text_content() or ""
    assert text != ""
    page.reload()
    expect(page.get_by_label("assistant", exact=True)).to_have_value(text)
    page.get_by_label("Your message").fill("more")
    assert [turn["content"] for turn in generate(page)["messages"]] == ["def main():", text, "more"]
    part(page, "keep").press("Enter")
    expect(page.get_by_label("assistant", exact=True).last).to_be_focused()


def test_changing_the_mode_keeps_the_answer(page: Page) -> None:
    page.get_by_label("Your message").fill("def main():")
    generate(page)
    text = part(page, "text").text_content() or ""
    page.get_by_label("Completion").check()
    expect(part(page, "text")).to_be_empty()
    page.get_by_label("Chat", exact=True).check()
    expect(page.get_by_label("assistant", exact=True)).to_have_value(text)


def test_an_empty_message_is_not_sent(page: Page) -> None:
    message = page.get_by_label("Your message")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.method))
    message.fill("")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(message).to_be_focused()
    assert message.evaluate("box => box.validationMessage")
    assert "POST" not in asked
    message.fill("def main():")
    generate(page)


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

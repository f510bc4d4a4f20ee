"""Conversations in the playground: what is sent of them, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.playground import generate, part, setting


@pytest.fixture
def page(open_page: Callable[..., Page], chat_url: str) -> Page:
    page = open_page(chat_url)
    setting(page, "max_tokens").fill("8")
    return page


def test_a_conversation_goes_on_from_what_was_edited(page: Page) -> None:
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Your message").fill("def main():")
    before = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def main():"}]
    first = generate(page)
    assert first["messages"] == before
    again = generate(page, "Regenerate")
    assert again["messages"] == before
    assert again["seed"] != first["seed"]
    part(page, "keep").click()
    page.get_by_label("assistant", exact=True).fill("    pass")
    page.get_by_label("Your message").fill("more")
    after = [*before, {"role": "assistant", "content": "    pass"}, {"role": "user", "content": "more"}]
    assert generate(page)["messages"] == after
    page.reload()
    expect(page.get_by_label("assistant", exact=True).first).to_have_value("    pass")


def test_regenerating_leaves_the_draft(page: Page) -> None:
    page.get_by_label("Your message").fill("def main():")
    first = generate(page)
    page.get_by_label("Your message").fill("a draft")
    assert generate(page, "Regenerate")["messages"] == first["messages"]
    expect(page.get_by_label("Your message")).to_have_value("a draft")


def test_a_wrong_setting_leaves_the_message(page: Page) -> None:
    page.get_by_label("Your message").fill("def main():")
    setting(page, "temperature").fill("-1")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(setting(page, "temperature")).to_be_focused()
    expect(page.get_by_label("Your message")).to_have_value("def main():")
    assert page.locator("#turns li").count() == 0


def test_an_answer_outlives_the_page_and_can_be_edited_at_once(page: Page) -> None:
    page.get_by_label("Your message").fill("def main():")
    generate(page)
    said = part(page, "text").text_content() or ""
    assert said != ""
    page.reload()
    expect(page.get_by_label("assistant", exact=True)).to_have_value(said)
    page.get_by_label("Your message").fill("more")
    assert [turn["content"] for turn in generate(page)["messages"]] == ["def main():", said, "more"]
    part(page, "keep").press("Enter")
    expect(page.get_by_label("assistant", exact=True).last).to_be_focused()

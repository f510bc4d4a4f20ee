"""First steps of a new user: a completion, then an attention head. Both make a README picture."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, expect

from tests.browser.conftest import BUILD
from tests.browser.playground import generate
from tests.browser.test_explorer import wait_until_settled


def window(height: int) -> dict[str, Any]:
    return {"viewport": {"width": 1180, "height": height}}


def picture(page: Page, name: str) -> None:
    page.screenshot(path=BUILD / "screenshots" / f"{name}.png")


def test_a_completion_and_alternatives_of_its_tokens(
    open_page: Callable[..., Page], url: str
) -> None:
    page = open_page(url, **window(860))
    page.locator("#setting-a-seed").fill("1")
    generate(page)
    tokens = page.locator("[data-run=a] [data-part=text] span[data-level]")
    assert tokens.count() > 20
    page.evaluate("scrollTo(0, 0)")  # the page followed the text
    tokens.nth(1).hover()
    expect(page.get_by_role("tooltip")).to_contain_text("%")
    picture(page, "first-completion")


def test_a_head_that_attends_to_the_argument(open_page: Callable[..., Page], url: str) -> None:
    """In `json.load(`, this head of the example model attends to the path that was opened."""
    page = open_page(url, color_scheme="dark", reduced_motion="reduce", **window(1390))
    page.get_by_role("link", name="Attention").click()
    page.get_by_label("Input text").fill("with open(path) as file:\n    return json.load(")
    page.get_by_role("button", name="Explain").click()
    page.get_by_label("Layer", exact=True).select_option("2")
    page.get_by_label("Head", exact=True).select_option("1")
    expect(page.locator("#weight")).to_contain_text(re.compile(r"^.\(. attends most to .path."))
    wait_until_settled(page)
    picture(page, "first-head")

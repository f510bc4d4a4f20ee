"""What every view has to be: fit for narrow and dark, for a keyboard alone, and for people who do not see it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import KEY

VIEWS = ("playground", "attention", "live", "model")
WIDTHS = {"wide": 1280, "narrow": 380}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_and_can_be_used_by_anyone(
    view: str,
    width: str,
    theme: str,
    open_page: Callable[..., Page],
    url: str,
    look: Callable[[Page, str], None],
    serious_findings: Callable[[Page], list[str]],
) -> None:
    page = open_page(f"{url}/#{view}", color_scheme=theme, viewport={"width": WIDTHS[width], "height": 800})
    expect(page.locator(f"#{view}")).to_be_visible()
    page.wait_for_load_state("networkidle") if view != "live" else expect(
        page.locator("#live svg").first
    ).to_be_visible()
    look(page, f"{view}-{width}-{theme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
    assert serious_findings(page) == []


def test_dark_is_dark_and_the_choice_stays(page: Page) -> None:
    def background() -> list[int]:
        colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return [int(float(part)) for part in colour.removeprefix("rgb(").rstrip(")").split(",")]

    assert min(background()) > 200
    page.get_by_role("button", name="Theme").click()
    page.get_by_role("button", name="Theme: light").click()
    assert max(background()) < 60
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert max(background()) < 60


def test_views_are_reached_and_left_with_the_keyboard_alone(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    for view in VIEWS:
        page.locator(f"header a[href='#{view}']").focus()
        page.keyboard.press("Enter")
        expect(page.locator(f"#{view}")).to_be_visible()
        assert page.locator("main > section:visible").count() == 1
    page.go_back()
    expect(page.locator("#live")).to_be_visible()


def test_focus_is_never_lost_nor_hidden(page: Page) -> None:
    """Tab goes round every view, through what can be seen only, and comes back."""
    for view in VIEWS:
        page.goto(page.url.split("#")[0] + f"#{view}")
        expect(page.locator(f"#{view}")).to_be_visible()
        page.locator("body").press("Tab")
        for _ in range(400):
            where = page.evaluate(
                "(() => { const e = document.activeElement, r = e.getBoundingClientRect();"
                " return e === document.body ? 'body' : r.width * r.height > 0 ? 'seen' : e.outerHTML; })()"
            )
            if where == "body":
                break
            assert where == "seen", where
            page.keyboard.press("Tab")
        else:
            pytest.fail(f"the tab key never leaves {view}")


@pytest.mark.refusals
def test_a_key_is_asked_for_where_the_server_wants_one(
    open_page: Callable[..., Page], guarded_url: str, serious_findings: Callable[[Page], list[str]]
) -> None:
    page = open_page(guarded_url)
    expect(page.get_by_label("API key")).to_be_visible()
    assert serious_findings(page) == []
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_have_text("The server does not know this key.")
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_label("API key")).to_be_hidden()
    expect(page.locator("#served")).to_contain_text("stdlib")
    page.reload()  # the key stays in this tab
    expect(page.locator("#served")).to_contain_text("stdlib")


def test_no_key_is_asked_for_where_there_is_none(page: Page) -> None:
    expect(page.locator("#served")).to_contain_text("stdlib")
    expect(page.get_by_label("API key")).to_be_hidden()

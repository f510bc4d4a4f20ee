"""All views: narrow windows, both themes, keyboard, screen readers, API keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Page, Response, Route, expect

from tests.browser.conftest import KEY
from tests.browser.playground import CARD, generate, stop_clock

VIEWS = ("playground", "attention", "live", "batches", "model")
NEXT_TASK = "new Promise((resolve) => setTimeout(resolve))"
# Mark everything that Tab should reach. Of a radio group that is the checked button, or the first.
MARK_STOPS = """() => {
  const all = [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [tabindex]")];
  const usable = all.filter((one) => one.tabIndex >= 0 && !one.disabled && one.checkVisibility());
  const groups = new Map();
  for (const one of usable.filter((one) => one.type === "radio")) {
    if (!groups.has(one.name) || one.checked) groups.set(one.name, one);
  }
  const stops = usable.filter((one) => one.type !== "radio" || groups.get(one.name) === one);
  for (const one of stops) one.dataset.stop = "";
  return stops.length;
}"""
LEAVE_STOP = """() => {
  const [one, box] = [document.activeElement, document.activeElement.getBoundingClientRect()];
  delete one.dataset.stop;
  return one === document.body ? "body" : box.width * box.height > 0 ? "seen" : one.outerHTML;
}"""
SMALL_TARGETS = """() => [...document.querySelectorAll(
    "button, input, select, textarea, summary, nav a, label:has(> input)")]
  .filter((one) => one.checkVisibility() && !one.closest("label > input") && one.offsetHeight < 24)
  .map((one) => one.outerHTML.slice(0, 200))"""


# What a view shows once it has what it asks the server for.
LOADED = {
    "attention": "#explained:not([aria-busy])",
    "live": "#live svg >> nth=0",
    "batches": "#batches-on",
}


def wait_for(page: Page, view: str) -> None:
    expect(page.locator(f"#{view}")).to_be_visible()
    expect(page.locator(LOADED.get(view, f"#{view}"))).to_be_visible()


def test_the_views_and_the_reference_fit_and_are_accessible(
    page: Page, check_looks: Callable[[Page, str], None]
) -> None:
    for view in VIEWS:
        page.locator(f"header a[href='#{view}']").click()
        wait_for(page, view)
        check_looks(page, view)
        page.locator("details").evaluate_all("all => { for (const one of all) one.open = true; }")
        assert page.evaluate(SMALL_TARGETS) == [], view  # of the last look, the narrow one
    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_role("link", name="API", exact=True).click()
    expect(page.locator("#routes summary").first).to_be_visible()
    check_looks(page, "reference")


def test_the_first_load_is_small(browser: Browser, url: str) -> None:
    page = browser.new_context().new_page()
    responses: list[Response] = []
    page.on("response", lambda response: responses.append(response))  # noqa: PLW0108  it keeps a wrapper on the function
    page.goto(url)
    expect(page.locator("#playground")).to_be_visible()
    page.wait_for_load_state("networkidle")
    assert len(responses) <= 12
    sizes = [response.request.sizes() for response in responses]
    assert sum(one["responseBodySize"] + one["responseHeadersSize"] for one in sizes) <= 250_000
    page.context.close()


def test_larger_text_does_not_scroll_sideways(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(url, viewport={"width": 380, "height": 800})
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    for view in VIEWS:
        page.locator(f"header a[href='#{view}']").click()
        wait_for(page, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, view


def test_the_theme_is_kept(page: Page) -> None:
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


def test_views_can_be_changed_with_the_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to main content")).to_be_focused()
    for view in VIEWS:
        page.locator(f"header a[href='#{view}']").focus()
        page.keyboard.press("Enter")
        expect(page.locator(f"#{view}")).to_be_visible()
        assert page.locator("main > section:visible").count() == 1
    page.go_back()
    expect(page.locator(f"#{VIEWS[-2]}")).to_be_visible()


def test_tab_reaches_all_controls(page: Page) -> None:
    """Tab reaches nothing else, and then leaves the page."""
    for view in VIEWS:
        page.goto(page.url.split("#")[0] + f"#{view}")
        wait_for(page, view)
        expected = page.evaluate(MARK_STOPS)
        assert expected > 10
        page.locator(".skip").focus()
        for _ in range(400):
            where = page.evaluate(LEAVE_STOP)
            if where == "body":
                break
            assert where == "seen", where
            page.keyboard.press("Tab")
        else:
            pytest.fail(f"Tab never leaves {view}")
        missed = page.locator("[data-stop]")
        assert missed.evaluate_all("all => all.map(one => one.outerHTML.slice(0, 200))") == []


def test_back_leads_to_the_previous_view(page: Page) -> None:
    page.locator("header a[href='#attention']").click()
    expect(page.locator("#attention")).to_be_visible()
    page.go_back()
    expect(page.locator("#playground")).to_be_visible()
    expect(page.locator("#attention")).to_be_hidden()
    for nowhere in ("#toString", "#main"):
        page.goto(page.url.split("#")[0] + "#model")
        expect(page.locator("#model")).to_be_visible()
        page.goto(page.url.split("#")[0] + nowhere)
        page.evaluate(NEXT_TASK)
        assert page.locator("main > section:visible").evaluate_all(
            "all => all.map(one => one.id)"
        ) == ["model"]


def test_a_state_written_late_does_not_undo_a_link(page: Page) -> None:
    expect(page.locator("#playground")).to_be_visible()
    page.evaluate("location.hash = '#model'; dispatchEvent(new Event('kvasir:state'))")
    expect(page.locator("#model")).to_be_visible()
    assert page.url.endswith("#model")


def test_the_page_works_without_storage(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(url)
    page.add_init_script(
        "for (const name of ['localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, name,"
        " { get() { throw new DOMException('denied', 'SecurityError'); } });"
    )
    page.reload()
    expect(page.locator("#served")).to_contain_text("stdlib")
    page.get_by_role("button", name="Theme").click()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    generate(page)


def test_no_view_is_shown_before_the_server_answers(browser: Browser, url: str) -> None:
    """The page retries until the server answers, without a reload."""
    page = browser.new_context().new_page()  # unwatched: browsers log failed requests as errors
    stop_clock(page)
    asked: list[Route] = []

    def answer(route: Route) -> None:
        asked.append(route)
        if len(asked) == 1:
            route.abort()
        elif len(asked) == 2:
            route.fulfill(
                status=503, headers={"retry-after": "3600"}, json={"error": {"message": "not yet"}}
            )
        else:
            route.continue_()

    page.route(CARD, answer)
    page.goto(url)
    views, failure = page.locator("main > section:visible"), page.locator("#failure")
    expect(failure).to_contain_text("cannot reach the server")
    page.locator("header a[href='#live']").click()
    assert views.count() == 0
    page.clock.fast_forward("00:02")
    expect(failure).to_contain_text("not yet")
    page.clock.fast_forward("58:00")
    page.evaluate("fetch('health/live')")  # all earlier requests have been counted then
    assert len(asked) == 2
    page.clock.fast_forward("02:00")
    expect(page.locator("#live")).to_be_visible()
    expect(failure).to_be_hidden()
    page.context.close()


@pytest.mark.refusals
def test_a_key_is_requested_if_the_server_needs_one(
    open_page: Callable[..., Page], guarded_url: str, axe_findings: Callable[[Page], list[str]]
) -> None:
    page = open_page(guarded_url)
    field, error = page.get_by_label("API key"), page.locator("#key-error")
    expect(field).to_be_visible()
    expect(error).to_be_hidden()
    assert axe_findings(page) == []
    page.locator("header a[href='#attention']").click()
    assert page.locator("main > section:visible").count() == 0
    for wrong, message in (
        ("wrong", "rejected this key"),
        ("wrong key", "must not contain spaces"),
        ("\u043a\u043b\u044e\u0447\U0001f511", "rejected this key"),
    ):
        field.fill(wrong)
        page.keyboard.press("Enter")
        expect(error).to_contain_text(message)
        expect(field).to_be_visible()
    field.fill(f" {KEY}\t")  # as copied, with whitespace
    page.keyboard.press("Enter")
    expect(field).to_be_hidden()
    expect(page.locator("#main")).to_be_focused()
    expect(page.locator("#attention")).to_be_visible()
    expect(page.locator("#served")).to_contain_text("stdlib")
    page.reload()  # the key stays in this tab
    expect(page.locator("#served")).to_contain_text("stdlib")
    page.locator("header a[href='#model']").click()
    page.get_by_role("link", name="model card as JSON").click()
    page.wait_for_url("blob:**")
    expect(page.locator("body")).to_contain_text('"max_num_seqs":')
    page.go_back()
    page.get_by_role("button", name="Forget key").click()
    expect(field).to_be_visible()
    expect(page.get_by_role("button", name="Forget key")).to_be_hidden()
    page.reload()
    expect(field).to_be_visible()

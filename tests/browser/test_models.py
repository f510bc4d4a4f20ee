"""A server of several models: the chooser, and a prompt that two of them answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.playground import answer, generate, part, setting, wait_until_done

OTHER = "numbers"


@pytest.fixture
def page(open_page: Callable[..., Page], models_url: str) -> Page:
    return open_page(models_url)


def bodies(page: Page, path: str) -> list[dict[str, Any]]:
    """Return the list to which the bodies of later requests for a path are added."""
    sent: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda asked: sent.append(asked.post_data_json) if asked.url.endswith(path) else None,
    )
    return sent


def test_the_chooser_leads_to_another_model(page: Page) -> None:
    page.locator("header a[href='#live']").click()
    page.locator("#chooser").press("Enter")
    expect(page.locator("#models")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    link = page.get_by_role("link", name=OTHER)
    expect(link).to_be_focused()
    expect(link).to_have_text(f"{OTHER} translate")
    with page.expect_request(f"**/debug/batch?model={OTHER}"):
        page.keyboard.press("Enter")
    expect(page.locator("#live")).to_be_visible()
    expect(page.get_by_role("button", name=f"Model: {OTHER}")).to_be_visible()
    page.locator("header a[href='#model']").click()
    expect(page.locator("#model-title")).to_have_text(f"Model: {OTHER}")
    page.locator("header a[href='#batches']").click()
    assert json.loads(page.locator("#batch-line").inner_text())["body"]["model"] == OTHER
    page.locator("header a[href='#playground']").click()
    assert generate(page)["model"] == OTHER
    explained = bodies(page, "/explain")
    page.locator("header a[href='#attention']").click()
    expect(page.locator("#alignment-card")).to_be_visible()
    expect(page.locator("#explained:not([aria-busy])")).to_be_visible()
    assert {one["model"] for one in explained} == {OTHER}


def test_the_chooser_shows_adapters_and_follows_a_load(page: Page, models_url: str) -> None:
    """Of a list as a server with adapters and a folder of models has it."""
    listed = page.request.get(f"{models_url}/v1/models").json()
    first, other = listed["data"]
    other["state"] = "loading"
    listed["data"].append(first | {"id": "poet", "parent": first["id"], "state": "unloaded"})
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    page.locator("#chooser").click()
    link = page.get_by_role("link", name=OTHER)
    expect(link).to_contain_text("translate, loading")
    expect(page.get_by_role("progressbar", name=f"{OTHER} is being loaded")).to_be_visible()
    poet = page.get_by_role("link", name="poet")
    expect(poet).to_have_text(f"poet adapter of {first['id']}, unloaded")
    poet.focus()
    other["state"] = "ready"
    expect(link).to_have_text(f"{OTHER} translate")
    expect(page.get_by_role("progressbar")).to_have_count(0)
    expect(poet).to_be_focused()


def test_two_models_answer_a_prompt(
    page: Page,
    models_url: str,
    open_page: Callable[..., Page],
    check_looks: Callable[[Page, str], None],
) -> None:
    expect(page.locator("#other")).to_be_hidden()
    page.get_by_label("Compare two settings or models").check()
    page.get_by_label("Model of B").select_option(OTHER)
    expect(page.get_by_role("heading", name=f"Text B · {OTHER}")).to_be_visible()
    page.locator("#prompt").fill("seven hundred and six")
    setting(page, "temperature", "b").fill("0")
    setting(page, "seed").fill("5")
    sent = bodies(page, "/completions")
    page.locator("#generate").click()
    wait_until_done(page)
    texts = {run: part(page, "text", run).locator("> span[data-level]") for run in "ab"}
    assert [body["model"] for body in sent] == ["stdlib", OTHER]
    for run, body in zip("ab", sent, strict=True):
        tokens = answer(page, models_url, body)["choices"][0]["logprobs"]["tokens"]
        assert texts[run].all_text_contents() == tokens
    expect(texts["b"].first).to_have_text("7")
    check_looks(page, "compare")
    shown = {run: part(page, "text", run).text_content() or "" for run in "ab"}
    link = page.url
    page.reload()  # what is stored has the model of B, too
    expect(page.get_by_label("Model of B")).to_have_value(OTHER)
    expect(setting(page, "temperature", "b")).to_have_value("0")
    again = open_page(link)
    for run, text in shown.items():
        expect(part(again, "text", run)).to_have_text(text, use_inner_text=False)


@pytest.mark.refusals
def test_an_unknown_model_leaves_the_choice(
    open_page: Callable[..., Page], models_url: str
) -> None:
    page = open_page(f"{models_url}/?model=number")
    expect(page.locator("#failure")).to_contain_text(OTHER)  # the API says which it may be
    page.locator("#chooser").click()
    page.get_by_role("link", name=OTHER).click()
    expect(page.locator("#welcome")).to_contain_text(f"This is {OTHER}")
    expect(page.locator("#failure")).to_be_hidden()

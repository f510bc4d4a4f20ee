"""Branches of an answer, the way from a token to its attention, and links to an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.playground import answer, figure, generate, part, setting, wait_until_done


def tokens(page: Page) -> Locator:
    return part(page, "text").locator("> span")


def branch(page: Page, place: int, choice: int = 0) -> tuple[str, str]:
    """Take an alternative of a token. Return its name, and the text before the token."""
    before = "".join(tokens(page).all_text_contents()[:place])
    tokens(page).nth(place).click()
    taken = page.locator("#token-popover li button").nth(choice)
    name = taken.locator("code").inner_text()
    with page.expect_request("**/v1/completions"):
        taken.click()
    page.mouse.move(0, 0)  # off the new text, whose tokens have tooltips
    expect(page.locator("#token-popover")).to_be_hidden()
    expect(page.locator("#stop")).to_be_disabled()
    return name, before


def test_a_text_goes_on_from_an_alternative(page: Page, url: str, tmp_path: Path) -> None:
    setting(page, "max_tokens").fill("40")
    setting(page, "seed").fill("1")
    generate(page)
    first = part(page, "text").text_content() or ""
    tree = page.get_by_role("navigation", name="Branches")
    expect(tree).to_be_hidden()
    _, before = branch(page, 5)
    second = part(page, "text").text_content() or ""
    assert second.startswith(before)
    assert second != first
    expect(tokens(page)).to_have_count(40)
    branch(page, 20, 1)
    third = part(page, "text").text_content()
    expect(tree.locator("li")).to_have_count(3)
    for place, text in ((0, first), (1, second), (2, third)):
        tree.locator("li > button").nth(place).click()
        expect(part(page, "text")).to_have_text(text or "", use_inner_text=False)
        expect(tree.locator("[aria-current]")).to_be_focused()
    with page.expect_download() as saved:
        tree.get_by_role("button", name="Export branches").click()
    saved.value.save_as(tmp_path / "branches.json")
    branches = json.loads((tmp_path / "branches.json").read_text(encoding="utf-8"))["branches"]
    assert [one["parent"] for one in branches] == [None, 0, 1]
    assert [one["text"] for one in branches] == [first, second, third]
    for one in branches[1:]:  # each is what the API answers to the same tokens
        prompt = one["request"]["body"]["prompt"]
        repeated = answer(page, url, one["request"]["body"])["choices"][0]
        assert prompt + repeated["token_ids"] == one["prompt_token_ids"] + one["token_ids"]
        assert one["text"].endswith(repeated["text"])
        assert (
            one["token_ids"][: one["position"]]
            == branches[one["parent"]]["token_ids"][: one["position"]]
        )
    generate(page)
    expect(tree).to_be_hidden()


def test_a_pinned_token_is_left(page: Page, axe_findings: Callable[[Page], list[str]]) -> None:
    setting(page, "max_tokens").fill("8")
    generate(page)
    tokens(page).nth(2).focus()
    page.keyboard.press("Enter")
    popover = page.get_by_role("dialog", name="Token")
    expect(popover.locator(":focus")).to_have_count(1)
    assert axe_findings(page) == []
    heights = popover.locator("button, a").evaluate_all("all => all.map(one => one.offsetHeight)")
    assert min(heights) >= 24
    page.keyboard.press("Escape")
    expect(popover).to_be_hidden()
    expect(tokens(page).nth(2)).to_be_focused()
    tokens(page).nth(4).click()
    expect(popover).to_be_visible()
    page.locator("h1").click()
    expect(popover).to_be_hidden()
    tokens(page).nth(2).click()
    expect(popover).to_be_visible()
    with page.expect_request("**/v1/completions"):
        page.keyboard.press("Control+Enter")
    expect(page.locator("#stop")).to_be_disabled()
    expect(popover).to_be_hidden()


def test_a_token_leads_to_the_attention_behind_it(page: Page) -> None:
    setting(page, "max_tokens").fill("8")
    generate(page)
    texts = tokens(page).all_text_contents()
    tokens(page).nth(3).click()
    page.get_by_role("link", name="Why this token?").click()
    expect(page.locator("#attention")).to_be_visible()
    view, _, query = urlsplit(page.url).fragment.partition("?")
    prompt = page.locator("#prompt").input_value()
    assert view == "attention"
    assert parse_qs(query)["prompt"] == [prompt + "".join(texts[:3])]


@pytest.mark.parametrize("kind", ["completion", "comparison", "chat"])
def test_a_link_reproduces_an_answer(
    kind: str, open_page: Callable[..., Page], url: str, chat_url: str
) -> None:
    page = open_page(chat_url if kind == "chat" else url)
    setting(page, "max_tokens").fill("20")
    setting(page, "stop").fill("zzz")
    setting(page, "ignore_eos").check()
    if kind == "chat":
        page.get_by_label("System message").fill("Be brief.")
        page.get_by_label("Your message").fill("def main():")
    else:
        page.locator("#prompt").fill("import ☃ & 50% #")
    if kind == "comparison":
        page.get_by_label("Compare two settings").check()
        setting(page, "temperature", "b").fill("1")
        setting(page, "seed", "b").fill("7")
    runs = ("a", "b") if kind == "comparison" else ("a",)
    sent = generate(page)
    texts = [part(page, "text", run).text_content() or "" for run in runs]
    other = open_page(page.url)
    wait_until_done(other)
    for run, text in zip(runs, texts, strict=True):
        expect(figure(other, "ending", run)).to_have_text("length (max_tokens)")
        assert part(other, "text", run).text_content() == text
    assert generate(other) == sent
    other.goto(page.url.split("?")[0] + "?messages=%7B&form=x")  # not of this page
    generate(other)


def test_a_link_reproduces_a_branch(
    page: Page, open_page: Callable[..., Page], chat_url: str
) -> None:
    for shown in (page, open_page(chat_url)):
        setting(shown, "max_tokens").fill("40")
        setting(shown, "seed").fill("1")
        setting(shown, "ignore_eos").check()
        if shown is not page:
            shown.get_by_label("Your message").fill("def main():")
        generate(shown)
        branch(shown, 5)
        second, link_of_second = part(shown, "text").text_content() or "", shown.url
        setting(shown, "temperature").fill("2")  # of later requests
        branch(shown, 20, 1)
        third, link_of_third = part(shown, "text").text_content() or "", shown.url
        links = [link_of_second, link_of_third]
        tree = shown.get_by_role("navigation", name="Branches")
        tree.locator("li > button").nth(1).click()
        expect(part(shown, "text")).to_have_text(second, use_inner_text=False)
        assert shown.url == link_of_second
        for n_branches, link, text in zip((2, 3), links, (second, third), strict=True):
            other = open_page(link)
            known = other.get_by_role("navigation", name="Branches").locator("li > button")
            expect(known).to_have_count(n_branches)
            expect(known.nth(n_branches - 1)).to_have_attribute("aria-current", "true")
            expect(part(other, "text")).to_have_text(text, use_inner_text=False)
            expect(other.locator("#stop")).to_be_disabled()
            assert other.url == link
    other = open_page(f"{link_of_third}-x.9")  # no step of that answer
    expect(other.locator("#generation-status")).to_contain_text("Done.")

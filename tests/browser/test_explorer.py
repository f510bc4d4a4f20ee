"""The attention explorer: it shows POST /explain, and only the last request counts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode, urljoin

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import KEY
from tests.browser.playground import CARD

TEXT = "The studious student graduated with honors."
LINK = f"#attention?{urlencode({'prompt': TEXT})}"
MAP, WEIGHT = "#map", "#weight"


def explanation(page: Page, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = page.request.post(
        urljoin(page.url, "explain"), data=body, fail_on_status_code=True
    ).json()
    return answer


@pytest.fixture
def explorer(open_page: Callable[..., Page], url: str) -> Page:
    page = open_page(f"{url}/{LINK}")
    wait_until_settled(page)
    return page


def wait_until_settled(page: Page) -> None:
    expect(page.locator("#explained:not([aria-busy])")).to_be_visible(timeout=30_000)


def explain(page: Page, text: str) -> None:
    page.get_by_label("Input text").fill(text)
    page.keyboard.press("Control+Enter")


def shown_tokens(page: Page) -> list[str]:
    tokens: list[str] = page.locator("#strip button").all_inner_texts()
    return tokens


def quoted(token: str) -> str:
    return f"\u2018{token}\u2019"


def visible(token: str) -> str:
    return token.replace(" ", "·").replace("\n", "↵")


def shown_weights(page: Page) -> list[float | None]:
    """Return the weights that shade the text; None is masked."""
    titles = page.locator("#strip button").evaluate_all(
        "buttons => buttons.map(button => button.title)"
    )
    return [None if title == "masked" else float(title) for title in titles]


def expected_weights(row: list[float], query: int) -> list[Any]:
    return [
        pytest.approx(weight, abs=5e-5) if key <= query else None for key, weight in enumerate(row)
    ]


def test_weights_and_next_tokens_match_the_api(explorer: Page) -> None:
    expected = explanation(explorer, text=TEXT, layers=[0, 1, 2, 3])
    tokens, n = expected["tokens"], len(expected["tokens"])
    assert shown_tokens(explorer) == [visible(token) for token in tokens]
    rows = explorer.locator("#next-tokens button")
    assert rows.locator(".token-name").all_inner_texts() == [
        visible(one["text"]) for one in expected["next_tokens"]
    ]
    for share, one in zip(
        rows.locator(".next-share").all_inner_texts(), expected["next_tokens"], strict=True
    ):
        percent = f"{100 * one['probability']:.1f}".removesuffix(".0")
        expected_share = percent if one["probability"] >= 0.001 else "< 0.1"
        assert share.replace("\xa0", " ") == f"{expected_share} %"
    expect(explorer.locator("#contract")).to_contain_text(re.compile(r"✓ .*\d.*e-[678]\)"))
    for one in random.sample(expected["attention"], 4):
        explorer.get_by_label("Layer", exact=True).select_option(str(one["layer"]))
        explorer.get_by_label("Head", exact=True).select_option(str(one["head"]))
        wait_until_settled(explorer)
        query = random.randrange(n)
        explorer.locator("#strip button").nth(query).click()
        explorer.mouse.move(0, 0)
        assert shown_weights(explorer) == expected_weights(one["weights"][query], query)


def test_the_map_works_with_the_keyboard(explorer: Page) -> None:
    [of_head] = explanation(explorer, text=TEXT, heads=[0])["attention"]
    tokens = shown_tokens(explorer)
    last = len(tokens) - 1
    explorer.locator(MAP).focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft"):  # the first selects the last row's last column
        explorer.locator("#strip button").first.hover()  # the pointer must not move the cell
        explorer.locator("#explained h3").first.hover()
        explorer.keyboard.press(key)
    weight = of_head["weights"][last - 1][last - 1]
    expect(explorer.locator(WEIGHT)).to_contain_text(
        f"{quoted(tokens[-2])} attends to {quoted(tokens[-2])}: {weight:.4f}"
    )
    expect(explorer.locator(WEIGHT)).to_have_attribute("aria-live", "polite")
    explorer.keyboard.press("ArrowRight")
    expect(explorer.locator(WEIGHT)).to_contain_text(
        f"does not see {quoted(tokens[-1])}, which comes later"
    )
    explorer.keyboard.press("Enter")
    expect(explorer.locator("#strip button").nth(last - 1)).to_have_attribute(
        "aria-pressed", "true"
    )
    explorer.locator("#heads input:checked").focus()
    explorer.keyboard.press("ArrowRight")
    expect(explorer.get_by_label("Head", exact=True)).to_have_value("1")


def test_the_pointer_reads_and_pins(explorer: Page) -> None:
    canvas = explorer.locator(f"{MAP} canvas")
    box = canvas.bounding_box()
    assert box is not None
    canvas.hover(position={"x": box["width"] - 5, "y": box["height"] - 5})
    expect(explorer.locator(WEIGHT)).to_contain_text("row 17, column 17")
    expect(explorer.locator(WEIGHT)).to_have_attribute("aria-live", "off")
    canvas.click(position={"x": 5, "y": box["height"] - 45})  # a token's name on the left
    expect(explorer.locator("#strip button[aria-pressed='true']")).to_have_count(1)
    expect(explorer.locator("#strip button").nth(16)).to_have_attribute("aria-pressed", "true")


def test_a_next_token_can_be_appended(explorer: Page) -> None:
    [likeliest] = explanation(explorer, text=TEXT, heads=[0], top_k=1)["next_tokens"]
    explorer.locator("#next-tokens button").first.press("Enter")
    expect(explorer.locator("#strip button")).to_have_count(19)
    expect(explorer.get_by_label("Input text")).to_have_value(TEXT + likeliest["text"])
    expect(explorer.locator("#next-tokens button").first).to_be_focused()
    expect(explorer.locator("#next-note")).to_be_hidden()


def test_only_the_last_request_counts(explorer: Page) -> None:
    """A late response to an earlier request changes nothing."""
    held: list[Route] = []

    def hold_slow(route: Route) -> None:
        held.append(route) if "slow" in (route.request.post_data or "") else route.continue_()

    explorer.route("**/explain", hold_slow)
    with explorer.expect_request("**/explain"):
        explain(explorer, "slow words")
    explain(explorer, "fast words")
    explorer.get_by_label("Layer", exact=True).select_option("3")
    wait_until_settled(explorer)
    expected = explanation(explorer, text="fast words", layers=[3], heads=[0])
    for route in held:
        route.abort()
    assert shown_tokens(explorer) == [visible(token) for token in expected["tokens"]]
    last = len(expected["tokens"]) - 1
    assert shown_weights(explorer) == expected_weights(
        expected["attention"][0]["weights"][last], last
    )
    expect(explorer.locator("#heads-layer")).to_have_text("3")


def test_parts_of_characters_are_shown_as_bytes(explorer: Page) -> None:
    text = explorer.get_by_label("Input text")
    explain(explorer, "# caf\u00e9")
    wait_until_settled(explorer)
    assert shown_tokens(explorer)[-2:] == ["bytes:\\xc3", "bytes:\\xa9"]

    def as_if_likely(route: Route) -> None:
        answer = route.fetch().json()
        if answer["next_tokens"]:
            answer["next_tokens"][0]["text"] = "bytes:\\xc3"
        route.fulfill(json=answer)

    explorer.route("**/explain", as_if_likely)
    explain(explorer, "# caf")
    first, second = (explorer.locator("#next-tokens button").nth(place) for place in range(2))
    expect(first).to_have_attribute("aria-disabled", "true")
    first.click(force=True)
    expect(text).to_have_value("# caf")
    second.click()
    expect(text).not_to_have_value("# caf")
    assert text.input_value().startswith("# caf")
    wait_until_settled(explorer)


def test_the_last_row_of_a_new_text_is_visible(explorer: Page) -> None:
    for n in (43, 60):
        explain(explorer, " a" * n)
        expect(explorer.locator("#strip button")).to_have_count(n)
        assert explorer.locator(MAP).evaluate(
            "map => map.scrollHeight - map.clientHeight - map.scrollTop < 1"
        )


@pytest.mark.refusals
def test_a_rejected_key_restores_the_selection(open_page: Any, guarded_url: str) -> None:
    page = open_page(guarded_url)
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#playground")).to_be_visible()
    page.goto(f"{page.url.split('#')[0]}{LINK}")
    wait_until_settled(page)
    layer, shown = page.get_by_label("Layer", exact=True), page.locator(MAP)

    def refuse(route: Route) -> None:
        route.fulfill(status=401, json={"error": {"message": "no valid API key"}})

    page.route("**/explain", refuse)
    layer.select_option("2")
    expect(page.locator("#explain-error")).to_have_text("no valid API key")
    expect(layer).to_have_value("0")
    expect(page.locator("#heads-layer")).to_have_text("0")
    expect(shown).to_have_attribute("aria-label", "Attention weights of layer 0, head 0")
    page.unroute("**/explain")
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(shown).to_have_attribute("aria-label", "Attention weights of layer 2, head 0")
    expect(layer).to_have_value("2")
    expect(page.locator("#explain-error")).to_be_hidden()
    wait_until_settled(page)
    page.route("**/explain", refuse)
    page.get_by_role("button", name="Switch layer 2, head 0 off").click()
    expect(page.locator("#explain-error")).to_be_visible()
    expect(page.locator("#switched")).to_have_text("All heads are on.")
    page.unroute("**/explain")
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#switched")).to_have_text("Off, by layer and head: 2.0")


@pytest.mark.refusals
def test_errors_are_shown_and_429_is_retried(explorer: Page) -> None:
    explain(explorer, "a b " * 280)
    expect(explorer.locator("#explain-error")).to_contain_text("at most 512 can be explained")
    expect(explorer.locator("#strip button")).to_have_count(18)
    asked: list[str] = []

    def refuse_once(route: Route) -> None:
        asked.append(route.request.url)
        if len(asked) > 1:
            route.continue_()
        else:
            route.fulfill(status=429, headers={"retry-after": "0"}, json={"error": {"message": ""}})

    explorer.route("**/explain", refuse_once)
    explorer.get_by_label("Input text").fill("Again")
    explorer.get_by_role("button", name="Explain").click()
    wait_until_settled(explorer)
    expect(explorer.locator("#explain-error")).to_be_hidden()
    expect(explorer.locator("#strip button").first).to_have_text("A")
    assert len(asked) >= 2


def test_a_long_text_is_fetched_in_parts(explorer: Page) -> None:
    text = " ".join(f"word{i}" for i in range(110))
    n = len(explanation(explorer, text=text, heads=[0])["tokens"])
    assert 6 * n**2 > 2**20  # too many weights for one response
    explain(explorer, text)
    expect(explorer.locator("#strip button")).to_have_count(n)
    wait_until_settled(explorer)
    expect(explorer.locator("#heads .head:not(.missing)")).to_have_count(6)
    assert explorer.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.fixture
def other_card(open_page: Callable[..., Page], url: str) -> Callable[..., Page]:
    """Open the explorer with a changed model card."""

    def opened(**changes: Any) -> Page:
        def change(route: Route) -> None:
            answer = route.fetch()
            card = answer.json()
            config = card["config"] | changes.get("config", {})
            route.fulfill(response=answer, json=card | changes | {"config": config})

        return open_page(f"{url}/{LINK}", prepare=lambda page: page.route(CARD, change))

    return opened


def test_invalid_weights_are_reported(other_card: Callable[..., Page]) -> None:
    """The model has no window. With a card that names one, it attends to masked tokens."""
    explorer = other_card(
        config={"sliding_window": 3, "sliding_window_layers": [0], "attention_softcap": 30.0}
    )
    wait_until_settled(explorer)
    expect(explorer.locator("#contract.error")).to_contain_text("outside the window")
    assert [one is None for one in shown_weights(explorer)] == [True] * 15 + [False] * 3
    expect(explorer.locator("#about-m")).to_contain_text("3 tokens", use_inner_text=True)
    expect(explorer.locator("#formula-usual")).to_be_hidden()
    expect(explorer.locator(".formula .with-cap").first).to_be_visible()
    expect(explorer.locator(".formula .with-bias")).to_be_hidden()
    explorer.get_by_label("Layer", exact=True).select_option("1")
    wait_until_settled(explorer)
    expect(explorer.locator("#contract")).to_contain_text("✓")
    expect(explorer.locator("#about-m")).to_contain_text("later tokens", use_inner_text=True)


@pytest.mark.parametrize(
    ("changes", "said"), [({"explain_limits": None}, "switched off"), ({}, "attention.onnx")]
)
def test_a_model_without_explanations_says_why(
    changes: dict[str, Any], said: str, other_card: Callable[..., Page]
) -> None:
    explorer = other_card(has_attention=False, **changes)
    expect(explorer.locator("#attention-missing")).to_contain_text(said, use_inner_text=True)
    expect(explorer.get_by_role("button", name="Explain")).to_be_hidden()
    if changes:  # nobody can mend it, so there is no link to the view
        expect(explorer.locator("header a[href='#attention']")).to_be_hidden()

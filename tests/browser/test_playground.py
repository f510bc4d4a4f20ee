"""The playground: requests, answers, errors, tokens and settings."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.playground import (
    CARD,
    CHARACTERS,
    answer,
    completion,
    figure,
    generate,
    part,
    setting,
    stop_clock,
    stream,
    wait_until_done,
)

LEVELS = (0.9, 0.5, 0.2, 0.05)
DEFAULT_FIELDS = {
    *("model", "prompt", "max_tokens", "seed", "logprobs"),
    *("return_token_ids", "stream", "stream_options"),
}
OPENING = "with open(path) as file:\n    return json.load("
PLACE = """async events => {
  const { Placement } = await import(new URL("static/playground/placement.js", document.baseURI));
  const placement = new Placement();
  const pieces = events.flatMap(([text, tokens]) => placement.push(text, tokens));
  return [...pieces, ...placement.flush()];
}"""
STOP_AT_THE_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector("[data-run=a] [data-part=text] span")) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("runs"), { childList: true, subtree: true })"""


def test_the_answer_is_shown(page: Page, url: str) -> None:
    setting(page, "max_tokens").fill("60")
    setting(page, "seed").fill("1")
    response = answer(page, url, generate(page))
    scored, usage = response["choices"][0]["logprobs"], response["usage"]
    shown = part(page, "text").locator("span").all()
    assert [span.text_content() for span in shown] == scored["tokens"]
    assert "".join(scored["tokens"]) == response["choices"][0]["text"]
    expect(figure(page, "prompt")).to_have_text(str(usage["prompt_tokens"]))
    expect(figure(page, "completion")).to_have_text(str(usage["completion_tokens"]))
    for i in range(0, 60, 7):
        likelihood = math.exp(scored["token_logprobs"][i])
        level = next((n for n, least in enumerate(LEVELS) if likelihood >= least), len(LEVELS))
        expect(shown[i]).to_have_attribute("data-level", str(level))
        shown[i].focus()
        bars = page.locator("#token-popover li")
        shares = [100 * math.exp(one) for one in scored["top_logprobs"][i].values()]
        percents = [f"{share:.1f}".removesuffix(".0") for share in shares if share >= 0.2]
        texts = [bar.inner_text().split("\n")[-1] for bar in bars.all()]
        assert texts[: len(percents)] == [f"{one}\N{NO-BREAK SPACE}%" for one in percents]


def test_only_changed_settings_are_sent(page: Page) -> None:
    assert set(generate(page)) == DEFAULT_FIELDS
    setting(page, "temperature").fill("0.125")  # finer than the slider
    setting(page, "stop").fill("zzz\\n\n\"'")
    setting(page, "ignore_eos").check()
    setting(page, "logit_bias").fill('{"0": -100}')
    setting(page, "seed").fill("7")
    body = generate(page)
    assert (body["temperature"], body["stop"], body["seed"]) == (0.125, ["zzz\n", "\"'"], 7)
    assert (body["ignore_eos"], body["logit_bias"]) == (True, {"0": -100})
    assert generate(page, "Regenerate")["seed"] == 8
    page.reload()
    expect(setting(page, "temperature")).to_have_value("0.125")
    part(page, "reset").click()
    assert set(generate(page)) == DEFAULT_FIELDS


def test_the_text_is_constrained(page: Page) -> None:
    form, rule = setting(page, "form"), setting(page, "form-rule")
    for kind, wrong, message in (
        ("json_schema", "{", "invalid JSON"),
        ("regex", " ", "a value is required"),
    ):
        form.select_option(kind)
        assert form.evaluate("select => select.offsetWidth") >= 100  # or its choice is cut off
        rule.fill(wrong)
        page.get_by_role("button", name="Generate", exact=True).click()  # sends nothing
        expect(page.locator("#setting-a-form-error")).to_contain_text(message)
        expect(rule).to_be_focused()
        expect(rule).to_have_attribute("aria-invalid", "true")
        expect(form).not_to_have_attribute("aria-invalid", "true")
    rule.fill("[0-9]{4}")
    expect(rule).not_to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Generate", exact=True).click()
    wait_until_done(page)
    expect(figure(page, "ending")).to_have_text("stop")
    assert part(page, "text").inner_text().strip().isdigit()


def test_stopping_keeps_the_text_and_frees_the_slot(page: Page, url: str) -> None:
    setting(page, "max_tokens").fill("1000")
    setting(page, "ignore_eos").check()
    page.evaluate(STOP_AT_THE_FIRST_TEXT)
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(figure(page, "ending")).to_have_text("stopped by user")
    assert part(page, "text").inner_text() != ""
    for _ in range(200):  # each takes at least a step of the engine
        answer(page, url, {"prompt": "a", "max_tokens": 1})
        if page.request.get(f"{url}/debug/batch").json()["sequences"] == []:
            break
    else:
        pytest.fail("the slot is still taken")


def test_comparing_changes_only_the_settings(page: Page, url: str) -> None:
    setting(page, "top_k").fill("50")
    page.get_by_label("Compare two settings").check()  # copies A but for the temperature
    expect(page.locator(".differs")).to_have_count(2)
    generate(page)
    prompt = page.locator("#prompt").input_value()
    greedy = answer(page, url, {"prompt": prompt, "max_tokens": 128, "temperature": 0})
    assert part(page, "text", "b").text_content() == greedy["choices"][0]["text"]
    assert part(page, "seed").inner_text() == part(page, "seed", "b").inner_text()
    one, other = (part(page, "text", run).locator("> span").all_text_contents() for run in "ab")
    parted = next(i for i, texts in enumerate(zip(one, other, strict=False)) if len({*texts}) > 1)
    for run in "ab":
        spans = part(page, "text", run).locator("> span")
        expect(spans.nth(parted)).to_have_class(re.compile("diverges"))
    expect(page.locator(".diverges")).to_have_count(2)
    setting(page, "temperature", "b").fill("0.6")
    expect(page.locator(".differs")).to_have_count(0)
    generate(page)
    assert part(page, "text").inner_text() == part(page, "text", "b").inner_text()
    expect(page.locator(".diverges")).to_have_count(0)


@pytest.mark.refusals
def test_an_error_of_the_api_is_shown_at_its_setting(
    page: Page, look: Callable[[Page, str], None]
) -> None:
    setting(page, "max_tokens").fill("1020")
    with page.expect_response("**/v1/completions") as refused:
        page.get_by_role("button", name="Generate", exact=True).click()
    message = refused.value.json()["error"]["message"]
    expect(page.get_by_role("alert").filter(has_text=message)).to_be_visible()
    expect(setting(page, "max_tokens")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#setting-a-max_tokens-error")).to_have_text(message)
    look(page, "playground-refused")
    setting(page, "max_tokens").fill("10")
    expect(page.locator("#setting-a-max_tokens-error")).to_be_hidden()
    setting(page, "logit_bias").fill("{")
    page.locator("#playground details").evaluate_all(
        "all => { for (const each of all) each.open = false; }"
    )
    page.get_by_role("button", name="Generate", exact=True).click()  # sends nothing
    expect(page.locator("#setting-a-logit_bias-error")).to_contain_text("invalid JSON")
    expect(page.locator("#setting-a-logit_bias")).to_be_focused()


def test_a_lost_connection_keeps_the_text(page: Page) -> None:
    stream(page, [completion("so far")], end="")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(part(page, "error")).to_contain_text("the connection was lost")
    expect(part(page, "text")).to_have_text("so far")
    expect(figure(page, "ending")).to_have_text("failed")


def test_an_invalid_event_fails_one_answer_only(browser: Browser, url: str) -> None:
    page = browser.new_context().new_page()  # unwatched: the page logs the error
    page.goto(url)
    stream(page, [completion("so far"), {"choices": 5}])
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(part(page, "error")).to_contain_text("cannot read the answer")
    expect(part(page, "text")).to_have_text("so far")
    page.unroute_all()
    generate(page)
    expect(part(page, "error")).to_be_hidden()
    page.context.close()


def test_text_and_tokens_are_matched(modules: Page) -> None:
    """Tokens split within characters, delayed text: nothing is lost, repeated or reordered."""
    rng = random.Random(0)
    for _ in range(50):
        whole = "".join(rng.choices(CHARACTERS, k=40))
        events = list(cut(whole, rng))
        events.append(("", [{"name": "end", "text": "<end>"}]))
        pieces = modules.evaluate(PLACE, events)
        assert "".join(piece["text"] for piece in pieces) == whole
        placed = [token["name"] for piece in pieces for token in piece["tokens"]]
        assert placed == [token["name"] for _, tokens in events for token in tokens]


def cut(whole: str, rng: random.Random) -> Iterator[tuple[str, list[dict[str, str | None]]]]:
    """Yield events of a stream: tokens of a few bytes, and text that may lag behind them."""
    raw, at, given = whole.encode(), 0, 0
    while at < len(raw):
        end = min(len(raw), at + rng.randint(1, 4))
        token: dict[str, str | None] = {"name": str(at), "text": None}
        with suppress(UnicodeDecodeError):
            token["text"] = raw[at:end].decode()
        known = len(raw[:end].decode(errors="ignore"))
        shown = known if end == len(raw) or rng.random() < 0.7 else rng.randint(given, known)
        yield whole[given:shown], [token]
        given, at = shown, end


def test_tokens_can_be_read_with_the_keyboard(page: Page) -> None:
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    wait_until_done(page)
    shown = part(page, "text").locator("span")
    shown.first.focus()
    page.keyboard.press("ArrowRight")
    expect(shown.nth(1)).to_be_focused()
    expect(page.get_by_role("tooltip")).to_be_visible()
    expect(shown.nth(1)).to_have_attribute("aria-describedby", "token-popover")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()
    page.keyboard.press("End")
    expect(shown.last).to_be_focused()
    page.keyboard.press("Tab")  # Tab stops once for all tokens
    expect(part(page, "copy")).to_be_focused()
    shown.nth(1).hover()
    expect(page.get_by_role("tooltip")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()


def test_the_focus_is_kept(page: Page) -> None:
    setting(page, "max_tokens").fill("8")
    generate(page)
    page.locator("#regenerate").focus()
    for _ in range(2):
        with page.expect_request("**/v1/completions"):
            page.keyboard.press("Enter")
        expect(page.locator("#stop")).to_be_disabled()
        expect(page.locator("#regenerate")).to_be_focused()
    part(page, "text").locator("span").first.focus()
    with page.expect_request("**/v1/completions"):
        page.keyboard.press("Control+Enter")
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#generate")).to_be_focused()


def test_alternatives_are_sorted_by_probability(page: Page) -> None:
    stream(page, [completion("8", -0.5, {"8": -0.5, "a": -1.5, "1": -2.5, "b": -3.5, "0": -4.5})])
    page.get_by_role("button", name="Generate", exact=True).click()
    part(page, "text").locator("span").hover()
    expect(page.locator("#token-popover li code")).to_have_text(["8", "a", "1", "b", "0"])


def test_text_cannot_affect_the_page(page: Page) -> None:
    """Markup stays text. Direction marks are visible and affect nothing else."""
    bait = "<img src=x onerror=alert(1)>"
    texts = [bait, "one", "\u202etwo", "three", "👩\u200d💻"]
    stream(page, [completion(text) for text in texts])
    page.locator("#prompt").fill(f"{bait}\u202eprompt ")
    page.get_by_role("button", name="Generate", exact=True).click()
    shown = part(page, "text").locator("> span")
    expect(shown).to_have_text(texts)
    expect(part(page, "prompt")).to_have_text(f"{bait}\u202eprompt ")
    assert page.locator("#playground img").count() == 0
    signs = [sign.get_attribute("data-sign") for sign in page.locator(".hidden-sign").all()]
    assert signs == ["U+202E", "U+202E"]
    lefts = [box["x"] for span in shown.all()[1:4] if (box := span.bounding_box())]
    assert lefts == sorted(lefts)
    shown.nth(2).hover()
    expect(page.locator("#token-popover li code").first).to_have_text("U+202Etwo")


def test_a_long_prompt_scrolls_to_the_answer(page: Page) -> None:
    setting(page, "max_tokens").fill("8")
    page.locator("#prompt").fill("\n".join(f"x = {i}" for i in range(99)))
    assert page.locator("#prompt").evaluate(
        "box => box.clientHeight < innerHeight / 2 && box.scrollHeight > box.clientHeight"
    )
    generate(page)
    box = part(page, "text").locator("..")
    assert box.evaluate("box => box.scrollHeight - box.clientHeight - box.scrollTop < 8")


def test_waiting_is_shown(page: Page) -> None:
    stop_clock(page)
    page.route("**/v1/completions", lambda _: None)  # never answered
    page.get_by_role("button", name="Generate", exact=True).click()
    page.clock.run_for(3000)
    expect(part(page, "waiting")).to_contain_text("3 s")
    page.get_by_role("button", name="Stop").click()
    expect(part(page, "waiting")).to_be_empty()


def test_invalid_stored_settings_are_ignored(page: Page) -> None:
    for stored in (
        "{",
        "5",
        '{"conversation": {"turns": 5}}',
        '{"settings": [{"form": ["none", ""], "max_tokens": "5"}]}',
        '{"settings": [{"max_tokens": "5000"}]}',
        '{"settings": [{"max_tokens": "many"}], "chat": true}',
    ):
        page.evaluate("stored => localStorage.setItem('kvasir-playground-stdlib', stored)", stored)
        page.reload()
        expect(page.locator("#prompt")).to_have_value(OPENING)
        expect(setting(page, "max_tokens")).to_have_value("128")
        expect(setting(page, "form")).to_have_value("any")


def test_another_model_has_other_settings_and_examples(page: Page, url: str) -> None:
    card = page.request.get(f"{url}/model").json()
    card |= {
        "model": "other",
        "source": {"name": "other"},
        "examples": [],
        "generation": {"temperature": 0.655},
    }
    setting(page, "temperature").fill("0.5")
    page.route(CARD, lambda route: route.fulfill(json=card))
    listed = {"data": [{"id": "other", "kind": "complete"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    page.reload()
    expect(page.locator("#welcome")).to_contain_text("other: 1.89M parameters in 4 layers")
    expect(page.locator("#prompt")).to_have_value("Once upon a time")
    expect(setting(page, "temperature")).to_have_value("0.655")
    assert setting(page, "temperature").evaluate("input => input.checkValidity()")
    page.locator("#welcome a").click()
    expect(page.locator("#model")).to_be_visible()


def test_shades_remain_with_forced_colours(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(url, forced_colors="active")
    colours = page.locator(".shades li").evaluate_all(
        "all => all.map(element => getComputedStyle(element).backgroundColor)"
    )
    assert len(set(colours)) == len(LEVELS) + 1


def test_texts_are_accessible(
    open_page: Callable[..., Page], chat_url: str, check_looks: Callable[[Page, str], None]
) -> None:
    page = open_page(chat_url)
    page.get_by_label("Completion").check()
    setting(page, "temperature").fill("2")  # gives all shades
    setting(page, "ignore_eos").check()
    generate(page)
    part(page, "text").locator("span").nth(5).focus()
    check_looks(page, "playground-text")
    page.get_by_label("Compare two settings").check()
    page.get_by_label("Chat", exact=True).check()
    page.get_by_label("Your message").fill("def main():")
    generate(page)
    part(page, "keep").click()
    check_looks(page, "playground-chat")

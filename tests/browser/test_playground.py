"""The playground: what it shows is what the API says, what it sends is what it says that it sends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.playground import (
    CHARACTERS,
    answer,
    completion,
    figure,
    generate,
    part,
    setting,
    stream,
)

LEVELS = (0.9, 0.5, 0.2, 0.05)
# Pieces of texts whose tokens end anywhere in a character, held back as the server does it; and whether all is placed.
PLACE = """async events => {
  const { Placement } = await import(new URL("static/playground/placement.js", document.baseURI));
  const placement = new Placement();
  return [...events.flatMap(([text, tokens]) => placement.push(text, tokens)), ...placement.flush()];
}"""
STOP_AT_THE_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector("[data-run=a] [data-part=text] span")) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("runs"), { childList: true, subtree: true })"""


def test_what_is_shown_is_what_the_api_says(page: Page, url: str) -> None:
    setting(page, "max_tokens").fill("60")
    setting(page, "seed").fill("1")
    said = answer(page, url, generate(page))
    scored, usage = said["choices"][0]["logprobs"], said["usage"]
    shown = part(page, "text").locator("span").all()
    assert [span.text_content() for span in shown] == scored["tokens"]
    assert "".join(scored["tokens"]) == said["choices"][0]["text"]
    expect(figure(page, "prompt")).to_have_text(str(usage["prompt_tokens"]))
    expect(figure(page, "completion")).to_have_text(str(usage["completion_tokens"]))
    for i in range(0, 60, 7):
        likelihood = math.exp(scored["token_logprobs"][i])
        level = next((n for n, least in enumerate(LEVELS) if likelihood >= least), len(LEVELS))
        expect(shown[i]).to_have_attribute("data-level", str(level))
        shown[i].focus()
        bars = page.locator("#token-popover li")
        shares = [100 * math.exp(one) for one in scored["top_logprobs"][i].values()]
        likely = [
            f"{share:.1f}".removesuffix(".0") + "\N{NO-BREAK SPACE}%"
            for share in shares
            if share >= 0.2
        ]
        assert [bar.inner_text().split("\n")[-1] for bar in bars.all()][: len(likely)] == likely


def test_only_what_differs_is_sent(page: Page) -> None:
    assert set(generate(page)) == {
        "model",
        "prompt",
        "max_tokens",
        "seed",
        "logprobs",
        "stream",
        "stream_options",
    }
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
    assert set(generate(page)) == {
        "model",
        "prompt",
        "max_tokens",
        "seed",
        "logprobs",
        "stream",
        "stream_options",
    }


def test_the_text_is_held_to_a_form(page: Page) -> None:
    form, rule = setting(page, "form"), setting(page, "form-rule")
    for kind, wrong, told in (
        ("json_schema", "{", "this is not JSON"),
        ("regex", " ", "nothing is written here yet"),
    ):
        form.select_option(kind)
        rule.fill(wrong)
        page.get_by_role("button", name="Generate", exact=True).click()  # sends nothing
        expect(page.locator("#setting-a-form-error")).to_contain_text(told)
        expect(rule).to_be_focused()
        expect(rule).to_have_attribute("aria-invalid", "true")
        expect(form).not_to_have_attribute("aria-invalid", "true")
    rule.fill("[0-9]{4}")
    expect(rule).not_to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(figure(page, "ending")).to_have_text("ended by itself")
    assert part(page, "text").inner_text().strip().isdigit()


def test_stopping_keeps_the_text_and_frees_the_row(page: Page, url: str) -> None:
    setting(page, "max_tokens").fill("1000")
    setting(page, "ignore_eos").check()
    page.evaluate(STOP_AT_THE_FIRST_TEXT)
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(figure(page, "ending")).to_have_text("stopped by you")
    assert part(page, "text").inner_text() != ""
    for _ in range(200):  # each a step of the engine, and more
        answer(page, url, {"prompt": "a", "max_tokens": 1})
        if page.request.get(f"{url}/debug/batch").json()["sequences"] == []:
            break
    else:
        pytest.fail("the row is still taken")


def test_two_settings_differ_by_nothing_else(page: Page, url: str) -> None:
    page.get_by_label("Compare two settings").check()
    generate(page)
    assert part(page, "text").inner_text() == part(page, "text", "b").inner_text()
    assert page.locator(".differs").count() == 0
    setting(page, "temperature", "b").fill("0")
    expect(page.locator(".differs")).to_have_count(2)
    generate(page)
    greedy = answer(
        page,
        url,
        {"prompt": page.locator("#prompt").input_value(), "max_tokens": 128, "temperature": 0},
    )
    assert part(page, "text", "b").text_content() == greedy["choices"][0]["text"]
    assert part(page, "seed").inner_text() == part(page, "seed", "b").inner_text()


@pytest.mark.refusals
def test_a_refusal_is_told_in_the_api_s_words(
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
    expect(page.locator("#setting-a-logit_bias-error")).to_contain_text("this is not JSON")
    expect(page.locator("#setting-a-logit_bias")).to_be_focused()


@pytest.mark.refusals
def test_it_says_when_to_try_again(page: Page) -> None:
    error = {"message": "too many wait", "type": "overloaded", "param": None, "code": None}
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(
            status=429, headers={"retry-after": "3"}, json={"error": error}
        ),
    )
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(part(page, "error")).to_have_text("too many wait · retry in 3 s")


def test_a_stream_that_breaks_off_keeps_its_text(page: Page) -> None:
    stream(page, [completion("so far")], end="")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(part(page, "error")).to_have_text("the stream broke off before its end")
    expect(part(page, "text")).to_have_text("so far")
    expect(figure(page, "ending")).to_have_text("broke off")


def test_an_event_that_is_none_of_the_api_breaks_one_answer_only(
    browser: Browser, url: str
) -> None:
    page = browser.new_context().new_page()  # unwatched: the page writes what it met to the console
    page.goto(url)
    stream(page, [completion("so far"), {"choices": 5}])
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(part(page, "error")).to_contain_text("the answer cannot be read: ")
    expect(part(page, "text")).to_have_text("so far")
    page.unroute_all()
    generate(page)
    expect(part(page, "error")).to_be_hidden()
    page.context.close()


def test_every_character_and_every_token_finds_its_place(page: Page) -> None:
    """Tokens cut anywhere, text that comes late: nothing is lost, doubled or out of order."""
    rng = random.Random(0)
    for _ in range(50):
        whole = "".join(rng.choices(CHARACTERS, k=40))
        events = list(cut(whole, rng))
        events.append(("", [{"name": "end", "text": "<end>"}]))
        pieces = page.evaluate(PLACE, events)
        assert "".join(piece["text"] for piece in pieces) == whole
        placed = [token["name"] for piece in pieces for token in piece["tokens"]]
        assert placed == [token["name"] for _, tokens in events for token in tokens]


def cut(whole: str, rng: random.Random) -> Iterator[tuple[str, list[dict[str, str | None]]]]:
    """Events of a stream: tokens of a few bytes, with the text that is complete or a part of it."""
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


def test_tokens_are_read_with_the_keyboard(page: Page) -> None:
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    expect(figure(page, "ending")).to_have_text("reached max_tokens")
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
    page.keyboard.press("Tab")  # one stop for all tokens
    expect(part(page, "copy")).to_be_focused()


def test_the_popover_goes_wherever_the_focus_is(page: Page) -> None:
    setting(page, "max_tokens").fill("8")
    generate(page)
    page.locator("#prompt").focus()
    part(page, "text").locator("span").nth(1).hover()
    expect(page.get_by_role("tooltip")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()


def test_the_focus_is_not_lost_to_a_button_that_goes(page: Page) -> None:
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


def test_alternatives_that_are_digits_stand_in_their_order(page: Page) -> None:
    stream(page, [completion("8", -0.5, {"8": -0.5, "a": -1.5, "1": -2.5, "b": -3.5, "0": -4.5})])
    page.get_by_role("button", name="Generate", exact=True).click()
    part(page, "text").locator("span").hover()
    expect(page.locator("#token-popover li code")).to_have_text(["8", "a", "1", "b", "0"])


def test_nothing_in_a_text_acts_on_the_page(page: Page) -> None:
    """Markup is text; marks that turn a text round are seen, and turn nothing else."""
    bait = "<img src=x onerror=alert(1)>"
    stream(page, [completion(text) for text in (bait, "one", "\u202etwo", "three", "👩\u200d💻")])
    page.locator("#prompt").fill(f"{bait}\u202eprompt ")
    page.get_by_role("button", name="Generate", exact=True).click()
    shown = part(page, "text").locator("> span")
    expect(shown).to_have_text(
        [bait, "one", "\u202etwo", "three", "👩\u200d💻"], use_inner_text=False
    )
    expect(part(page, "prompt")).to_have_text(f"{bait}\u202eprompt ")
    assert page.locator("#playground img").count() == 0
    assert [sign.get_attribute("data-sign") for sign in page.locator(".hidden-sign").all()] == [
        "U+202E",
        "U+202E",
    ]
    lefts = [box["x"] for span in shown.all()[1:4] if (box := span.bounding_box())]
    assert lefts == sorted(lefts)
    shown.nth(2).hover()
    expect(page.locator("#token-popover li code").first).to_have_text("U+202Etwo")


def test_the_end_of_the_text_is_seen_behind_a_long_prompt(page: Page) -> None:
    setting(page, "max_tokens").fill("8")
    page.locator("#prompt").fill("\n".join(f"x = {i}" for i in range(99)))
    assert page.locator("#prompt").evaluate(
        "box => box.clientHeight < innerHeight / 2 && box.scrollHeight > box.clientHeight"
    )
    generate(page)
    assert (
        part(page, "text")
        .locator("..")
        .evaluate("box => box.scrollHeight - box.clientHeight - box.scrollTop < 8")
    )


def test_it_says_that_it_waits(page: Page) -> None:
    page.clock.install()
    page.route("**/v1/completions", lambda _: None)  # never answered
    page.get_by_role("button", name="Generate", exact=True).click()
    page.clock.run_for(3000)
    expect(page.get_by_text("waiting for the first token… 3 s")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(part(page, "waiting")).to_be_empty()


def test_a_browser_that_keeps_nothing_will_do(page: Page) -> None:
    for place in ("localStorage", "sessionStorage"):
        page.add_init_script(
            f"Object.defineProperty(window, '{place}', {{ get() {{ throw new Error('denied'); }} }})"
        )
    page.reload()
    generate(page)


def test_what_cannot_be_used_of_what_was_kept_does_not_matter(page: Page) -> None:
    for kept in (
        "{",
        "5",
        '{"conversation": {"turns": 5}}',
        '{"settings": [{"form": ["none", ""], "max_tokens": "5"}]}',
        '{"settings": [{"max_tokens": "5000"}]}',
        '{"settings": [{"max_tokens": "many"}], "chat": true}',
    ):
        page.evaluate("kept => localStorage.setItem('kvasir-playground-stdlib', kept)", kept)
        page.reload()
        expect(page.locator("#prompt")).to_have_value("def read_json(path):")
        expect(setting(page, "max_tokens")).to_have_value("128")
        expect(setting(page, "form")).to_have_value("any")


def test_a_newcomer_is_told_what_is_served(page: Page) -> None:
    expect(page.locator("#welcome")).to_contain_text(
        "This is stdlib: 1.89M parameters in 4 layers, trained on 3.2M tokens of Python's standard library."
    )
    page.get_by_role("link", name="How it is built").click()
    expect(page.locator("#model")).to_be_visible()


def test_another_model_has_other_settings_and_examples(page: Page, url: str) -> None:
    card = page.request.get(f"{url}/model").json()
    card |= {"model": "other", "source": {"name": "other"}, "generation": {"temperature": 0.655}}
    setting(page, "temperature").fill("0.5")
    page.route("**/model", lambda route: route.fulfill(json=card))
    page.reload()
    expect(page.locator("#welcome")).to_contain_text("This is other: 1.89M parameters in 4 layers.")
    expect(page.locator("#prompt")).to_have_value("Once upon a time")
    expect(setting(page, "temperature")).to_have_value("0.655")
    assert setting(page, "temperature").evaluate("input => input.checkValidity()")


def test_shades_stay_where_colours_are_the_system_s(
    open_page: Callable[..., Page], url: str
) -> None:
    page = open_page(url, forced_colors="active")
    colours = [
        shade.evaluate("element => getComputedStyle(element).backgroundColor")
        for shade in page.locator(".shades li").all()
    ]
    assert len(set(colours)) == len(LEVELS) + 1


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
def test_texts_can_be_read_by_anyone(
    width: int,
    theme: str,
    open_page: Callable[..., Page],
    chat_url: str,
    look: Callable[[Page, str], None],
    serious_findings: Callable[[Page], list[str]],
) -> None:
    page = open_page(chat_url, color_scheme=theme, viewport={"width": width, "height": 800})
    page.get_by_label("Continue a text").check()
    setting(page, "temperature").fill("2")  # all shades
    generate(page)
    part(page, "text").locator("span").nth(5).focus()
    look(page, f"playground-text-{'wide' if width > 400 else 'narrow'}-{theme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert serious_findings(page) == []
    page.get_by_label("Compare two settings").check()
    page.get_by_label("Chat", exact=True).check()
    page.get_by_label("Your message").fill("def main():")
    generate(page)
    part(page, "keep").click()
    look(page, f"playground-chat-{'wide' if width > 400 else 'narrow'}-{theme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert serious_findings(page) == []

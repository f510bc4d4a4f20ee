"""The playground: what it shows is what the API says, what it sends is what it says that it sends."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

CHARACTERS = [
    "'",
    '"',
    "\\",
    "$",
    "`",
    "!",
    "\n",
    "\t",
    "#",
    "%",
    "&",
    "{",
    "}",
    "a",
    " ",
    "ä",
    "漢",
    "🙂",
    "\u2028",
    "\x7f",
]
LEVELS = (0.9, 0.5, 0.2, 0.05)
# Pieces of texts whose tokens end anywhere in a character, held back as the server does it; and whether all is placed.
PLACE = """async events => {
  const { Placement } = await import(new URL("static/placement.js", document.baseURI));
  const placement = new Placement();
  return [...events.flatMap(([text, tokens]) => placement.push(text, tokens)), ...placement.flush()];
}"""
STOP_AT_THE_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector("[data-run=a] [data-part=text] span")) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("runs"), { childList: true, subtree: true })"""


def setting(page: Page, name: str, run: str = "a") -> Locator:
    """The control, in a group that has been opened."""
    found = page.locator(f"#setting-{run}-{name}")
    for details in found.locator("xpath=ancestor::details").all():
        details.evaluate("details => { details.open = true; }")
    return found


def part(page: Page, name: str, run: str = "a") -> Locator:
    return page.locator(f"[data-run={run}] [data-part={name}]")


def figure(page: Page, name: str, run: str = "a") -> Locator:
    return page.locator(f"[data-run={run}] [data-figure={name}]")


def generate(page: Page, button: str = "Generate") -> dict[str, Any]:
    """To the end; what the page sent."""
    with page.expect_request(lambda asked: asked.method == "POST") as sent:
        page.get_by_role("button", name=button, exact=True).click()
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#generation-status")).to_have_text(re.compile("^Done: (reached|ended)"))
    body: dict[str, Any] = sent.value.post_data_json
    return body


def answer(page: Page, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The API's own, in one piece."""
    whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    response: dict[str, Any] = page.request.post(f"{url}/v1/completions", data=whole).json()
    return response


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
        wanted = [f"{share:.1f} %" for share in (100 * math.exp(one) for one in scored["top_logprobs"][i].values())]
        likely = [one for one in wanted if float(one[:-2]) >= 0.2 and one != "100.0 %"]
        assert [bar.inner_text().split("\n")[-1] for bar in bars.all()][: len(likely)] == likely


def test_only_what_differs_is_sent(page: Page) -> None:
    assert set(generate(page)) == {"model", "prompt", "max_tokens", "seed", "logprobs", "stream", "stream_options"}
    setting(page, "temperature").fill("0.25")
    setting(page, "stop").fill("zzz\\n\n\"'")
    setting(page, "ignore_eos").check()
    setting(page, "logit_bias").fill('{"0": -100}')
    setting(page, "seed").fill("7")
    body = generate(page)
    assert (body["temperature"], body["stop"], body["seed"]) == (0.25, ["zzz\n", "\"'"], 7)
    assert (body["ignore_eos"], body["logit_bias"]) == (True, {"0": -100})
    assert generate(page, "Regenerate")["seed"] == 8
    page.reload()
    expect(setting(page, "temperature")).to_have_value("0.25")
    part(page, "reset").click()
    assert set(generate(page)) == {"model", "prompt", "max_tokens", "seed", "logprobs", "stream", "stream_options"}


def test_the_text_is_held_to_a_form(page: Page) -> None:
    setting(page, "form").select_option("regex")
    setting(page, "form-rule").fill("[0-9]{4}")
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
    greedy = answer(page, url, {"prompt": page.locator("#prompt").input_value(), "max_tokens": 128, "temperature": 0})
    assert part(page, "text", "b").text_content() == greedy["choices"][0]["text"]
    assert part(page, "seed").inner_text() == part(page, "seed", "b").inner_text()


@pytest.mark.refusals
def test_a_refusal_is_told_in_the_api_s_words(page: Page, look: Callable[[Page, str], None]) -> None:
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
    page.locator("#playground details").evaluate_all("all => { for (const each of all) each.open = false; }")
    page.get_by_role("button", name="Generate", exact=True).click()  # sends nothing
    expect(page.locator("#setting-a-logit_bias-error")).to_contain_text("this is not JSON")
    expect(page.locator("#setting-a-logit_bias")).to_be_focused()


@pytest.mark.refusals
def test_it_says_when_to_try_again(page: Page) -> None:
    error = {"message": "too many wait", "type": "overloaded", "param": None, "code": None}
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(status=429, headers={"retry-after": "3"}, json={"error": error}),
    )
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(part(page, "error")).to_have_text("too many wait · retry in 3 s")


def test_a_stream_that_breaks_off_keeps_its_text(page: Page) -> None:
    def break_off(route: Route) -> None:
        scored = {
            "tokens": ["so far"],
            "token_logprobs": [-1.0],
            "top_logprobs": [{"so far": -1.0}],
            "text_offset": [0],
        }
        choice = {"index": 0, "text": "so far", "logprobs": scored, "finish_reason": None}
        event = json.dumps({"choices": [choice], "usage": None})
        route.fulfill(content_type="text/event-stream", body=f"data: {event}\n\n")

    page.route("**/v1/completions", break_off)
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(part(page, "error")).to_have_text("the stream broke off before its end")
    expect(part(page, "text")).to_have_text("so far")
    expect(figure(page, "ending")).to_have_text("broke off")


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


class _Stub(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    received: list[tuple[str, str | None, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.received.append((self.path, self.headers["authorization"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def stub() -> Iterator[tuple[str, list[tuple[str, str | None, Any]]]]:
    received: list[tuple[str, str | None, Any]] = []
    handler = type("Handler", (_Stub,), {"received": received})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


def run_python(program: str) -> dict[str, Any]:
    """What a program asks of the openai package."""
    asked: dict[str, Any] = {}

    def create(extra_body: dict[str, Any] | None = None, **fields: Any) -> list[Any]:
        asked.update(fields | (extra_body or {}))
        return []

    package = types.ModuleType("openai")
    completions = types.SimpleNamespace(create=create)
    package.OpenAI = lambda **_: types.SimpleNamespace(completions=completions)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "openai", package)
        exec(program, {})  # noqa: S102
    return asked


@pytest.mark.parametrize("seed", range(3))
def test_snippets_send_the_same_whatever_is_in_the_prompt(
    seed: int, page: Page, url: str, stub: tuple[str, list[tuple[str, str | None, Any]]]
) -> None:
    address, received = stub
    rng = random.Random(seed)
    page.locator("#prompt").fill("true" if seed == 0 else "".join(rng.choices(CHARACTERS, k=60)))
    setting(page, "stop").fill("'\n$HOME\n\\n")
    setting(page, "min_p").fill("0.05")
    setting(page, "form").select_option("json_schema")
    setting(page, "form-rule").fill('{"type": "string", "description": "it\'s"}')
    setting(page, "max_tokens").fill("1")
    sent = generate(page)
    page.get_by_role("button", name="Copy as curl or Python").click()
    command = page.locator("#as-curl").inner_text()
    subprocess.run(["bash", "-c", command.replace(url, address)], check=True, capture_output=True)  # noqa: S607
    assert received == [("/v1/completions", None, sent)]
    assert run_python(page.locator("#as-python").text_content() or "") == sent


@pytest.mark.refusals
def test_snippets_name_the_key_and_do_not_tell_it(open_page: Callable[..., Page], guarded_url: str) -> None:
    page = open_page(guarded_url)
    page.get_by_label("API key").fill("correct-horse")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy as curl or Python").click()
    expect(page.locator("#as-curl")).to_contain_text('-H "Authorization: Bearer $KVASIR_API_KEY"')
    expect(page.locator("#as-python")).to_contain_text('api_key=os.environ["KVASIR_API_KEY"]')
    assert "correct-horse" not in page.locator("#copy-dialog").inner_text()


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


def test_a_conversation_goes_on_from_what_was_edited(open_page: Callable[..., Page], chat_url: str) -> None:
    page = open_page(chat_url)
    setting(page, "max_tokens").fill("8")
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
    expect(page.get_by_label("assistant", exact=True)).to_have_value("    pass")


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

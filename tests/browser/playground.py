"""Helpers that use the playground, and fake answers of the API."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from playwright.sync_api import Locator, Page, Route, expect

CARD = re.compile(r"/model\?")  # the address of the model card
CHARACTERS = [*"'\"\\$`!\n\t#%&{}a ä漢🙂\u2028\x7f"]


def setting(page: Page, name: str, run: str = "a") -> Locator:
    """Return a control, after opening the groups that contain it."""
    found = page.locator(f"#setting-{run}-{name}")
    found.wait_for(state="attached")
    for details in found.locator("xpath=ancestor::details").all():
        details.evaluate("details => { details.open = true; }")
    return found


def part(page: Page, name: str, run: str = "a") -> Locator:
    return page.locator(f"[data-run={run}] [data-part={name}]")


def figure(page: Page, name: str, run: str = "a") -> Locator:
    return page.locator(f"[data-run={run}] [data-figure={name}]")


def generate(page: Page, button: str = "Generate") -> dict[str, Any]:
    """Generate to the end, and return the body that the page sent."""
    with page.expect_request(lambda asked: asked.method == "POST") as sent:
        page.get_by_role("button", name=button, exact=True).click()
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#generation-status")).to_have_text(
        re.compile(r"^Done\. Finish reason: (length|stop[,.])")
    )
    body: dict[str, Any] = sent.value.post_data_json
    return body


def wait_until_done(page: Page) -> None:
    expect(page.locator("#generation-status")).to_have_text(re.compile("^Done"))


def stop_clock(page: Page) -> None:
    """Let no time pass on a page but what `page.clock` adds."""
    page.clock.install(time=0)
    page.clock.pause_at(3600)


def answer(page: Page, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the API's unstreamed answer to the same body."""
    whole = {
        name: value for name, value in body.items() if name not in ("stream", "stream_options")
    }
    response: dict[str, Any] = page.request.post(f"{url}/v1/completions", data=whole).json()
    return response


def completion(
    text: str, logprob: float = -1.0, top: dict[str, float] | None = None
) -> dict[str, Any]:
    """Return an event of a stream with one token."""
    scored = {
        "tokens": [text],
        "token_logprobs": [logprob],
        "top_logprobs": [top or {text: logprob}],
        "text_offset": [0],
    }
    return {
        "choices": [{"index": 0, "text": text, "logprobs": scored, "finish_reason": None}],
        "usage": None,
    }


def stream(page: Page, events: Sequence[Any], end: str = "data: [DONE]\n\n") -> None:
    """Answer completions with the given events."""

    def answer(route: Route) -> None:
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(content_type="text/event-stream", body=body + end)

    page.route("**/v1/completions", answer)

"""Requests as curl and Python: both send what the page sends."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.playground import CHARACTERS, generate, setting


class _Stub(BaseHTTPRequestHandler):
    """Record every request."""

    received: list[tuple[str, str | None, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.received.append((self.path, self.headers["authorization"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


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
    """Return the arguments with which a program calls the openai package."""
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


@pytest.mark.parametrize("seed", range(2))
def test_snippets_send_the_same_request(
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
    page.locator("#prompt").fill("the next prompt")  # not sent
    setting(page, "temperature").fill("0")
    page.get_by_role("button", name="Copy as curl or Python").click()
    command = page.locator("#as-curl").inner_text()
    subprocess.run(["bash", "-c", command.replace(url, address)], check=True, capture_output=True)  # noqa: S607
    assert received == [("/v1/completions", None, sent)]
    assert run_python(page.locator("#as-python").text_content() or "") == sent


@pytest.mark.refusals
def test_snippets_do_not_contain_the_key(open_page: Callable[..., Page], guarded_url: str) -> None:
    page = open_page(guarded_url)
    page.get_by_label("API key").fill("correct-horse")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy as curl or Python").click()
    expect(page.locator("#as-curl")).to_contain_text('-H "Authorization: Bearer $KVASIR_API_KEY"')
    expect(page.locator("#as-python")).to_contain_text('api_key=os.environ["KVASIR_API_KEY"]')
    assert "correct-horse" not in page.locator("#copy-dialog").inner_text()


def test_shortcuts_do_nothing_behind_the_dialog(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.method))
    page.get_by_role("button", name="Copy as curl or Python").click()
    page.keyboard.press("Control+Enter")
    page.keyboard.press("Escape")
    expect(page.locator("#copy-dialog")).to_be_hidden()
    expect(page.locator("#stop")).to_be_disabled()
    assert "POST" not in asked

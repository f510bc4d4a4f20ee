"""Fixtures of the browser tests: real servers, used in Chromium (`make browser-test`).

They run in an environment that has Playwright and pytest, but not Kvasir. A test fails if its page
logs an error to the console, violates the content security policy, or sends a request to another
server. Screenshots are in build/browser/screenshots.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from kvasir.server.process.local_server import serve_locally  # noqa: E402  after the path

BUILD = ROOT / "build/browser"
PYTHON = ROOT / ".venv/bin/python"  # has Kvasir installed
EXAMPLE = ROOT / "examples/stdlib"
NUMBERS = ROOT / "examples/numbers"
KEY = "correct-horse"
CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    "",
)
CHAT_TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
WATCH_POLICY = (
    "window.violations = [];"
    "addEventListener('securitypolicyviolation', e => violations.push(e.blockedURI));"
)


def pytest_configure() -> None:
    if not CHROMIUM:
        pytest.exit("no chromium on the PATH; on Debian: apt-get install chromium", 2)
    expect.set_options(timeout=30_000)  # as long as actions wait: 5 seconds are short when busy


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the example model with four slots, and batches."""
    options = ("--max-num-seqs", "4", "--batch-dir", str(tmp_path_factory.mktemp("batches")))
    with serve_locally(EXAMPLE, *options, python=PYTHON) as started:
        yield started


@pytest.fixture(scope="session")
def models_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve both example models, a decoder and an encoder-decoder, and batches."""
    options = (str(NUMBERS), "--batch-dir", str(tmp_path_factory.mktemp("batches")))
    with serve_locally(EXAMPLE, *options, python=PYTHON) as started:
        wait_for_all_models(started)
        yield started


def wait_for_all_models(url: str) -> None:
    """Wait until a server of several models serves all of them: it listens with the first."""
    while True:
        with suppress(HTTPError):  # 503 while one is loading
            urlopen(f"{url}/health/ready").close()  # noqa: S310  our own server
            return


@pytest.fixture(scope="session")
def guarded_url() -> Iterator[str]:
    """Serve the example model with an API key."""
    with serve_locally(EXAMPLE, "--api-key", KEY, python=PYTHON) as started:
        yield started


@pytest.fixture(scope="session")
def chat_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the example model with a chat template."""
    directory = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(EXAMPLE, directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"]["chat_template.jinja"] = hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with serve_locally(directory, python=PYTHON) as started:
        yield started


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=arguments) as started,
    ):
        yield started


@pytest.fixture
def open_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Page]]:
    """Open pages in new browser contexts and watch them: open_page(url, color_scheme="dark").

    prepare: is called with a page before it loads anything.
    """
    may_refuse = request.node.get_closest_marker("refusals") is not None
    pages: list[Page] = []
    faults: list[str] = []

    def open_one(
        address: str, prepare: Callable[[Page], object] = lambda _: None, **options: Any
    ) -> Page:
        origin = "/".join(address.split("/")[:3]) + "/"
        page = browser.new_context(
            **{"viewport": {"width": 1280, "height": 800}} | options
        ).new_page()
        pages.append(page)
        page.add_init_script(WATCH_POLICY)
        page.on("console", lambda message: faults.extend(_fault(message, may_refuse=may_refuse)))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((origin, "blob:")) else faults.append(asked.url)
            ),
        )
        prepare(page)
        page.goto(address)
        return page

    yield open_one
    for page in pages:
        faults += page.evaluate("window.violations")
        page.unroute_all(behavior="ignoreErrors")  # else a handler fails the next test
        page.context.close()
    assert faults == []


def _fault(message: ConsoleMessage, *, may_refuse: bool) -> list[str]:
    if message.type != "error" or (
        may_refuse and message.text.startswith("Failed to load resource: the server")
    ):
        return []
    return [f"{message.text} ({message.location})"]


@pytest.fixture
def page(open_page: Callable[..., Page], url: str) -> Page:
    return open_page(url)


@pytest.fixture(scope="session")
def modules(browser: Browser, url: str) -> Page:
    """A page in which tests import modules alone, and change nothing."""
    page = browser.new_context().new_page()
    page.goto(url)
    return page


@pytest.fixture(scope="session")
def look() -> Callable[[Page, str], None]:
    """Save a screenshot."""
    folder = BUILD / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=folder / f"{name}.png", full_page=True) and None


@pytest.fixture(scope="session")
def axe_findings() -> Callable[[Page], list[str]]:
    """Return the findings of axe-core on a page."""
    source = (BUILD / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")

    def find(page: Page) -> list[str]:
        page.evaluate(source)
        found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
        return [
            f"{one['id']}: {node['target']} {node['failureSummary']}"
            for one in found
            for node in one["nodes"]
        ]

    return find


@pytest.fixture(scope="session")
def check_looks(
    look: Callable[[Page, str], None], axe_findings: Callable[[Page], list[str]]
) -> Callable[[Page, str], None]:
    """Check that a page fits and is accessible in a wide light window and in a narrow dark one."""

    def check(page: Page, name: str) -> None:
        for width, theme in ((1440, "light"), (390, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # else colours fade
            look(page, f"{name}-{width}-{theme}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert axe_findings(page) == []

    return check

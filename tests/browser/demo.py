"""Record docs/demo.gif, the page in fifteen seconds: `make demo`.

Each frame is a state of the page and not a moment, so every recording has the same frames: tokens
are revealed one by one after the answer has come, and figures that are times are hidden.
"""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, expect, sync_playwright

from kvasir.server.process.local_server import serve_locally
from tests.browser.conftest import CHROMIUM, EXAMPLE, PYTHON
from tests.browser.playground import generate, part, setting
from tests.browser.test_explorer import wait_until_settled

SIZE = {"width": 1000, "height": 760}
_COLOURS = 64
_PROMPT = "with open(path) as file:\n    return json.load("
_POINTER = """([x, y]) => {
    let pointer = document.getElementById("demo-pointer");
    if (!pointer) {
        pointer = document.createElementNS("http://www.w3.org/2000/svg", "svg");
        pointer.id = "demo-pointer";
        pointer.innerHTML = '<path d="M1 1v16l4-4 3 7 3-1-3-7h6z" fill="white" stroke="black"/>';
        const style = { position: "fixed", zIndex: 9, pointerEvents: "none", width: "20px" };
        Object.assign(pointer.style, style);
        document.body.append(pointer);
    }
    pointer.style.left = `${x}px`;
    pointer.style.top = `${y}px`;
}"""
_REVEAL = """(tokens, n) => tokens.forEach((token, i) => {
    token.style.visibility = i < n ? "" : "hidden";
})"""


class Recorder:
    """Frames of a page, their texts, and how long each is shown, in milliseconds."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.scroll = 0  # pixels: the page follows its text, at no fixed time
        self.frames: list[Image.Image] = []
        self.texts: list[str] = []
        self.durations: list[int] = []

    def shoot(self, milliseconds: int) -> None:
        """Add the page as it is, but for where it was scrolled to."""
        self._page.evaluate("y => scrollTo(0, y)", self.scroll)
        shot = Image.open(io.BytesIO(self._page.screenshot(animations="disabled")))
        self.frames.append(shot.convert("RGB"))
        self.texts.append(self._page.locator("main").inner_text())
        self.durations.append(milliseconds)

    def point(self, to: Locator, milliseconds: int = 500) -> None:
        """Move the pointer to an element."""
        self._page.evaluate("y => scrollTo(0, y)", self.scroll)
        box = to.bounding_box()
        assert box
        middle = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
        self._page.mouse.move(*middle)
        self._page.evaluate(_POINTER, middle)
        self.shoot(milliseconds)

    def click(self, on: Locator, milliseconds: int = 500) -> None:
        """Point at an element, then click it."""
        self.point(on, milliseconds)
        on.click()

    def reveal(self, tokens: Locator, milliseconds: int = 60) -> None:
        """Show tokens one after the other."""
        for n in range(tokens.count() + 1):
            tokens.evaluate_all(_REVEAL, n)
            self.shoot(milliseconds)

    def save(self, path: Path) -> None:
        """Write a GIF that repeats, with one palette, so that frames only hold what has changed."""
        some = self.frames[:: len(self.frames) // 6]
        width, height = some[0].size
        sheet = Image.new("RGB", (width, height * len(some)))
        for number, frame in enumerate(some):
            sheet.paste(frame, (0, height * number))
        palette = sheet.quantize(_COLOURS)
        first, *rest = (
            frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames
        )
        first.save(
            path, save_all=True, append_images=rest, duration=self.durations, loop=0, optimize=True
        )


def record(page: Page, n_tokens: int = 24) -> Recorder:
    """Write, take another token, ask why the model took the first, and switch a head off."""
    recorder = Recorder(page)
    setting(page, "temperature").fill("0")
    setting(page, "max_tokens").fill(str(n_tokens))
    prompt = page.locator("#prompt")
    prompt.fill(_PROMPT)
    page.evaluate("document.querySelectorAll('details').forEach(one => (one.open = false))")
    page.evaluate("document.activeElement.blur()")
    recorder.shoot(900)
    recorder.point(page.get_by_role("button", name="Generate", exact=True))
    generate(page)
    recorder.scroll = 330
    part(page, "figures").evaluate("one => (one.style.visibility = 'hidden')")
    tokens = part(page, "text").locator("> span")
    recorder.reveal(tokens)
    recorder.shoot(800)

    popover = page.locator("#token-popover")
    recorder.click(tokens.first)
    recorder.shoot(700)
    recorder.point(popover.get_by_role("button").first)
    with page.expect_response("**/v1/completions"):
        popover.get_by_role("button").first.click()
    expect(page.locator("#stop")).to_be_disabled()
    part(page, "figures").evaluate("one => (one.style.visibility = 'hidden')")
    recorder.reveal(tokens)
    recorder.shoot(700)

    tree = page.get_by_role("navigation", name="Branches")
    recorder.click(tree.get_by_role("button").first)
    recorder.click(tokens.first)
    recorder.click(popover.get_by_role("link", name="Why this token?"))
    wait_until_settled(page)
    recorder.scroll = 190
    recorder.shoot(2000)

    recorder.scroll = 1040
    recorder.click(page.get_by_role("button", name=re.compile("^Switch layer .* off$")), 1200)
    expect(page.locator("#effect")).to_be_visible()
    wait_until_settled(page)
    recorder.shoot(2500)
    return recorder


def main(path: Path) -> None:
    """Record the example model's page."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        serve_locally(EXAMPLE, python=PYTHON) as url,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=arguments) as browser,
    ):
        page = browser.new_context(viewport=SIZE, reduced_motion="reduce").new_page()
        page.goto(url)
        recorder = record(page)
        recorder.save(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

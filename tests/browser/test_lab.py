"""The explorer's lab and lecture: heads switched off, layers' tokens, a row's numbers."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.playground import stop_clock
from tests.browser.test_explorer import explanation, wait_until_settled

TEXT = "with open(path) as file:\n    return json.load("
READ_CELLS = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
STEP = "#lecture-steps button"
EDGE = """async (base64) => {
    const bytes = Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
    const picture = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const pen = new OffscreenCanvas(1, 1).getContext("2d");
    pen.drawImage(picture, 2 - picture.width, 2 - picture.height);
    const edge = [...pen.getImageData(0, 0, 1, 1).data];
    document.body.style.color = "var(--accent)";
    pen.fillStyle = getComputedStyle(document.body).color;
    pen.fillRect(0, 0, 1, 1);
    return [picture.width, edge, [...pen.getImageData(0, 0, 1, 1).data]];
}"""


def link(page: Page, **state: Any) -> Page:
    page.goto(f"{page.url.split('#')[0]}#attention?{urlencode({'prompt': TEXT} | state)}")
    wait_until_settled(page)
    return page


def read(page: Page, rows: str) -> list[list[str]]:
    cells: list[list[str]] = page.locator(f"{rows} tr:visible").evaluate_all(READ_CELLS)
    return cells


def number(text: str) -> float:
    return float(text.replace("\u2212", "-").replace("\u221e", "inf"))


def percent(text: str) -> float:
    return float(text.removesuffix("\xa0%").removeprefix("<\xa0"))


def test_a_head_is_switched_off_and_on(page: Page) -> None:
    lab = link(page, layer=3, head=2)
    before = lab.locator("#next-tokens .next-share").first.inner_text()
    expect(lab.locator("#effect")).to_be_hidden()
    lab.get_by_role("button", name="Switch layer 3, head 2 off").press("Enter")
    expect(lab.locator("#effect")).to_be_visible()
    wait_until_settled(lab)
    off = [{"layer": 3, "head": 2}]
    expected = explanation(lab, text=TEXT, layers=[3], heads=[2], without=off)["effect"]
    assert f"{expected['kl_divergence']:.3f} bits" in lab.locator("#effect-caption").inner_text()
    rows = read(lab, "#effect-body")
    shown = sorted(expected["tokens"], key=lambda one: -one["whole_probability"])
    for (_, whole, without, change), one in zip(rows, shown, strict=True):
        assert percent(whole) == pytest.approx(100 * one["whole_probability"], abs=0.1)
        assert percent(without) == pytest.approx(100 * one["probability"], abs=0.1)
        assert number(change) == pytest.approx(one["logit"] - one["whole_logit"], abs=0.01)
    assert lab.locator("#next-tokens .next-share").first.inner_text() != before
    expect(lab).to_have_url(re.compile("&without=3.2$"))
    lab.reload()
    expect(lab.locator("#switched")).to_have_text("Off, by layer and head: 3.2")
    wait_until_settled(lab)
    lab.get_by_label("Head", exact=True).select_option("1")
    lab.get_by_role("button", name="Switch layer 3, head 1 off").click()
    expect(lab.locator("#switched")).to_have_text("Off, by layer and head: 3.2, 3.1")
    lab.get_by_role("button", name="Switch all on").click()
    expect(lab.locator("#switch")).to_be_focused()
    expect(lab.locator("#effect")).to_be_hidden()
    wait_until_settled(lab)
    assert lab.locator("#next-tokens .next-share").first.inner_text() == before


def test_layers_say_what_the_api_says_at_the_pinned_token(page: Page) -> None:
    lab = link(page, token=6)
    expected = explanation(lab, text=TEXT, heads=[0], position=6, lens=3)["lens"]
    for row, layer in zip(read(lab, "#lens"), expected, strict=True):
        assert int(row[0]) == layer["layer"]
        for cell, one in zip(row[1:], layer["next_tokens"], strict=True):
            assert percent(cell.split(" ")[-1] if "<" not in cell else "0.1\xa0%") == pytest.approx(
                100 * one["probability"], abs=0.1
            )
    lab.locator("#strip button").nth(9).click()
    expect(lab.locator("#lens-caption")).to_contain_text(
        "After \u2018\u00b7\u00b7\u00b7\u00b7\u2019"
    )


def test_the_most_focused_head_is_found(page: Page) -> None:
    """It is also where the view opens, on the example model's text."""
    lab = link(page)
    expected = explanation(lab, text=TEXT, heads=[0], entropies=True)["entropies"]
    least = min(
        (entropy, layer, head)
        for layer, row in enumerate(expected)
        for head, entropy in enumerate(row)
    )
    lab.get_by_role("button", name="Most focused head").click()
    wait_until_settled(lab)
    expect(lab.get_by_label("Head", exact=True)).to_have_value(str(least[2]))
    page.goto(page.url.split("#")[0])
    page.locator("header a[href='#attention']").click()
    wait_until_settled(page)
    expect(page.get_by_label("Input text")).to_have_value(TEXT)
    layer, head = (page.get_by_label(name, exact=True) for name in ("Layer", "Head"))
    expect(layer).to_have_value(str(least[1]))
    expect(head).to_have_value(str(least[2]))
    layer.select_option("0" if least[1] else "1")
    wait_until_settled(page)
    link(page, focused=1, layer=0)
    expect(layer).to_have_value(str(least[1]))
    expect(head).to_have_value(str(least[2]))


def test_the_lecture_shows_a_rows_numbers(page: Page) -> None:
    lab = link(page, layer=2, head=3, token=10)
    of = {"layer": 2, "head": 3}
    expected = explanation(lab, text=TEXT, layers=[2], heads=[3], head_values=of)
    values = expected["head_values"]
    scores, weights = values["scores"][10], expected["attention"][0]["weights"][10]
    scaled = [score * values["scale"] for score in scores]
    masked = [score if key <= 10 else -math.inf for key, score in enumerate(scaled)]
    columns = {"Scores": scores, "Scale": scaled, "Mask": masked, "Softmax": weights}
    for name, column in columns.items():
        lab.get_by_role("button", name=name).click()
        expect(lab.get_by_role("button", name=name)).to_have_attribute("aria-pressed", "true")
        shown = [number(cells[1]) for cells in read(lab, "#lecture-body")]
        assert shown == pytest.approx(column, rel=0.02, abs=1e-4)
    lab.locator("#strip button").nth(7).click()  # another row of the same values
    wait_until_settled(lab)
    shown = [number(cells[1]) for cells in read(lab, "#lecture-body")]
    assert shown == pytest.approx(expected["attention"][0]["weights"][7], rel=0.02, abs=1e-4)
    lab.get_by_role("button", name="Weighted values").press("Enter")
    rows = read(lab, "#lecture-body")
    assert (len(rows), rows[0][0]) == (len(weights) + 1, "Z")
    stop_clock(lab)
    lab.get_by_role("button", name="Play").click()
    expect(lab.locator(STEP).first).to_have_attribute("aria-pressed", "true")
    lab.clock.run_for(7000)
    expect(lab.locator(STEP).last).to_have_attribute("aria-pressed", "true")
    expect(lab.get_by_role("button", name="Play")).to_be_visible()


def test_nothing_moves_for_those_who_ask_so(open_page: Callable[..., Page], url: str) -> None:
    lab = link(open_page(url, reduced_motion="reduce"))
    expect(lab.locator("#lecture-play")).to_be_hidden()
    style = "bar => getComputedStyle(bar).transitionDuration"
    assert lab.locator(".lecture-bar span").nth(1).evaluate(style) == "0s"


def test_the_lab_fits_and_is_accessible(
    page: Page, check_looks: Callable[[Page, str], None]
) -> None:
    lab = link(page, layer=1, head=5, without="1.5,3.2")
    lab.get_by_role("button", name="Weighted values").click()
    check_looks(lab, "lab")


def test_the_map_is_saved_as_a_picture(page: Page, tmp_path: Path) -> None:
    lab = link(page, layer=1, head=3)
    for name in ("SVG", "PNG"):
        with lab.expect_download() as saved:
            lab.get_by_role("button", name=name, exact=True).click()
        assert saved.value.suggested_filename == f"attention-1-3.{name.lower()}"
        saved.value.save_as(tmp_path / name)
    n = lab.locator("#strip button").count()
    drawn = (tmp_path / "SVG").read_text()
    assert drawn.count("<text") == 2 * n
    assert drawn.count('href="data:image/png;base64,') == 1
    assert (tmp_path / "PNG").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_png_holds_a_map_of_any_size(page: Page) -> None:
    """The pinned last row's frame is at its lower edge, up to the corner."""
    lab = link(page, prompt=" a" * 130)
    lab.locator("#zoom").fill("72")
    with lab.expect_download() as saved:
        lab.get_by_role("button", name="PNG", exact=True).click()
    image = base64.b64encode(saved.value.path().read_bytes()).decode()
    side, edge, accent = lab.evaluate(EDGE, image)
    assert side <= 8000
    assert edge == accent


def test_a_link_pins_its_row_or_the_usual_one(page: Page) -> None:
    lab = link(page)
    last = lab.locator("#strip button").count() - 1
    lab.locator("#strip button").nth(2).click()
    lab.mouse.move(0, 0)  # off the strip, whose token under the pointer is shown
    expect(lab).to_have_url(re.compile("&token=2$"))
    expect(link(lab).locator("#weight")).to_contain_text(f"row {last},")
    expect(lab).not_to_have_url(re.compile("token"))


def test_a_text_too_short_to_measure_has_no_shares(page: Page) -> None:
    lab = link(page, prompt="def f")
    expect(lab.locator("#strip button")).to_have_count(2)
    expect(lab.locator("#behaviour")).to_be_empty()
    lab.get_by_label("Input text").fill(TEXT)
    lab.keyboard.press("Control+Enter")
    expect(lab.locator("#behaviour")).to_contain_text("first token")


@pytest.mark.refusals
def test_an_older_graph_shows_attention_alone(page: Page) -> None:
    def refuse(route: Route) -> None:
        if "position" in (route.request.post_data or ""):
            route.fulfill(status=400, json={"error": {"message": "of an older Kvasir"}})
        else:
            route.continue_()

    page.route("**/explain", refuse)
    lab = link(page, focused=1)
    expect(lab.locator("#heads .head:not(.missing)")).to_have_count(6)
    expect(lab.locator("#lab")).to_be_hidden()
    expect(lab.locator("#lecture-missing")).to_have_text("of an older Kvasir")
    expect(lab.locator("#explain-error")).to_be_hidden()
    page.unroute("**/explain")
    lab.locator("#strip button").nth(2).click()
    expect(lab.locator("#lab")).to_be_visible()

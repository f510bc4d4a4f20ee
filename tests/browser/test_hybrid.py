"""A hybrid on the page: its layers as they are, and what its recurrent heads keep."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from kvasir.server.process.local_server import serve_locally
from tests.browser.conftest import PYTHON, ROOT
from tests.browser.test_explorer import TEXT, explanation, shown_weights, wait_until_settled
from tests.browser.test_model import MAMBA2

EXPORT = """
import json
import sys
from pathlib import Path
from tests.api.test_explain import make_directory
from tests.model.variants import VARIANTS
folder = Path(sys.argv[1])
make_directory(folder, "fp32", **VARIANTS["bamba"])
manifest = json.loads((folder / "manifest.json").read_text())
(folder / "manifest.json").write_text(json.dumps(manifest | {"source": {"name": "random"}}))
"""
TIMES = """async (changes) => {
    const { stepsOf } = await import("./static/model/anatomy.js");
    const config = (await (await fetch("model")).json()).config;
    const last = (branches) => branches.map((one) => one.at(-1).title).join(" + ");
    const outline = ({ caption, steps, branches, title }) =>
        caption ? [caption, steps.map(outline)] : branches ? last(branches) : title;
    return stepsOf({ ...config, ...changes }).map(outline).filter(Array.isArray);
}"""


@pytest.fixture(scope="module")
def hybrid_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a random hybrid: Mamba-2 in layers 0 and 2, attention between."""
    directory = tmp_path_factory.mktemp("models") / "hybrid"
    subprocess.run([PYTHON, "-c", EXPORT, directory], check=True, cwd=ROOT)
    with serve_locally(directory, python=PYTHON) as started:
        yield started


def test_layers_are_drawn_as_they_are(
    open_page: Callable[..., Page], hybrid_url: str, check_looks: Callable[[Page, str], None]
) -> None:
    page = open_page(f"{hybrid_url}/#model")
    drawing = page.locator("#architecture")
    expect(drawing.locator(".box.recurrence")).to_have_count(2)
    expect(drawing.locator("i.state")).to_have_count(2 * 4)
    expect(drawing).to_contain_text(re.compile("4 matrices of 16 . 12,"))
    # Matrices, and two tokens of 4 * 12 + 2 * 2 * 16 channels.
    expect(drawing).to_contain_text("state: 992 numbers a sequence, whatever its length")
    card = page.request.get(f"{hybrid_url}/model").json()
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
        assert modules.evaluate(TIMES, hybrid | changes) == expected


def test_a_recurrent_heads_decays_and_weights_are_shown(
    open_page: Callable[..., Page], hybrid_url: str, check_looks: Callable[[Page, str], None]
) -> None:
    place = urlencode({"prompt": TEXT, "layer": 2, "head": 1, "token": 9})
    page = open_page(f"{hybrid_url}/#attention?{place}")
    wait_until_settled(page)
    (memory,) = explanation(page, text=TEXT, layers=[2], heads=[1])["memory"]
    for choice, rows in (("decays", memory["decays"]), ("weights", memory["weights"])):
        page.get_by_label("Map", exact=True).select_option(choice)
        shown = shown_weights(page)
        assert shown[10:] == [None] * (len(shown) - 10)
        assert shown[:10] == pytest.approx(rows[9][:10], abs=1e-4)
        check_looks(page, f"hybrid-{choice}")
    expect(page.locator("#recurrence-formula")).to_contain_text(re.compile("16 . 12 numbers"))
    expect(page.locator("#formula")).to_be_hidden()
    page.locator("#layer").select_option("1")
    wait_until_settled(page)
    expect(page.locator("#formula")).to_be_visible()
    expect(page.locator("#reading-choice")).to_be_hidden()
    expect(page.locator("#contract")).to_contain_text("rows sum to 1")
    page.locator("#overview-details summary").click()
    wait_until_settled(page)
    expect(page.locator("#overview .head:not(.missing)")).to_have_count(3 * 4)


def test_a_recurrent_head_is_switched_off(open_page: Callable[..., Page], hybrid_url: str) -> None:
    page = open_page(f"{hybrid_url}/#attention?{urlencode({'prompt': TEXT, 'layer': 0})}")
    wait_until_settled(page)
    page.locator("#switch").click()
    wait_until_settled(page)
    expect(page.locator("#effect")).to_contain_text("bits (KL divergence)")

"""An LSTM encoder-decoder on the page: its layers, and its alignment without maps of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from kvasir.server.process.local_server import serve_locally
from tests.browser.conftest import PYTHON, ROOT

EXPORT = """
import json
import sys
from dataclasses import replace
from pathlib import Path
from tests.api.test_explain import completed
from tests.api.test_seq2seq import TOKENIZER
from tests.kit.encoder_decoders import export_both
from tests.kit.fake_seq2seq import small_lstm_config, small_model
for attention in ("additive", "none"):
    folder = Path(sys.argv[1]) / attention
    config, size = small_lstm_config(cross_attention=attention), TOKENIZER.get_vocab_size()
    encoder = replace(config.encoder, vocab_size=size)
    model = small_model(replace(config, vocab_size=size, encoder=encoder))
    export_both(model.config, model.state_dict(), folder)
    completed(folder, model.config, TOKENIZER)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"source": {"name": "random"}}))
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models with each kind of attention, or none, between encoder and decoder."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([PYTHON, "-c", EXPORT, folder], check=True, cwd=ROOT)
    return folder


@pytest.mark.parametrize("attention", ["additive", "none"])
def test_layers_and_alignment(
    attention: str, open_page: Callable[..., Page], directories: Path
) -> None:
    with serve_locally(directories / attention, python=PYTHON) as url:
        page = open_page(f"{url}/#model")
        drawing = page.locator("#architecture")
        expect(drawing.locator(".box.recurrence")).to_have_count(2)
        expect(drawing).to_contain_text("24 cells")
        expect(drawing).to_contain_text("state: 48 numbers a sequence")
        crosses = drawing.get_by_text("Cross-attention", exact=True)
        expect(crosses).to_have_count(1 if attention == "additive" else 0)
        page.goto(f"{url}/#attention?prompt=json")
        if attention == "none":
            expect(page.get_by_text("No layer of this model has heads")).to_be_visible()
            return
        expect(page.locator("#alignment-card")).to_be_visible()
        expect(page.locator("#alignment-body td").first).to_have_attribute("style", r"--weight: 1;")
        expect(page.locator("#map")).to_be_hidden()
        expect(page.get_by_text("LSTM: the head attends to the source alone.")).to_be_visible()

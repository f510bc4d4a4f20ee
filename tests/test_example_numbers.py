"""The example encoder-decoder, served by the command: numbers and dates, in words and in digits."""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx

from examples.number_pairs import draw
from kvasir.model.directory import load_model_dir
from kvasir.server.process.local_server import serve_locally
from tests.kit.fake_runner import TIMEOUT

EXAMPLE = Path(__file__).parent.parent / "examples/numbers"


def test_it_is_small_and_proves_its_exact_match() -> None:
    assert sum(file.stat().st_size for file in EXAMPLE.iterdir()) <= 4_000_000
    figures = load_model_dir(EXAMPLE).manifest.verification
    assert figures.exact_match_onnx is not None
    assert figures.exact_match_onnx >= 0.99


def test_it_answers_exactly() -> None:
    """Alone, and with beams, whose best text is the same."""
    generator = random.Random(1)
    pairs = [draw(generator) for _ in range(10)]
    pairs += [(digits, words) for words, digits in pairs]
    with serve_locally(EXAMPLE) as url, httpx.Client(base_url=url, timeout=TIMEOUT) as client:
        for fields in ({}, {"num_beams": 4}):
            body = {"prompt": [source for source, _ in pairs], "temperature": 0, **fields}
            answer = client.post("/v1/completions", content=json.dumps(body)).json()
            assert [choice["text"] for choice in answer["choices"]] == [text for _, text in pairs]

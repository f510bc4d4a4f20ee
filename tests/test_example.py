"""The example model, served by the command as a new user would: a real process and sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from kvasir.model.directory import load_model_dir
from kvasir.server.process.local_server import serve_locally

SOURCE = Path(__file__).read_text(encoding="utf-8")
EXAMPLE = Path(__file__).parent.parent / "examples/stdlib"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_locally(EXAMPLE, "--max-queue", "200") as started:
        yield started


def test_the_example_is_small_and_complete() -> None:
    assert sum(file.stat().st_size for file in EXAMPLE.iterdir()) <= 8_000_000
    manifest = load_model_dir(EXAMPLE).manifest
    assert manifest.verification.greedy_agreement > 0.95
    assert manifest.source["held_out_tokens"]


def test_it_completes_python(url: str) -> None:
    """It writes a function's body; nothing subtler would survive training it again."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.completions.create(
            model=EXAMPLE.name,
            prompt="class Reader:\n    def __init__(self, path):\n",
            max_tokens=64,
            temperature=0,
        )
    assert "self." in answer.choices[0].text
    assert answer.choices[0].text.startswith("        ")


async def test_32_streams_at_once_are_each_what_they_are_alone(url: str) -> None:
    """Mixed lengths, greedy and sampled: the same text and the same log-probabilities."""
    generator = np.random.default_rng(0)

    async def read(
        client: openai.AsyncOpenAI, i: int, start: int, length: int, max_tokens: int
    ) -> list[object]:
        stream = await client.completions.create(
            model=EXAMPLE.name,
            prompt=SOURCE[start : start + length],
            max_tokens=max_tokens,
            temperature=0.8 * (i % 2),
            top_p=0.9,
            seed=i,
            logprobs=2,
            stream=True,
        )
        events: list[object] = []
        async for chunk in stream:
            for choice in chunk.choices:
                logprobs = choice.logprobs.model_dump() if choice.logprobs else None
                events.append((choice.text, logprobs, choice.finish_reason))
        return events

    starts = generator.integers(0, 400, 32).tolist()
    lengths = generator.integers(1, 1500, 32).tolist()
    max_tokens = generator.integers(1, 60, 32).tolist()
    requests = list(zip(range(32), starts, lengths, max_tokens, strict=True))
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        together = await asyncio.gather(*(read(client, *request) for request in requests))
        alone = [await read(client, *request) for request in requests]
    assert together == alone
    assert all(events[-1][2] in ("stop", "length") for events in together)  # type: ignore[index]

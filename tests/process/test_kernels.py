"""A server says what computes: operators of our own, or stock ones, and why."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvasir.kernels.library import Library
from kvasir.model.directory import load_model_dir
from kvasir.server.process import engine_builder
from kvasir.server.settings import load_settings
from kvasir.server.telemetry.logs import TextFormatter
from tests.kernels.graphs import needs_library, usable_paths
from tests.kit.serving import sample as value
from tests.process.example_server import EXAMPLE, serving

BODY = {"prompt": "def f(", "max_tokens": 2, "temperature": 0}
STOCK = (
    "stock operators are used: the setting asks for them; "
    "int8 and int4 take longer, and by default nothing is drafted"
)


def records_of(caplog: pytest.LogCaptureFixture, message: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.message == message]


async def test_without_the_library_it_serves_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="kvasir")
    async with serving("one", "two", kernels="off") as (_, client):
        for name in ("one", "two"):
            answer = await client.post("/v1/completions", json=BODY | {"model": name})
            assert answer.status_code == 200
        assert (await client.get("/version")).json()["kernels"] is None
    (record,) = records_of(caplog, STOCK)
    assert TextFormatter(colours=False).format(record).endswith(f"  {STOCK}")
    ready = records_of(caplog, "ready")
    assert [record.__dict__["fields"]["kernels"] for record in ready] == [None, None]
    line = TextFormatter(colours=False).format(ready[0])
    assert line[10:].startswith("one is ready: int8 on cpu, 0")


@needs_library
async def test_the_path_is_told_where_the_library_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvasir")
    async with serving() as (_, client):
        told = (await client.get("/version")).json()["kernels"]
    (ready,) = records_of(caplog, "ready")
    assert told == usable_paths()[-1] == ready.__dict__["fields"]["kernels"]
    line = TextFormatter(colours=False).format(ready)
    assert f"int8 on cpu, kernels for {told}, " in line
    figures = ready.__dict__["fields"]["kv_cache"]
    assert f" {figures['budget_tokens']:,} tokens of {figures['bytes_per_token']:,} bytes" in line
    assert "stock" not in caplog.text


@needs_library
async def test_the_fingerprint_is_that_of_the_library_whatever_its_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paths compute the same bits; another library, and stock operators, may not."""
    fingerprints = []
    for kernels in ("auto", "scalar", "off", "changed"):
        if kernels == "changed":
            monkeypatch.setattr(Library, "version", "changed")
        async with serving(kernels=kernels.replace("changed", "auto")) as (models, _):
            fingerprints.append(models.served["stdlib"].fingerprint)
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize(
    "kernels", [pytest.param("auto", marks=needs_library), "off"], ids=["ours", "stock"]
)
async def test_drafts_are_on_where_answers_stay_the_same(kernels: str) -> None:
    """The fingerprint differs only where answers may."""
    drafting, fingerprints = [], []
    every: list[dict[str, Any]] = [{}, {"speculate": True}, {"speculate": False}]
    for options in every:
        async with serving(kernels=kernels, **options) as (models, client):
            drafting.append((await client.get("/version")).json()["speculate"])
            fingerprints.append(models.served["stdlib"].fingerprint)
    assert drafting == [kernels == "auto", True, False]
    assert fingerprints[0] == fingerprints[2]
    assert (fingerprints[0] == fingerprints[1]) == (kernels == "auto")


def random_bodies(n: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(n)
    code = "import os\n\ndef size(path):\n    return os.stat(path).st_size\n\n"
    bodies = []
    for i in range(n):
        options: dict[str, Any] = {
            "temperature": [0, 0.7, 1.0], "top_p": [1.0, 0.9], "top_k": [0, 40], "min_p": [0, 0.1],
            "repetition_penalty": [1.0, 1.1], "frequency_penalty": [0.0, 0.4],
            "presence_penalty": [0.0, -0.3], "logit_bias": [{}, {"11": 1.5}], "min_tokens": [0, 9],
            "stop": [[], ["return", "\n\n"]], "logprobs": [None, 0, 3], "n": [1, 2],
            "max_tokens": [9, 30, 60], "typical_p": [1.0, 0.9],
        }  # fmt: skip
        body = {name: values[generator.integers(len(values))] for name, values in options.items()}
        bodies.append(body | {"prompt": code * int(generator.integers(1, 4)), "seed": i})
    return bodies


@needs_library
async def test_drafts_change_no_byte_of_answers() -> None:
    """All samplers, stop strings and log-probabilities, several requests at a time and one."""
    answers: list[list[Any]] = []
    for speculate in (True, False):
        options: dict[str, Any] = {"speculate": speculate, "max_queue": 64}
        async with serving(**options) as (models, client):

            async def answer(body: dict[str, Any], client: httpx.AsyncClient = client) -> Any:
                whole = json.loads((await client.post("/v1/completions", json=body)).content)
                return [whole[name] for name in ("choices", "usage", "system_fingerprint")]

            bodies = random_bodies(24)
            if speculate:
                answers.append(await asyncio.gather(*map(answer, bodies)))
                drafted = value(
                    models.served["stdlib"].metrics, "spec_decode_accepted_tokens_total"
                )
                assert (drafted or 0) > 0
            else:
                answers.append([await answer(body) for body in bodies])
    for with_drafts, without in zip(*answers, strict=True):
        with_drafts[1].pop("prompt_tokens_details")  # what others have left in the cache
        without[1].pop("prompt_tokens_details")
        assert with_drafts == without


def test_a_model_on_a_gpu_needs_no_library() -> None:
    settings, model_dir = load_settings(model=EXAMPLE), load_model_dir(EXAMPLE)
    manifest = model_dir.manifest.model_copy(update={"device": "cuda"})
    other = replace(model_dir, manifest=manifest)
    assert engine_builder.find_library(settings, other) is None


async def test_a_user_without_a_home_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whose user has no entry in the system's list."""

    def expanduser(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    async with serving() as (_, client):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200

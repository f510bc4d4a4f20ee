"""A server says what computes: operators of our own, or stock ones, and why."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvasir.kernels.library import Library
from kvasir.model.directory import ModelDirectory, load_model_dir
from kvasir.server.engine.engine import Engine
from kvasir.server.process import engine_builder
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import build_engine
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import load_settings
from kvasir.server.telemetry.logs import TextFormatter
from kvasir.server.telemetry.start_clock import StartClock
from tests.kernels.graphs import needs_library, usable_paths

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"  # in int8
BODY = {"prompt": "def f(", "max_tokens": 2, "temperature": 0}
STOCK = "stock operators are used: the setting asks for them"


@pytest.fixture(scope="module")
def model_dir() -> ModelDirectory:
    return load_model_dir(EXAMPLE)


@asynccontextmanager
async def serving(
    model_dir: ModelDirectory, kernels: str, *, names: tuple[str, ...] = ("one",)
) -> AsyncIterator[tuple[ModelRegistry, httpx.AsyncClient]]:
    engine_builder._find_library.cache_clear()
    settings = load_settings(
        model=",".join(f"{name}={EXAMPLE}" for name in names),
        kernels=kernels, threads=1, kv_cache_memory=2**24, max_num_seqs=2,
    )  # fmt: skip
    app = create_app(settings, dict.fromkeys(names, model_dir))
    models: ModelRegistry = app.state.models

    def build(served: ServedModel) -> Engine:
        return build_engine(served.settings, served.model_dir)

    await models.start(build, StartClock())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield models, client
    await models.close()


def records_of(caplog: pytest.LogCaptureFixture, message: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.message == message]


async def test_without_the_library_it_serves_and_says_so_once(
    model_dir: ModelDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvasir")
    async with serving(model_dir, "off", names=("one", "two")) as (_, client):
        for name in ("one", "two"):
            answer = await client.post("/v1/completions", json=BODY | {"model": name})
            assert answer.status_code == 200
        assert (await client.get("/version")).json()["kernels"] is None
    (record,) = records_of(caplog, STOCK)
    assert TextFormatter(colours=False).format(record).endswith(f"  {STOCK}")
    ready = records_of(caplog, "ready")
    assert [record.__dict__["fields"]["kernels"] for record in ready] == [None, None]
    assert (
        TextFormatter(colours=False)
        .format(ready[0])[10:]
        .startswith("one is ready: int8 on cpu, 0")
    )


@needs_library
async def test_the_path_is_told_where_the_library_is_used(
    model_dir: ModelDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvasir")
    async with serving(model_dir, "auto") as (_, client):
        told = (await client.get("/version")).json()["kernels"]
    (ready,) = records_of(caplog, "ready")
    assert told == usable_paths()[-1] == ready.__dict__["fields"]["kernels"]
    assert f"int8 on cpu, kernels for {told}, " in TextFormatter(colours=False).format(ready)
    assert "stock" not in caplog.text


@needs_library
async def test_the_fingerprint_is_that_of_the_library_whatever_its_path(
    model_dir: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths compute the same bits; another library, and stock operators, may not."""
    fingerprints = []
    for kernels in ("auto", "scalar", "off", "changed"):
        if kernels == "changed":
            monkeypatch.setattr(Library, "version", "changed")
        async with serving(model_dir, kernels.replace("changed", "auto")) as (models, _):
            fingerprints.append(models.served["one"].fingerprint)
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


def test_graphs_without_rounded_products_need_no_library(model_dir: ModelDirectory) -> None:
    settings = load_settings(model=EXAMPLE)
    for change in ({"precision": "fp32"}, {"device": "cuda"}):
        manifest = model_dir.manifest.model_copy(update=change)
        other = ModelDirectory(EXAMPLE, model_dir.config, manifest, model_dir.tokenizer)
        assert engine_builder.find_library(settings, other) is None


async def test_a_user_without_a_home_is_served(
    model_dir: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose user has no entry in the system's list."""

    def expanduser(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    async with serving(model_dir, "auto") as (_, client):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200

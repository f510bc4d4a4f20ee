"""Several models of one server: which one serves a request, and one that fails alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from kvasir.model.config import Pooling
from kvasir.model.directory import ModelDirectory
from kvasir.server.engine.encoder.engine import EncoderEngine
from kvasir.server.errors import StartupError
from kvasir.server.process.app import create_app
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.settings import Settings, load_settings
from tests.api.test_models_dir import TEXTS, Built
from tests.kit.fake_encoder import FakeTextRunner, encoder_model_dir
from tests.kit.fake_runner import TIMEOUT
from tests.kit.serving import fake_model_dir, running, sample

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT | {"max_tokens": 2},
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [66]},
    "/explain": {"text": "a"},
}


def build_encoder(_: Settings, model_dir: ModelDirectory, *_clock: object) -> EncoderEngine:
    assert model_dir.config.pooling is not None
    runner = FakeTextRunner(model_dir.config.pooling)
    return EncoderEngine(runner, token_budget=100, max_num_seqs=4)


@asynccontextmanager
async def serving_all(*names: str) -> AsyncIterator[tuple[ModelRegistry, httpx.AsyncClient]]:
    """Serve models once all are loaded.

    `damaged` has no directory, `unloadable` no graph, and `encoder` makes vectors.
    """
    settings = load_settings(model=[Path(name) for name in names])
    model_dirs: dict[str, ModelDirectory | StartupError] = {
        name: encoder_model_dir() if name == "encoder" else fake_model_dir(Path(name))
        for name in names
    }
    if "damaged" in names:
        model_dirs["damaged"] = StartupError("damaged has no manifest")
    built = Built()
    built.broken.add("unloadable")
    with (
        patch("kvasir.server.process.app.build_engine", built),
        patch("kvasir.server.process.app.build_encoder_engine", build_encoder),
    ):
        app = create_app(settings, model_dirs)
        models: ModelRegistry = app.state.models
        loaded, start = asyncio.Event(), models.start

        async def starting(*arguments: Any) -> None:
            await start(*arguments)
            loaded.set()

        models.start = starting  # type: ignore[assignment,method-assign]
        async with running(app) as client:
            await asyncio.wait_for(loaded.wait(), TIMEOUT)
            yield models, client


async def test_the_named_model_answers_and_counts_alone() -> None:
    async with serving_all(*TEXTS) as (models, client):
        listed = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == list(TEXTS)
        for n, (name, text) in enumerate(TEXTS.items(), 1):
            body = BODIES["/v1/completions"] | {"model": name, "max_tokens": n}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text * n)
            tgi = BODIES["/generate"] | {"model": name}
            generated = (await client.post("/generate", json=tgi)).json()["generated_text"]
            assert generated == text * 2
            for path in ("/model", "/version"):
                shown = (await client.get(path, params={"model": name})).json()
                assert shown["model"] == name
            running = shown.pop("models")  # of /version
            assert [one["model"] for one in running] == list(TEXTS)
            assert all(one.items() <= shown.items() for one in running if one["model"] == name)
            total = sample(models.served[name].metrics, "generation_tokens_total", model=name)
            assert total == n + 2


async def test_a_name_is_needed_where_the_protocol_has_one() -> None:
    async with serving_all("second", "first") as (models, client):
        metrics, n_rejected = models.served["first"].metrics, 0.0
        for path, body in BODIES.items():
            unnamed = await client.post(path, json=body)
            unknown = await client.post(path, json=body | {"model": "other"})
            assert unknown.status_code == 404, path
            before = n_rejected
            n_rejected = sample(metrics, "requests_rejected_total", model="") or 0.0
            if path.startswith("/v1"):
                assert unnamed.status_code == 400
                error = unnamed.json()["error"]
                assert error["param"] == "model"
                assert all(name in error["message"] for name in ("'first'", "'second'"))
                assert n_rejected == before + 2
            elif path == "/generate":
                assert unnamed.json()["generated_text"] == "dd"


async def test_a_model_for_another_task_says_so_and_is_no_default() -> None:
    async with serving_all("first", "second") as (models, client):
        first = models.served["first"]
        config = replace(first.model_dir.config, pooling=Pooling(kind="mean"), tied_embeddings=True)
        first.model_dir = replace(first.model_dir, config=config)
        body = BODIES["/v1/completions"] | {"model": "first"}
        refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        answer = await client.post("/generate", json=BODIES["/generate"])
        assert answer.json()["generated_text"] == "dd"


@pytest.mark.parametrize("failed", ["damaged", "unloadable"])
async def test_a_model_that_cannot_be_loaded_leaves_the_others(
    failed: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_all(failed, "second") as (models, client):
        metrics = models.served["second"].metrics
        assert [sample(metrics, "model_failed", model=n) for n in (failed, "second")] == [1, 0]
        assert [record.levelname for record in caplog.records if failed in record.message]
        health = await client.get("/health/ready")
        assert health.status_code == (await client.get("/health/startup")).status_code == 200
        assert health.json() == {"status": "ok", "models": {failed: "failed", "second": "ready"}}
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["second"]
        for name, status in (("second", 200), (failed, 503)):
            body = BODIES["/v1/completions"] | {"model": name}
            assert (await client.post("/v1/completions", json=body)).status_code == status
        assert (await client.get("/version")).status_code == 503, "no other than the first"


async def test_an_engine_that_fails_is_a_reason_to_restart_and_leaves_the_others() -> None:
    async with serving_all("first", "second") as (models, client):
        models.served["first"].engine.give_up()
        assert (await client.get("/health/live")).status_code == 503
        assert (await client.get("/health/ready")).json() == {
            "status": "ok",
            "models": {"first": "unhealthy", "second": "ready"},
        }
        body = BODIES["/v1/completions"] | {"model": "second"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_a_server_without_any_model_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StartupError, match="no manifest"):
        create_app(load_settings(model="damaged"), {"damaged": StartupError("no manifest")})
    async with serving_all("unloadable") as (models, _):
        assert models.states == {"unloadable": "failed"}
    assert "unloadable cannot be served: the graph is damaged" in caplog.text


async def test_drain_ends_all_models() -> None:
    async with serving_all("first", "second") as (models, client):
        await models.drain()
        assert set((await client.get("/health/ready")).json()["models"].values()) == {"draining"}
        body = BODIES["/v1/completions"] | {"model": "second"}
        assert (await client.post("/v1/completions", json=body)).status_code == 503


async def test_a_router_sees_one_series_of_all_models() -> None:
    async with serving_all("first", "second") as (models, client):
        for name, load in (("first", (3.0, 1.0, 0.25)), ("second", (1.0, 4.0, 0.5))):
            index = models.names.index(name)
            models.metrics.loads[index] = lambda load=load: load  # type: ignore[misc]
        lines = (await client.get("/metrics/router")).text.splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "kvasir_num_requests_running 4.0",
        "kvasir_num_requests_waiting 5.0",
        "kvasir_kv_cache_usage_ratio 0.5",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority")
async def test_an_encoder_yields_to_streams_and_to_nobody_else() -> None:
    async with serving_all("first", "encoder") as (models, _):
        threads = [served.engine._thread for served in models.served.values()]
        text, vectors = (os.getpriority(os.PRIO_PROCESS, one.native_id) for one in threads)  # type: ignore
    async with serving_all("encoder") as (models, _):
        alone = models.served["encoder"].engine._thread
        assert os.getpriority(os.PRIO_PROCESS, alone.native_id) == text  # type: ignore
    assert vectors == min(19, text + 5)
    assert os.getpriority(os.PRIO_PROCESS, 0) == text

"""Models of a folder by every API: loaded by the requests that name them, and unloaded again."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fastapi import FastAPI

from kvasir.model.directory import ModelDirectory, load_model_dir
from kvasir.server.api.http import streams
from kvasir.server.engine.engine import Engine
from kvasir.server.errors import StartupError
from kvasir.server.explain.explanation import Explanation
from kvasir.server.process.app import create_app
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.settings import Settings, load_settings
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import VOCAB_SIZE, fake_model_dir, running, sample, small_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXTS = {"first": "a", "second": "d", "third": "p"}  # each model repeats its own
CACHE = 2**40  # bytes of a fake model's KV cache, beside which the process's own memory is nothing
TWO = int(2.5 * CACHE)  # room for two models with their prefix caches
ADMIN = {"authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
LOADING = "kvasir.server.requests.loading.folder_model.load_model_dir"


class Built:
    """The engines of fake models, each of which may fail to be built."""

    def __init__(self) -> None:
        self.broken = set[str]()
        self.engines: list[weakref.ref[Engine]] = []
        self.runners = dict[str, FakeRunner]()

    def __call__(self, _: Settings, model_dir: ModelDirectory, *_clock: object) -> Engine:
        name = model_dir.path.name
        if name in self.broken:
            raise RuntimeError("the graph\nis damaged")
        [said] = small_tokenizer().encode(TEXTS[name]).ids
        self.runners[name] = FakeRunner(VOCAB_SIZE, next_token=lambda _: said)
        engine = Engine(self.runners[name], chunk_size=8)
        self.engines.append(weakref.ref(engine))
        return engine


@asynccontextmanager
async def serving(
    folder: Path, *staying: str, **settings: Any
) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient, Built]]:
    """Serve three fake models of a folder, of which two fit, and others that stay."""
    for name in TEXTS.keys() - {*staying}:
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text("{}")
    options = {"models_memory": TWO, "kv_cache_memory": CACHE, "models_admin_key": "admin"}
    known = load_settings(model=[*staying] or None, models_dir=folder, **options | settings)
    model_dirs = {name: fake_model_dir(path) for name, path in known.models.items()}
    built = Built()
    with (
        patch("kvasir.server.process.app.build_engine", built),
        patch("kvasir.server.requests.registry.available_memory", lambda: 2**50),
    ):
        app = create_app(known, model_dirs)
        async with running(app) as client:
            yield app, client, built


@pytest.fixture
def own_garbage() -> None:
    """Leave what lives already out of a test's collections, which would look at it for seconds."""
    gc.freeze()


async def complete(client: httpx.AsyncClient, name: str, **fields: Any) -> httpx.Response:
    body = {"model": name, "prompt": "a", "max_tokens": 2} | fields
    return await client.post("/v1/completions", json=body)


async def until(happened: Callable[[], object]) -> None:
    """Let others go on until something has happened."""
    async with asyncio.timeout(TIMEOUT):
        while not happened():  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0)


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    listed = (await client.get("/v1/models")).json()["data"]
    return {one["id"]: one["state"] for one in listed}


async def test_requests_load_models_and_the_least_used_makes_room(tmp_path: Path) -> None:
    async with serving(tmp_path) as (app, client, _):
        models: ModelRegistry = app.state.models
        assert await states(client) == dict.fromkeys(TEXTS, "unloaded")
        for path in ("/health/ready", "/health/startup", "/health/live", "/model", "/api/tags"):
            assert (await client.get(path)).status_code == 200, path
        for path in ("/tokenize", "/api/show"):
            asked = {"model": "first"} | ({"prompt": "a"} if path == "/tokenize" else {})
            assert (await client.post(path, json=asked)).status_code == 200
        assert await states(client) == dict.fromkeys(TEXTS, "unloaded"), "these need no engine"
        for name in ("first", "second"):
            assert (await complete(client, name)).json()["choices"][0]["text"] == TEXTS[name] * 2
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        body: dict[str, Any]
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
            ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}),
            ("/api/chat", {"messages": chat["messages"], "options": {"num_predict": 2}}),
        ):
            answer = await client.post(path, json={"model": "first", "stream": False} | body)
            assert (answer.status_code, "aa" in answer.text) == (200, True), answer.text
        assert (await complete(client, "third", stream=True)).text.count('"p"') == 2
        assert await states(client) == {"first": "ready", "second": "unloaded", "third": "ready"}
        shown = {one["name"]: one for one in (await client.get("/api/ps")).json()["models"]}
        assert shown.keys() == {"first:latest", "third:latest"}
        assert all(
            one["size"] > CACHE and "9999" not in one["expires_at"] for one in shown.values()
        )
        metrics = models.served["first"].metrics
        loads = [sample(metrics, "model_loads_total", model=name) for name in TEXTS]
        assert loads == [1, 1, 1]
        assert sample(metrics, "models_memory_limit_bytes") == TWO
        assert TWO >= (sample(metrics, "models_memory_bytes") or 0) > 2 * CACHE
        missing = await client.post("/explain", json={"model": "second", "text": "a"})
        assert (missing.status_code, "no attention.onnx" in missing.text) == (404, True)
        assert (await states(client))["second"] == "unloaded", "the error comes before a load"


async def test_an_explainer_leaves_before_models_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explanation loads its model. One that is refused leaves all in memory as it is."""
    explainers = weakref.WeakSet[object]()

    class FakeExplainer:
        def __init__(self, *_: object) -> None:
            explainers.add(self)

        def explain_tokens(self, token_ids: list[int], *_: object) -> Explanation:
            return Explanation(token_ids, [*map(str, token_ids)], {}, [])

    monkeypatch.setattr("kvasir.server.api.explain.routes.Explainer", FakeExplainer)
    monkeypatch.setattr(LOADING, fake_model_dir)  # whose files change below
    async with serving(tmp_path) as (app, client, _):
        loader = app.state.models.loader
        free = loader.free = lambda: TWO - loader.n_bytes - len(explainers) * CACHE
        app.state.explanations["first"]._free = free

        async def explain(name: str) -> int:
            body = {"model": name, "text": "a", "heads": []}
            return (await client.post("/explain", json=body)).status_code

        for name in ("first", "second"):
            (tmp_path / name / "attention.onnx").touch()
        assert (await explain("first"), len(explainers)) == (200, 1)
        assert (await explain("third"), len(explainers)) == (404, 1)
        assert await states(client) == {"first": "ready", "second": "unloaded", "third": "unloaded"}
        assert (await complete(client, "second")).status_code == 200
        assert await states(client) == {"first": "ready", "second": "ready", "third": "unloaded"}
        assert not explainers
        for name in ("second", "first"):
            assert (await explain(name), len(explainers)) == (200, 1), "of one model at a time"


async def test_random_streams_over_three_models_lose_nothing(tmp_path: Path) -> None:
    draw = random.Random(1)
    async with serving(tmp_path) as (app, client, built):
        models: ModelRegistry = app.state.models

        async def ask() -> None:
            name = draw.choice([*TEXTS])
            answer = await complete(client, name, stream=draw.random() < 0.5, max_tokens=9)
            assert answer.status_code == 200, answer.text
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
            events = [json.loads(line) for line in lines if line.startswith("{")]
            texts = (one["choices"][0]["text"] for one in events if one["choices"])
            assert "".join(texts) == TEXTS[name] * 9
            assert sum(one.engine.engine is not None for one in models.served.values()) <= 2

        await asyncio.gather(*(ask() for _ in range(40)))
        assert len(built.engines) >= 3
        assert models.loader.n_waiting == 0


@pytest.mark.usefixtures("own_garbage")
async def test_an_unloaded_engine_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path) as (app, client, built):
        before = {*threading.enumerate()}
        await complete(client, "first")
        threads = {one for one in threading.enumerate() if not one.name.startswith("asyncio")}
        threads -= before
        thread, [engine] = app.state.models.served["first"].engine._thread, built.engines
        assert thread in threads
        assert thread.is_alive()
        built.runners.clear()
        assert (
            await client.post(UNLOAD, json={"model": "first"}, headers=ADMIN)
        ).status_code == 200
        assert not [one for one in threads if one.is_alive()]
        gc.collect()
        assert engine() is None
        assert (await complete(client, "first")).json()["choices"][0]["text"] == "aa"


@pytest.mark.usefixtures("own_garbage")
async def test_a_new_version_takes_over_beside_running_streams(tmp_path: Path) -> None:
    """Old sequences end on the old one, whose memory is then free; new requests get the new one."""
    async with serving(tmp_path, models_memory=9 * CACHE) as (app, client, built):
        await complete(client, "first")
        models, old = app.state.models, built.runners["first"]
        old.hold()
        running = asyncio.create_task(complete(client, "first", max_tokens=5, stream=True))
        await until(lambda: models.served["first"].admission.n_inside)
        former = models.served["first"]
        renew(tmp_path / "first")
        with patch.dict(TEXTS, {"first": "z"}), patch(LOADING, fake_model_dir):
            answers = await asyncio.gather(*(complete(client, "first") for _ in range(3)))
        assert [one.json()["choices"][0]["text"] for one in answers] == ["zz"] * 3
        assert models._in_folder["first"].former == [former]
        old.release()
        assert (await running).text.count('"a"') == 5
        await until(lambda: not models._in_folder["first"].former)
        assert former.engine.engine is None
        assert len(models.metrics.loads) == len(TEXTS)
        renew(tmp_path / "first")  # which no model directory is
        for _ in range(2):
            assert (await complete(client, "first")).status_code == 200, "the one that is there"
        gone = weakref.ref(former)
        del former
        gc.collect()
        assert gone() is None, "nothing of the server keeps a former version"


@pytest.mark.parametrize("template", [None, "{% if %}"])
async def test_a_new_version_that_cannot_be_built_leaves_no_trace(
    template: str | None, tmp_path: Path
) -> None:
    """Its graph is damaged, or its template. Once the old version is unloaded, it is read again."""
    async with serving(tmp_path, models_memory=9 * CACHE) as (app, client, built):
        await complete(client, "first")
        served, metrics = app.state.models.served["first"], app.state.models.metrics
        renew(tmp_path / "first")
        built.broken.add("first")
        new = fake_model_dir(tmp_path / "first")
        new = replace(new, manifest=new.manifest.model_copy(update={"precision": "int8"}))
        with patch(LOADING, lambda _: replace(new, chat_template=template)):
            assert (await complete(client, "first")).status_code == 200
        assert app.state.models.served["first"] is served
        assert len(metrics.loads) == len(TEXTS)
        facts = {"model": "first", "precision": "fp32", "device": "cpu"}
        assert sample(served.metrics, "model_info", **facts) == 1
        assert sample(served.metrics, "model_info", **facts | {"precision": "int8"}) is None
        built.runners["first"].hold()
        running = asyncio.create_task(complete(client, "first"))
        await until(lambda: sample(served.metrics, "num_requests_running", model="first"))
        built.runners["first"].release()
        assert (await running).status_code == 200
        built.broken.clear()
        with patch(LOADING, lambda _: new):
            await client.post(UNLOAD, json={"model": "first"}, headers=ADMIN)
            assert (await complete(client, "first")).status_code == 200
        assert served.model_dir.manifest.precision == "int8"


def renew(folder: Path) -> None:
    """Put another directory in the place of a fake model's."""
    shutil.copytree(folder, folder.with_name("new"))
    (folder.with_name("new") / f"{len([*folder.iterdir()])}.onnx").touch()
    shutil.rmtree(folder)
    folder.with_name("new").rename(folder)


async def test_a_stream_hears_that_its_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that comes after that is an event."""
    monkeypatch.setattr(streams, "LOADING_SECONDS", 0.0)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
    }
    async with serving(tmp_path) as (_, client, built):
        body = {"model": "first", "max_tokens": 2, "stream": True}
        for path, fields in asked.items():
            await client.post(UNLOAD, json={"model": "first"}, headers=ADMIN)
            answer = await client.post(path, json=body | fields)
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.text.startswith(": loading\n\n")
            assert answer.text.count('"a"') == 2, answer.text
        built.broken.add("third")
        failed = await complete(client, "third", stream=True)
        assert failed.status_code == 200
        said = json.loads(failed.text.splitlines()[2].removeprefix("data: "))
        assert "the graph is damaged" in said["error"]["message"]
        assert (await complete(client, "third")).status_code == 503


async def test_keep_alive_is_ollamas(tmp_path: Path) -> None:
    async with serving(tmp_path) as (app, client, _):
        loader = app.state.models.loader
        for path, field in (("/api/generate", "prompt"), ("/api/chat", "messages")):
            empty: dict[str, Any] = {"model": "first:latest", "stream": False}
            empty[field] = [] if field == "messages" else ""
            loaded = (await client.post(path, json=empty | {"keep_alive": -1})).json()
            assert (loaded["done_reason"], loader.state("first")) == ("load", "ready")
            [shown] = (await client.get("/api/ps")).json()["models"]
            assert "9999" in shown["expires_at"]
            unloaded = (await client.post(path, json=empty | {"keep_alive": 0})).json()
            assert (unloaded["done_reason"], loader.state("first")) == ("unload", "unloaded")
        body = {"model": "first", "prompt": "a", "options": {"num_predict": 1}}
        wrong = await client.post("/api/generate", json=body | {"keep_alive": "soon"})
        assert (wrong.status_code, "keep_alive" in wrong.text) == (400, True)
        answer = await client.post("/api/generate", json=body | {"keep_alive": 0})
        assert answer.status_code == 200
        await until(lambda: loader.state("first") == "unloaded")


async def test_models_are_loaded_by_name_with_the_key_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, "first") as (_, client, built):
        for path in (LOAD, UNLOAD):
            assert (await client.post(path, json={"model": "second"})).status_code == 401
            stays = await client.post(path, json={"model": "first"}, headers=ADMIN)
            assert (stays.status_code, "stays loaded" in stays.text) == (400, True)
            unknown = await client.post(path, json={"model": "other"}, headers=ADMIN)
            assert unknown.status_code == 404
        built.broken.add("second")
        for _ in range(2):
            refused = await complete(client, "second")
            assert (refused.status_code, "the graph is damaged" in refused.text) == (503, True)
            assert int(refused.headers["retry-after"]) > 0
        assert (await states(client))["second"] == "failed"
        assert (await client.get("/health/ready")).status_code == 200
        built.broken.clear()
        loaded = await client.post(LOAD, json={"model": "second"}, headers=ADMIN)
        assert (loaded.status_code, loaded.json()["state"]) == (200, "ready")
        assert (await complete(client, "second")).status_code == 200
        unloaded = await client.post(UNLOAD, json={"model": "second"}, headers=ADMIN)
        assert unloaded.json()["state"] == "unloaded"
    (tmp_path / "others").mkdir()
    options = {"models_admin_key": None, "api_key": "client"}
    async with serving(tmp_path / "others", **options) as (_, client, _):
        assert "models_admin_key" in (await client.post(LOAD, json={"model": "first"})).text
        assert (await client.get(LOAD)).status_code == 401, "this asks for a model of that name"


async def test_a_drain_refuses_those_who_wait(tmp_path: Path) -> None:
    async with serving(tmp_path, models_memory=int(1.5 * CACHE)) as (app, client, built):
        await complete(client, "first")
        built.runners["first"].hold()
        running = asyncio.create_task(complete(client, "first"))
        waiting = asyncio.create_task(complete(client, "second"))
        await until(lambda: app.state.models.loader.n_waiting)
        draining = asyncio.create_task(app.state.models.drain())
        await asyncio.sleep(0)
        built.runners["first"].release()
        await draining
        assert (await waiting).status_code == 503
        assert (await running).status_code in (200, 503)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "no folder with a manifest.json"),
        ({"models_admin_key": "key", "models_dir": None, "model": "m"}, "needs models_dir"),
        ({"keep_alive": "soon"}, "duration"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(StartupError, match=named):
        load_settings(**{"models_dir": tmp_path} | settings)


@pytest.mark.usefixtures("own_garbage")
async def test_real_models_come_go_and_change(tmp_path: Path) -> None:
    """Two examples of which one fits; then a new version takes the place of the first."""
    for name in ("numbers", "stdlib"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
    memory = {"kv_cache_memory": CACHE, "prefix_cache_memory": 0, "models_memory": 3 * CACHE // 2}
    known = load_settings(models_dir=tmp_path, threads=1, **memory)
    model_dirs = {name: load_model_dir(path) for name, path in known.models.items()}
    with patch("kvasir.server.requests.registry.available_memory", lambda: 2**50):
        app = create_app(known, model_dirs)

    async def write(client: httpx.AsyncClient, name: str) -> tuple[str, str]:
        answer = await complete(client, name, prompt="one ", max_tokens=12, temperature=0.0)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], answer.json()["system_fingerprint"]

    async with running(app) as client:
        texts = {name: await write(client, name) for name in known.models}
        assert texts["numbers"] != texts["stdlib"]
        loader = app.state.models.loader
        for name in ("stdlib", "numbers", "stdlib"):
            assert await write(client, name) == texts[name]
            assert [other for other in texts if loader.state(other) == "ready"] == [name]
        engine = weakref.ref(app.state.models.served["stdlib"].engine.engine)
        shutil.rmtree(tmp_path / "stdlib")
        shutil.copytree(EXAMPLES / "numbers", tmp_path / "stdlib")
        assert (await write(client, "stdlib"))[0] == texts["numbers"][0]
        gc.collect()
        assert engine() is None
        served = app.state.models.served["numbers"]
        await complete(client, "numbers")
        served.engine.give_up()  # as an engine that has failed
        assert (await complete(client, "numbers")).status_code == 500
        await loader.unload("numbers")
        assert "must be restarted" in (await complete(client, "numbers")).text
        await loader.unload("stdlib")
        with (tmp_path / "stdlib/model.onnx").open("ab") as file:
            file.write(b"damage")
        refused = await complete(client, "stdlib")
        assert (refused.status_code, "model.onnx" in refused.text) == (503, True)

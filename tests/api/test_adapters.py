"""Adapters by every API: named as models, loaded and unloaded beside running streams."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from kvasir.__main__ import app as command_line
from kvasir.export.directory import export_checkpoint
from kvasir.kernels.library import Library
from kvasir.kernels.library import load as load_library
from kvasir.model.adapters.layout import Layout
from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.config import Pooling
from kvasir.model.directory import ADAPTERS_FILE, ModelDirectory, load_model_dir
from kvasir.server.engine.adapters.loaded import Adapter, GraphAdapters, NoAdaptersError
from kvasir.server.errors import StartupError, UnavailableError
from kvasir.server.explain.explainer import Explainer
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import build_beside_others, build_engine
from kvasir.server.requests.adapters.adapted_models import AdaptedModels
from kvasir.server.requests.adapters.bank import AdapterBank
from kvasir.server.requests.adapters.served import graph_of
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import load_settings
from kvasir.server.telemetry.start_clock import StartClock
from tests.api.test_models_dir import own_garbage, until
from tests.engine.test_adapters import few_pairs
from tests.kernels.graphs import needs_library
from tests.kit.adapters import change_tensors, save_adapter, set_config
from tests.kit.fake_runner import TIMEOUT
from tests.kit.huggingface_checkpoints import make_model, save_checkpoint, save_tokenizer
from tests.kit.huggingface_models import make_encoder, save
from tests.kit.serving import fake_model_dir, running
from tests.process.test_broken_loads import save_adapter as save_example_adapter

__all__ = ["few_pairs", "own_garbage"]
pytestmark = needs_library
ADMIN = {"authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "the 7th line of a text that nobody"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    source = save_checkpoint(folder / "source", make_model("llama"))
    save_tokenizer(source)
    export_checkpoint(source, folder / "base", precision="int8")
    for i, name in enumerate(("poet", "clerk", "judge")):
        save_adapter(folder / "adapters" / name, make_model("llama"), seed=i)
    return folder


@pytest.fixture
def root(exported: Path, tmp_path: Path) -> Path:
    """A folder with two adapters; a third is elsewhere."""
    for name in ("poet", "clerk"):
        shutil.copytree(exported / "adapters" / name, tmp_path / "adapters" / name)
    return tmp_path / "adapters"


@asynccontextmanager
async def serving(
    exported: Path, **settings: Any
) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """Serve the model and its adapters, from the moment that they are loaded."""
    known = load_settings(model=exported / "base", threads=1, kv_cache_memory=2**26, **settings)
    app = create_app(known, load_model_dir(exported / "base"))
    async with running(app) as client:
        while (await client.get("/health/ready")).status_code != 200:
            assert not app.state.models.failures
            await asyncio.sleep(0.01)
        yield app, client


def bank_of(app: FastAPI) -> AdapterBank:
    bank: AdapterBank = app.state.models.bank
    return bank


def hold(app: FastAPI, name: str) -> AbstractAsyncContextManager[Adapter]:
    """Keep an adapter in memory, as a stream does."""
    return bank_of(app).hold(name, app.state.models.served["base"].engine.engine.adapters)


def greedy(model: str = "base", **fields: Any) -> dict[str, Any]:
    """Return the body of a completion."""
    return {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0} | fields


async def complete(client: httpx.AsyncClient, model: str = "base") -> str:
    response = await client.post("/v1/completions", json=greedy(model))
    assert response.status_code == 200, response.text
    shown = response.json()
    assert shown["model"] == model
    text: str = shown["choices"][0]["text"]
    return text


async def stream(
    client: httpx.AsyncClient, model: str, meanwhile: Callable[[], Awaitable[Any]]
) -> str:
    """Return the text of a long stream, after whose first token something else happens."""
    text, body = "", greedy(model, max_tokens=60, ignore_eos=True, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not text:
                    await meanwhile()
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def test_every_api_takes_an_adapter_as_a_model(exported: Path, root: Path) -> None:
    named = f"judge={exported / 'adapters/judge'}"
    async with serving(exported, adapter=named, adapter_dir=root) as (app, client):
        texts = {name: await complete(client, name) for name in ("base", "poet", "clerk", "judge")}
        assert len({*texts.values()}) == 4
        assert [bank_of(app).loaded.keys() >= {name} for name in ("poet", "judge")] == [True, True]
        models = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert models.keys() == texts.keys()
        assert (models["poet"]["parent"], models["poet"]["root"]) == ("base", "base")
        assert (models["base"]["parent"], models["base"]["root"]) == (None, "base")
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12}
        for path, body, place in (
            ("/v1/chat/completions", chat, "choices"),
            ("/v1/messages", chat, "content"),
            ("/v1/responses", {"input": PROMPT, "max_output_tokens": 12}, "output"),
        ):
            answers = {}
            for name in ("base", "poet"):
                asked = {"model": name, "temperature": 0.0} | body
                response = await client.post(path, json=asked)
                assert response.status_code == 200, response.text
                assert response.json()["model"] == name
                answers[name] = str(response.json()[place])
            assert answers["base"] != answers["poet"], path
        parameters = {"max_new_tokens": 12}
        for fields in (
            {"parameters": parameters | {"adapter_id": "poet"}},
            {"parameters": parameters, "model": "poet"},
        ):
            response = await client.post("/generate", json={"inputs": PROMPT} | fields)
            assert response.json()["generated_text"] == texts["poet"]
        body = {"model": "poet:latest", "prompt": PROMPT, "raw": True, "stream": False}
        options = {"options": {"temperature": 0.0, "num_predict": 12}}
        response = await client.post("/api/generate", json=body | options)
        assert response.json()["response"] == texts["poet"]
        tags = (await client.get("/api/tags")).json()["models"]
        assert "poet:latest" in {each["name"] for each in tags}
        metrics = (await client.get("/metrics")).text
        assert 'kvasir_adapter_requests_total{adapter="poet"} 7.0' in metrics
        assert "kvasir_adapters_loaded 3.0" in metrics


NO_ADAPTERS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"model": "nobody", "prompt": "a"}, "model"),
    ("/v1/completions", {"model": "../poet", "prompt": "a"}, "model"),
    ("/v1/completions", {"model": "out", "prompt": "a"}, "model"),
    ("/generate", {"inputs": "a", "parameters": {"adapter_id": "nobody"}}, "parameters"),
    ("/generate", {"inputs": "a", "model": "poet", "parameters": {"adapter_id": "clerk"}}, ""),
    ("/explain", {"model": "nobody", "prompt": "a"}, "model"),
]


async def test_a_name_that_is_no_adapter_here_is_refused(
    exported: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a link out of the folder one. The event loop never lists the folder.

    It takes a quarter of a second for a thousand adapters, in which no stream would go on.
    """
    (root / "out").symlink_to(exported / "adapters/judge")
    threads, names = list[Thread](), AdapterBank.names

    def listed(bank: AdapterBank) -> list[str]:
        threads.append(current_thread())
        return names(bank)

    monkeypatch.setattr(AdapterBank, "names", listed)
    async with serving(exported, adapter_dir=root) as (_, client):
        for path, body, param in NO_ADAPTERS:
            response = await client.post(path, json=body)
            assert response.status_code in (400, 404), response.text
            assert param in response.text
        listed_here = (await client.get("/v1/models")).json()["data"]
        assert {each["id"] for each in listed_here} == {"base", "poet", "clerk"}
        assert "poet" in (await client.get("/api/tags")).text
    assert threads
    assert main_thread() not in threads


async def test_an_adapter_is_explained_as_it_answers(exported: Path, root: Path) -> None:
    """By the graph that serves it; the model beside it as without adapters, but for rounding."""
    off = {"text": PROMPT, "layers": [1], "without": [{"layer": 0, "head": 1}]}
    async with serving(exported, adapter_dir=root) as (app, client):
        card = (await client.get("/model", params={"model": "poet"})).json()
        assert (card["model"], card["has_attention"]) == ("poet", True)
        found = {}
        for name in ("poet", "clerk", "base"):
            response = await client.post("/explain", json=off | {"model": name, "without": []})
            assert response.status_code == 200, response.text
            found[name] = response.json()
            asked = greedy(name, max_tokens=1, logprobs=5)
            answer = (await client.post("/v1/completions", json=asked)).json()
            (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            likeliest = found[name]["next_tokens"][0]
            assert likeliest["text"] == max(top, key=top.__getitem__)
            share = math.exp(top[likeliest["text"]])  # beside keys and values of 8 bits
            assert likeliest["probability"] == pytest.approx(share, rel=0.3)
        assert len({str(one["attention"]) for one in found.values()}) == 3
        edited = (await client.post("/explain", json=off | {"model": "poet"})).json()
        whole = {one["token_id"]: one["whole_probability"] for one in edited["effect"]["tokens"]}
        likeliest = found["poet"]["next_tokens"][0]
        assert whole[likeliest["token_id"]] == pytest.approx(likeliest["probability"], abs=1e-6)
        assert edited["attention"] != found["poet"]["attention"]
        assert bank_of(app).loaded.keys() == {"poet", "clerk"}
    async with serving(exported) as (_, client):
        plain = (await client.post("/explain", json=off | {"without": []})).json()
    for own, right in zip(found["base"]["attention"], plain["attention"], strict=True):
        np.testing.assert_allclose(own["weights"], right["weights"], atol=0.02)


def test_the_command_explains_a_model_with_an_adapter(exported: Path) -> None:
    command = ["explain", str(exported / "base"), PROMPT, "--json"]
    adapter = ["--adapter", str(exported / "adapters/poet")]
    plain, own = (
        json.loads(
            CliRunner().invoke(command_line, [*command, *more], catch_exceptions=False).stdout
        )
        for more in ([], adapter)
    )
    assert own["heads"].keys() == plain["heads"].keys()
    assert own["heads"] != plain["heads"]
    directory = load_model_dir(exported / "base")
    layout, library = Layout.load(directory.path / ADAPTERS_FILE), load_library("auto", None)
    assert isinstance(library, Library)
    explainer = Explainer(directory, 1, GraphAdapters(layout, library))
    assert explainer.adapters is not None
    given = explainer.adapters.load(exported / "adapters/poet", "poet", 2**30)
    expected = explainer.explain(PROMPT, [0], adapter=given).next_tokens
    assert [one["token_id"] for one in own["next_tokens"]] == [one.token_id for one in expected]
    for folder, model, fault in (
        (exported / "source", exported / "base", "adapter 'source': folder is"),
        (exported / "adapters/poet", EXAMPLES / "numbers", "it takes no adapters: it has no"),
    ):
        refused = ["explain", str(model), "a", "--target", "b", "--adapter", str(folder)]
        refused = refused if model.name == "numbers" else [*refused[:3], *refused[5:]]
        result = CliRunner().invoke(command_line, refused)
        assert (result.exit_code, fault in result.output) == (1, True), result.output
        assert result.output.count("\n") == 1


async def test_adapters_come_and_go_while_streams_run(exported: Path, root: Path) -> None:
    """A stream keeps its adapter, whose memory counts until then; a new one may have its name."""
    settings = {"adapter_dir": root, "adapter_admin_key": "admin"}
    async with serving(exported, **settings) as (app, client):
        poet, clerk = await complete(client, "poet"), await complete(client, "clerk")
        bank = bank_of(app)
        sizes = {name: adapter.n_bytes for name, adapter in bank.loaded.items()}

        async def unload() -> None:
            answer = await client.post(UNLOAD, json={"lora_name": "poet"}, headers=ADMIN)
            assert answer.status_code == 200

        held = hold(app, "poet")
        await held.__aenter__()
        assert (await stream(client, "poet", unload)).startswith(poet)
        assert (await client.post("/v1/completions", json=greedy("poet"))).status_code == 404
        assert bank.n_bytes == sum(sizes.values())
        await held.__aexit__(None, None, None)
        assert bank.n_bytes == sizes["clerk"]
        wanted = {"lora_name": "poet", "lora_path": "clerk"}
        assert (await client.post(LOAD, json=wanted, headers=ADMIN)).status_code == 200
        assert await complete(client, "poet") == clerk
        again = await client.post(LOAD, json=wanted, headers=ADMIN)
        assert again.status_code == 400
        assert "served already" in again.text


UNLOADABLE = {
    "../outside": "not below",
    "/etc": "not below",
    "link": "not below",
    "leaky": "not below",  # one of its files is a link
    "": "lora_path",
    "a\0b": "not below",
    "nowhere": "adapter_config.json",
    "no\nwhere": "adapter_config.json",
    "broken": "adapter_model.safetensors is damaged",
    "nan": "not finite",
    "large": "r must be less than",
}


async def test_what_cannot_be_loaded_is_refused_and_harms_nothing(
    exported: Path, root: Path
) -> None:
    (root / "link").symlink_to(exported / "adapters/judge")
    for name in ("broken", "nan", "large", "leaky"):
        shutil.copytree(root / "poet", root / name)
    (root / "leaky/chat_template.jinja").symlink_to("/etc/hostname")
    (root / "broken/adapter_model.safetensors").write_bytes(b"\x10")
    change_tensors(root / "nan", lambda held: {n: t * float("nan") for n, t in held.items()})
    set_config(root / "large", r=10_000)
    settings = {"adapter_dir": root, "adapter_admin_key": "admin"}
    async with serving(exported, **settings) as (app, client):
        for lora_path, named in UNLOADABLE.items():
            body = {"lora_name": "new", "lora_path": lora_path}
            response = await client.post(LOAD, json=body, headers=ADMIN)
            assert response.status_code == 400, lora_path
            assert named in (message := response.json()["error"]["message"])
            assert "\n" not in message
            assert not bank_of(app).loaded
        for name in ("broken", "nan", "large"):  # found by name: the folder is the server's
            response = await client.post("/v1/completions", json=greedy(name))
            assert response.status_code == 503, name
        await complete(client, "poet")


async def test_loading_by_requests_needs_its_own_key(exported: Path, root: Path) -> None:
    settings = {"adapter_dir": root, "adapter_admin_key": "admin", "api_key": "client"}
    client_key = {"authorization": "Bearer client"}
    async with serving(exported, **settings) as (_, client):
        for path, body in (
            (LOAD, {"lora_name": "a", "lora_path": "poet"}),
            (UNLOAD, {"lora_name": "a"}),
        ):
            for headers in ({}, client_key, {"authorization": "Bearer "}):
                for given in (body, {}):  # which is not read
                    response = await client.post(path, json=given, headers=headers)
                    assert response.status_code == 401
            assert (await client.post(path, json=body, headers=ADMIN)).status_code == 200
    async with serving(exported, adapter_dir=root) as (_, client):
        response = await client.post(LOAD, json={"lora_name": "a", "lora_path": "poet"})
        assert response.status_code == 404
        assert "adapter_admin_key" in response.text


async def test_the_least_recently_used_leaves_when_memory_is_short(
    exported: Path, root: Path
) -> None:
    shutil.copytree(exported / "adapters/judge", root / "judge")
    async with serving(exported, adapter_dir=root) as (app, client):
        texts = {name: await complete(client, name) for name in ("poet", "clerk", "judge")}
        size = max(adapter.n_bytes for adapter in bank_of(app).loaded.values())
    async with serving(exported, adapter_dir=root, adapter_memory=2 * size) as (app, client):
        bank = bank_of(app)
        for name in ("poet", "clerk", "poet", "judge"):
            assert await complete(client, name) == texts[name]
        assert bank.loaded.keys() == {"poet", "judge"}
        async with hold(app, "poet"), hold(app, "judge"):
            body = {"model": "clerk", "prompt": "a"}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 503
            assert response.headers["retry-after"]
        assert await complete(client, "clerk") == texts["clerk"]
        assert bank.n_bytes <= 2 * size


async def test_an_adapters_own_template_and_sampling_are_used(
    exported: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "poet/chat_template.jinja").write_text(
        "{% for m in messages %}!{{ m.content }}{% endfor %}"
    )
    sampling = {"do_sample": True, "temperature": 0.25, "top_k": 3, "unknown": 1}
    (root / "poet/generation_config.json").write_text(json.dumps(sampling))
    (root / "clerk/chat_template.jinja").write_text("{% for")
    async with serving(exported, adapter_dir=root) as (_, client):
        body = {"model": "poet", "messages": [{"role": "user", "content": "ab"}]}
        shown = (await client.post("/tokenize", json=body)).json()
        plain = (await client.post("/tokenize", json={"prompt": "!ab"})).json()
        assert shown["tokens"][-2:] == plain["tokens"][-2:]
        card = (await client.get("/model", params={"model": "poet"})).json()
        assert card["generation"] == {"temperature": 0.25, "top_k": 3}
        assert (await client.get("/model")).json()["generation"] == {}
        response = await client.post("/v1/completions", json={"model": "clerk", "prompt": "a"})
        assert response.status_code == 503
        assert str(root / "clerk/chat_template.jinja") in caplog.text


def test_a_model_that_takes_no_adapters_says_so_at_the_start(
    exported: Path, root: Path, tmp_path: Path
) -> None:
    found = load_model_dir(exported / "base")
    manifests: dict[str, dict[str, Any]] = {
        "it was exported for cuda": {"device": "cuda"},
        "it has no adapters.safetensors, being of an older Kvasir": {"files": {}},
    }
    cases = {
        reason: replace(found, manifest=found.manifest.model_copy(update=changes))
        for reason, changes in manifests.items()
    }
    for kind, reason in (("lfm2", "it has recurrent layers"), ("qwen2_moe", "it has experts")):
        config = load_checkpoint(save_checkpoint(tmp_path / kind, make_model(kind))).config
        cases[reason] = replace(found, config=config)
    known = load_settings(model=exported / "base", adapter_dir=root)
    for reason, model_dir in cases.items():
        with pytest.raises((ValueError, StartupError), match=f"it takes no adapters: {reason}"):
            build_engine(known, model_dir)


def test_beside_others_a_model_whose_graph_takes_no_adapters_is_served_without(
    exported: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of 4 bits with biases, where our operators are not. Alone it says so at the start."""
    found, reason = load_model_dir(exported / "base"), "its graph takes no adapters: a bias"
    names = [f"{name}={exported / 'base'}" for name in "ab"]
    memory = {"threads": 1, "kv_cache_memory": 2**24}
    alone, beside = (load_settings(model=n, adapter_dir=root, **memory) for n in (names[:1], names))
    clock, lone, served = StartClock(), ServedModel(alone, found), ServedModel(beside, found, "a")
    with patch.object(GraphAdapters, "attach", side_effect=NoAdaptersError(reason)):
        with pytest.raises(ValueError, match=reason):
            build_beside_others(build_engine, lone, clock)
        engine = build_beside_others(build_engine, served, clock)
    assert engine.adapters is None
    assert caplog.messages == [f"base is served without adapters: {reason}"]
    served.engine.engine = engine
    with pytest.raises(UnavailableError, match="'a' takes no adapters; the log says why"):
        graph_of(served)


async def test_without_our_operators_adapters_are_slower_and_the_log_says_so(
    exported: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with serving(exported, adapter_dir=root, kernels="off") as (app, client):
        found = {name: await complete(client, name) for name in ("base", "poet", "clerk")}
        assert len({*found.values()}) == 3
        assert app.state.models.served["base"].kernels is None
    said = [line for line in caplog.messages if "adapters" in line]
    assert said == ["adapters of base are computed by ONNX Runtime, slowly"]


async def test_a_model_of_vectors_takes_adapters(root: Path, tmp_path: Path) -> None:
    """By every route of encoders; an answer that is known by its text is the model's own."""
    model = make_encoder("modernbert")
    export_checkpoint(save(tmp_path / "source", model), tmp_path / "base", precision="int8")
    save_adapter(root / "lawyer", model, seed=3, task_type="FEATURE_EXTRACTION")
    async with serving(tmp_path, adapter_dir=root) as (_, client):

        async def vector(path: str, **body: Any) -> Any:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        found = {
            name: (await vector("/v1/embeddings", model=name, input=PROMPT))["data"][0]["embedding"]
            for name in ("base", "lawyer", "base")
        }
        assert found["base"] != found["lawyer"]
        (ollamas,) = (await vector("/api/embed", model="lawyer", input=PROMPT))["embeddings"]
        own = np.array(found["lawyer"])
        np.testing.assert_allclose(ollamas, own / np.linalg.norm(own), rtol=1e-5)
        refused = await client.post("/v1/embeddings", json={"model": "poet", "input": PROMPT})
        assert refused.status_code == 503  # of another model: it does not fit


OF_BASE = ("base", "poet", "clerk")


async def answers_of(place: Path, root: Path) -> dict[str, str]:
    """Return what a model that stays, and its adapters, answer."""
    async with serving(place, adapter_dir=root) as (_, client):
        return {name: await complete(client, name) for name in OF_BASE}


@asynccontextmanager
async def serving_folder(
    exported: Path, root: Path, folder: Path
) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """Serve a folder of two models that take adapters, and of one, the first, that takes none."""
    for name, source in (("a", EXAMPLES / "numbers"), ("base", exported / "base")):
        shutil.copytree(source, folder / name)
    shutil.copytree(EXAMPLES / "stdlib", folder / "code")
    save_example_adapter(root / "coder", 1)
    keys = {"adapter_admin_key": "admin", "models_admin_key": "admin"}
    named = f"clerk={root / 'clerk'}"
    known = load_settings(
        models_dir=folder, adapter=named, adapter_dir=root, threads=1, kv_cache_memory=2**24, **keys
    )
    dirs = {name: load_model_dir(path) for name, path in known.models.items()}
    with patch("kvasir.server.requests.registry.available_memory", lambda: 2**50):
        app = create_app(known, dirs)
    async with running(app) as client:
        yield app, client


async def ready(client: httpx.AsyncClient) -> set[str]:
    """Return the models and adapters of the folder that are in memory."""
    listed = (await client.get("/v1/models")).json()["data"]
    parents = {"poet": "base", "clerk": "base", "coder": "code"}
    assert {one["id"]: one["parent"] for one in listed} == {
        **dict.fromkeys(("a", "base", "code")),
        **parents,
    }
    assert {one["state"] for one in listed} <= {"ready", "unloaded"}
    return {one["id"] for one in listed if one["state"] == "ready"}


async def unload(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post("/v1/models/unload", json={"model": name}, headers=ADMIN)
    assert answer.status_code == 200


async def test_models_of_a_folder_take_adapters_whenever_they_are_loaded(
    exported: Path, root: Path, tmp_path: Path
) -> None:
    """Each those that fit it, which go with it, and come again."""
    expected = await answers_of(exported, root)
    async with serving_folder(exported, root, tmp_path / "models") as (app, client):
        assert not await ready(client)
        wanted = {"lora_name": "poet", "lora_path": "poet"}
        for model, fault in (("code", "tensor is"), ("a", "a model here that takes adapters")):
            body = wanted | {"base_model_name": model}
            refused = await client.post(LOAD, json=body, headers=ADMIN)
            assert (refused.status_code, fault in refused.text) == (400, True), refused.text
        await unload(client, "code")
        # It loads the model as well.
        assert (await client.post(LOAD, json=wanted, headers=ADMIN)).status_code == 200
        assert await ready(client) == {"base", "poet"}
        assert {name: await complete(client, name) for name in OF_BASE} == expected
        coded = {name: await complete(client, name) for name in ("code", "coder")}
        assert coded["code"] != coded["coder"]
        assert await ready(client) == {*OF_BASE, *coded}
        await unload(client, "base")
        assert await ready(client) == {*coded}
        assert bank_of(app).n_bytes == bank_of(app).loaded["coder"].n_bytes
        await unload(client, "code")
        assert not await ready(client)
        assert bank_of(app).n_bytes == 0
        await complete(client, "poet")
        ended = await client.post("/api/generate", json={"model": "poet", "keep_alive": 0})
        assert ended.json()["done_reason"] == "unload"
        assert not await ready(client)
        answers = {name: await complete(client, name) for name in (*OF_BASE, *coded)}
        assert answers == expected | coded


@pytest.mark.usefixtures("own_garbage")
async def test_a_new_version_of_a_folders_model_reads_its_adapters_again(
    exported: Path, root: Path, tmp_path: Path
) -> None:
    """What runs keeps the old ones. Each is explained as it answers, loaded or not before."""
    export_checkpoint(exported / "source", tmp_path / "newer/base", precision="fp32")
    expected = [await answers_of(place, root) for place in (exported, tmp_path / "newer")]
    folder = tmp_path / "models"
    async with serving_folder(exported, root, folder) as (app, client):
        assert await complete(client, "poet") == expected[0]["poet"]

        async def renew() -> None:
            (folder / "base").rename(tmp_path / "old")
            (tmp_path / "newer/base").rename(folder / "base")
            assert {name: await complete(client, name) for name in expected[1]} == expected[1]

        streamed = await stream(client, "poet", renew)
        assert streamed.startswith(expected[0]["poet"])
        explainers = app.state.explanations["base"]._explainers
        for name in (*OF_BASE, "coder", "poet"):
            card = (await client.get("/model", params={"model": name})).json()
            assert card["has_attention"]
            answer = await client.post("/explain", json={"model": name, "text": PROMPT})
            assert answer.status_code == 200, answer.text
            asked = greedy(name, max_tokens=1, logprobs=3)
            said = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
            assert answer.json()["next_tokens"][0]["text"] in said["logprobs"]["top_logprobs"][0]
            assert len(explainers) == 1, "the weights of one model at a time are there twice"
        for name in ("base", "code"):
            await unload(client, name)
        # A thread may hold an engine for a moment after it has answered.
        await until(lambda: gc.collect() >= 0 and not explainers)


def test_a_folder_without_a_model_that_takes_adapters_is_refused(tmp_path: Path) -> None:
    none = load_settings(models_dir=EXAMPLES, adapter_dir=tmp_path)
    dirs = {"numbers": load_model_dir(EXAMPLES / "numbers")}
    with pytest.raises(StartupError, match="no model of the folder takes adapters"):
        ModelRegistry(none, dirs)


async def test_requests_may_use_adapters_before_the_start_has_read_them(
    exported: Path, root: Path
) -> None:
    """The model is ready by then; one asks for an adapter, another leaves no room for the next."""
    begin, used = AdaptedModels.load_named, asyncio.Event()

    async def after_a_request(adapted: AdaptedModels, model: str) -> None:
        try:
            poet = adapted.find("poet")
            assert poet is not None
            async with poet.holding() as adapter:
                adapted.bank.most_bytes = adapter.n_bytes
                await begin(adapted, model)
        finally:
            used.set()

    named = ",".join(f"{name}={root / name}" for name in ("poet", "clerk"))
    with patch.object(AdaptedModels, "load_named", after_a_request):
        async with serving(exported, adapter=named) as (app, client):
            await used.wait()
            assert not app.state.models.failures
            assert bank_of(app).loaded.keys() == {"poet"}
            await complete(client, "clerk")


@pytest.mark.parametrize("fault", ["weights", "template"])
async def test_a_wrong_adapter_of_the_settings_ends_the_start(
    fault: str, exported: Path, root: Path
) -> None:
    message = "the adapter 'poet' cannot be used; the server's log says why"
    if fault == "weights":
        set_config(root / "poet", use_dora=True)
        message = "adapter 'poet': use_dora is True; expected nothing: this is not computed"
    else:
        (root / "poet" / "chat_template.jinja").write_text("{% if %}")
    known = load_settings(model=exported / "base", adapter=f"poet={root / 'poet'}")
    app = create_app(known, load_model_dir(exported / "base"))
    failed: asyncio.Queue[StartupError] = asyncio.Queue()
    app.state.models.on_load_failure = failed.put_nowait
    async with running(app):
        assert str(await asyncio.wait_for(failed.get(), TIMEOUT)) == message


def test_models_without_adapters_are_served_beside_those_that_take_some(tmp_path: Path) -> None:
    """If none takes some, the first that writes text, or else the first, says why it does not."""
    known = load_settings(model=("a=x", "b=y"), adapter_dir=tmp_path)
    text, damaged = fake_model_dir(), StartupError("damaged")
    files = {ADAPTERS_FILE: ""}
    takes = replace(text, manifest=text.manifest.model_copy(update={"files": files}))
    pooling = Pooling(kind="mean")
    vectors = replace(text, config=replace(text.config, pooling=pooling, causal=False))
    cases: list[tuple[dict[str, ModelDirectory | StartupError], dict[str, bool]]] = [
        ({"a": text, "b": text}, {"a": True, "b": False}),
        ({"a": vectors, "b": text}, {"a": False, "b": True}),
        ({"a": vectors}, {"a": True}),
        ({"a": damaged, "b": text}, {"b": False}),
        ({"a": text, "b": takes}, {"a": False, "b": True}),
        ({"a": takes, "b": takes}, {"a": True, "b": True}),
    ]
    for found, has_adapters in cases:
        models = ModelRegistry(known, found)
        served = models.served.items()
        assert {name: one.settings.has_adapters for name, one in served} == has_adapters
        assert (models.bank is not None) == any(has_adapters.values())

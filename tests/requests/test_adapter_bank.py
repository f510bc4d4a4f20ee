"""Adapters that are read while clients come and go, and whose they are, without a graph."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.requests import Request

from kvasir.model.adapters.config import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE, AdapterError
from kvasir.model.adapters.layout import Layer, Layout, Part
from kvasir.model.adapters.peft import TENSOR, read_shapes
from kvasir.model.directory import ADAPTERS_FILE, ModelDirectory
from kvasir.server.api.http.responses import note_model, served_model
from kvasir.server.engine.adapters.loaded import Adapter, GraphAdapters, NoAdaptersError
from kvasir.server.engine.engine import Engine
from kvasir.server.errors import InvalidRequestError, StartupError, UnavailableError
from kvasir.server.process.app import create_app
from kvasir.server.requests.adapters.bank import AdapterBank
from kvasir.server.requests.adapters.served import AdaptedModel
from kvasir.server.requests.completion import RequestState
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import Settings, load_settings
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, fake_model_dir, running

TIMEOUT = 60.0


class SlowGraph:
    """Reads an adapter once it is allowed; notes how many are read at a time."""

    def __init__(self, begun: Callable[[str], object]) -> None:
        self.begun, self.may_end = begun, threading.Semaphore(0)
        self.n_reading = self.most_reading = 0
        self.error: AdapterError | None = None

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, _other: object) -> bool:
        raise AssertionError("the arrays of graphs are not compared")

    def load(self, _folder: Path, name: str, most_bytes: int) -> Adapter:
        self.n_reading += 1
        self.most_reading = max(self.most_reading, self.n_reading)
        self.begun(name)
        assert self.may_end.acquire(timeout=TIMEOUT)
        self.n_reading -= 1
        if self.error is not None:
            raise self.error
        matrices = {"layer": [np.zeros(most_bytes // 4, dtype=np.uint8)]}
        table = np.zeros((0, 0), dtype=np.int64)
        return Adapter(name, name.encode(), None, table, matrices, as_graph(self))


def as_graph(graph: SlowGraph) -> GraphAdapters:
    return cast("GraphAdapters", graph)


class Bench:
    """A bank of adapters a, b and c, of which four have room, and the names that are being read."""

    def __init__(self, root: Path) -> None:
        for name in "abc":
            (root / name).mkdir()
            (root / name / ADAPTER_FILE).write_text("{}")
        loop, self.begun = asyncio.get_running_loop(), asyncio.Queue[str]()
        self.graph = SlowGraph(lambda name: loop.call_soon_threadsafe(self.begun.put_nowait, name))
        self.bank = AdapterBank({}, root, 1000)

    async def use(self, name: str) -> bytes:
        async with asyncio.timeout(TIMEOUT), self.bank.hold(name, as_graph(self.graph)) as adapter:
            return adapter.digest

    async def add(self, name: str, folder: Path) -> None:
        await self.bank.add(name, folder, as_graph(self.graph), "base")

    async def leave(self, work: asyncio.Task[Any]) -> None:
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.graph.may_end.release(100)


async def test_a_load_ends_once_though_its_request_has_left(bench: Bench) -> None:
    """And the next begins after it: who leaves again and again would fill the memory."""
    first = asyncio.create_task(bench.use("a"))
    assert await bench.begun.get() == "a"
    waiting = asyncio.create_task(bench.use("b"))
    await asyncio.sleep(0)
    await bench.leave(first)
    again, last = asyncio.create_task(bench.use("a")), asyncio.create_task(bench.use("c"))
    await asyncio.sleep(0)
    await bench.leave(waiting)  # before its turn: b is not read
    bench.graph.may_end.release(2)
    assert await again == b"a"
    assert await last == b"c"
    assert await bench.begun.get() == "c"
    assert bench.graph.most_reading == 1
    assert bench.begun.empty()
    assert bench.bank.loaded.keys() == {"a", "c"}
    assert bench.bank.n_bytes == sum(one.n_bytes for one in bench.bank.loaded.values())
    assert not bench.bank._n_holders


async def test_a_load_by_name_is_served_though_its_client_has_left(
    bench: Bench, tmp_path: Path
) -> None:
    loading = asyncio.create_task(bench.add("new", tmp_path / "a"))
    assert await bench.begun.get() == "new"
    await bench.leave(loading)
    bench.graph.may_end.release()
    assert await bench.use("new") == b"new"
    assert bench.bank.find("new") == tmp_path / "a"
    with pytest.raises(InvalidRequestError, match="'new' is served already"):
        await bench.add("new", tmp_path / "a")


async def test_a_load_that_fails_after_its_client_has_left_harms_nothing(bench: Bench) -> None:
    bench.graph.error = AdapterError("adapter 'a': damaged")
    for leaves in (True, False):
        using = asyncio.create_task(bench.use("a"))
        assert await bench.begun.get() == "a"
        if leaves:
            await bench.leave(using)
        bench.graph.may_end.release()
    with pytest.raises(UnavailableError, match="'a' could not be loaded"):
        await using
    assert not bench.bank.loaded
    bench.graph.error = None
    bench.graph.may_end.release()
    assert await bench.use("a") == b"a"


async def test_another_version_of_the_model_reads_an_adapter_again(bench: Bench) -> None:
    """Its addresses and factors are another's. Both may be in memory while requests use them."""
    older, newer, bank = as_graph(bench.graph), as_graph(SlowGraph(bench.graph.begun)), bench.bank
    for graph in (older, newer):
        cast("SlowGraph", graph).may_end.release(2)
    async with bank.hold("a", older) as old:
        async with bank.hold("a", newer) as new, bank.hold("a", newer) as same:
            assert new is same is bank.loaded["a"]
            assert old.graph is older
            assert new.graph is newer
            assert bank.n_bytes == old.n_bytes + new.n_bytes
        bank.clear(older)
        assert bank.loaded == {"a": new}, "those of another version, or model, stay"
        bank.clear(newer)
        assert bank.n_bytes == old.n_bytes
    assert bank.n_bytes == 0


def save_model(folder: Path, n_in: int, source: str = "") -> ModelDirectory:
    """Save what takes adapters of one layer of `n_in` inputs; return the directory of a fake."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    part = Part("layers.0.q", 4, 0, np.arange(4, dtype=np.int32))
    layer = Layer((part,), np.ones(4, np.float32), np.ones(n_in, np.float32))
    Layout(("",), {"q": layer}).save(folder / ADAPTERS_FILE)
    made = fake_model_dir(folder)
    facts: dict[str, Any] = {"files": {ADAPTERS_FILE: folder.name}, "source": {"name": source}}
    return replace(made, manifest=made.manifest.model_copy(update=facts))


def save_peft(folder: Path, n_in: int, base: str | None = None) -> None:
    """Save an adapter of a layer of `n_in` inputs."""
    folder.mkdir(parents=True)
    shapes = {"A": (2, n_in), "B": (4, 2)}
    tensors = {
        TENSOR.format("layers.0.q", part): np.ones(shape, dtype=np.float32)
        for part, shape in shapes.items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS_FILE)
    described = {"r": 2, "lora_alpha": 2, "base_model_name_or_path": base}
    (folder / ADAPTER_FILE).write_text(json.dumps(described))


def of_folder(tmp_path: Path, **model_dirs: ModelDirectory) -> ModelRegistry:
    """Return the models of a folder, and the adapters of another."""
    known = load_settings(models_dir=tmp_path / "models", adapter_dir=tmp_path / "adapters")
    return ModelRegistry(known, model_dirs)


def test_adapters_keep_no_version_of_a_model_that_was_replaced(tmp_path: Path) -> None:
    found = save_model(tmp_path / "models/a", 8)
    save_peft(tmp_path / "adapters/poet", 8, "org/renamed")  # a lone model's, whatever its name
    models = of_folder(tmp_path, a=found)
    assert models.adapter("poet") is not None
    former = models.served["a"]
    models.served["a"] = former.renewed(found)
    former.metrics.end()
    gone = weakref.ref(former)
    del former
    gc.collect()
    assert gone() is None
    view = models.adapter("poet")
    assert view is not None
    assert view.parent is models.served["a"]


def test_a_part_that_an_adapted_model_lacks_is_its_models_and_a_broken_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_peft(tmp_path / "adapters/poet", 8)
    view = of_folder(tmp_path, a=save_model(tmp_path / "models/a", 8)).adapter("poet")
    assert view is not None
    assert view.admission is view.parent.admission

    def broken(served: ServedModel) -> Any:
        return served.missing if isinstance(served, AdaptedModel) else "chat"

    monkeypatch.setattr(ServedModel, "kind", property(broken))
    with pytest.raises(AttributeError, match="missing"):
        _ = view.kind


def parents(models: ModelRegistry) -> dict[str, str]:
    return {adapter.name: adapter.parent.name for adapter in models.adapters}


def test_an_adapter_is_of_the_model_that_it_names_or_else_of_the_first_that_it_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model is named by its directory, or by what was exported, too. A choice is told once."""
    sizes = {"a": 8, "b": 8, "c": 16}
    found = {n: save_model(tmp_path / "models" / n, n_in, f"Tiny-{n}") for n, n_in in sizes.items()}
    bases = {"by_id": "b", "by_source": "org/tiny-B", "of_run": "/runs/b/step-00000500", "no": None}
    for name, base in bases.items():
        save_peft(tmp_path / "adapters" / name, 8, base)
    save_peft(tmp_path / "adapters/wide", 16, "org/elsewhere")
    save_peft(tmp_path / "adapters/pipe", 16)
    weights = tmp_path / "adapters/pipe" / ADAPTER_WEIGHTS_FILE
    weights.unlink()
    os.mkfifo(weights)  # which nobody writes: it fits none
    models = of_folder(tmp_path, **found)
    assert models.adapted is not None
    expected = dict.fromkeys(("by_id", "by_source", "of_run"), "b") | {"no": "a", "wide": "c"}
    expected["pipe"] = "a"
    for _ in range(2):
        assert parents(models) == expected
    (told,) = (message for message in caplog.messages if "is of the first" in message)
    assert told.startswith("adapter 'no' fits 'a' and 'b', and is of the first; ")
    folder = tmp_path / "adapters/no"
    assert models.adapted.choose("no", folder, "b") == "b"
    message = (
        "adapter 'no': base_model_name is 'x'; expected a model here that takes adapters: 'a' or "
        "'b' or 'c'"
    )
    with pytest.raises(AdapterError, match=message):
        models.adapted.choose("no", folder, "x")
    scope: dict[str, Any] = {"app": SimpleNamespace(state=SimpleNamespace(models=models))}
    request = Request(scope | {"type": "http", "state": {"request": RequestState("id", 0.0)}})
    note_model(request.scope, models.named("no"))
    former = models.served["a"]
    models.served["a"] = former.renewed(save_model(tmp_path / "newer", 12))
    assert parents(models) == expected | {"no": "b"}, "a's new version has other layers"
    with pytest.raises(UnavailableError, match="another model's"):
        served_model(request)  # which keeps a in memory, and not b


def test_an_adapter_that_names_a_model_without_adapters_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answers by another model that it fits would be wrong. What fits none is of the first."""
    takes, plain = save_model(tmp_path / "models/a", 8), fake_model_dir(tmp_path / "models/plain")
    plain.path.mkdir()
    (plain.path / "manifest.json").write_text("{}")
    save_peft(tmp_path / "adapters/wrong", 8, "plain")
    save_peft(tmp_path / "adapters/wide", 16)
    models = of_folder(tmp_path, a=takes, plain=plain)
    assert [one.settings.has_adapters for one in models.served.values()] == [True, False]
    for _ in range(2):
        with pytest.raises(UnavailableError, match="'wrong' cannot be used"):
            models.adapter("wrong")
    assert caplog.messages == [
        "adapter 'wrong': base_model_name_or_path is 'plain'; expected a model here that takes "
        "adapters: 'a'"
    ]
    assert parents(models) == {"wide": "a"}


def test_an_adapters_model_is_chosen_again_when_its_files_change(tmp_path: Path) -> None:
    """A list may come while a copy has only begun; later it is trained anew on another model."""
    sizes = {"a": 8, "b": 16}
    found = {name: save_model(tmp_path / "models" / name, n_in) for name, n_in in sizes.items()}
    models, folder = of_folder(tmp_path, **found), tmp_path / "adapters/late"
    save_peft(folder, 16)
    (folder / ADAPTER_WEIGHTS_FILE).rename(tmp_path / "weights")
    assert parents(models) == {"late": "a"}, "it fits none yet"
    (tmp_path / "weights").rename(folder / ADAPTER_WEIGHTS_FILE)
    assert parents(models) == {"late": "b"}
    save_peft(tmp_path / "newer", 8)
    for file in (tmp_path / "newer").iterdir():
        file.replace(folder / file.name)
    assert parents(models) == {"late": "a"}


def test_another_thread_may_unload_an_adapter_while_it_is_looked_for(tmp_path: Path) -> None:
    class Leaving(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            return self.pop(str(name), None) is not None

    save_peft(tmp_path / "adapters/poet", 8)
    models = of_folder(tmp_path, a=save_model(tmp_path / "models/a", 8))
    assert models.bank is not None
    models.bank.folders = Leaving(poet=tmp_path / "adapters/poet")
    models.bank.models = Leaving(poet="a")
    assert models.adapter("poet") is not None


def test_an_adapter_of_the_settings_that_names_a_model_without_adapters_ends_the_start(
    tmp_path: Path,
) -> None:
    """One of a model that could not be loaded does not: that leaves the others as they are."""
    found: dict[str, ModelDirectory | StartupError] = {"broken": StartupError("damaged")}
    found |= {"a": save_model(tmp_path / "a", 8), "plain": fake_model_dir(tmp_path / "plain")}
    save_peft(tmp_path / "wrong", 8, "plain")
    save_peft(tmp_path / "lost", 8, "broken")
    given = [f"{name}=x" for name in found]
    known = load_settings(model=given, adapter=f"lost={tmp_path / 'lost'}")
    with pytest.raises(UnavailableError, match="'broken' could not be loaded"):
        ModelRegistry(known, found).named("lost")
    known = load_settings(model=given, adapter=f"wrong={tmp_path / 'wrong'}")
    with pytest.raises(StartupError, match="base_model_name_or_path is 'plain'; expected a model"):
        ModelRegistry(known, found)


async def test_a_model_that_turns_out_to_take_no_adapters_leaves_them_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load one for a model that could not be loaded says so."""
    found: dict[str, ModelDirectory | StartupError] = {
        name: save_model(tmp_path / name, 8) for name in "abc"
    }
    found["d"] = StartupError("damaged")
    adapter = tmp_path / "adapters/poet"
    save_peft(adapter, 8)
    save_peft(tmp_path / "adapters/of_a", 8, "a")

    def build(settings: Settings, model_dir: ModelDirectory, *_clock: object) -> Engine:
        if model_dir.path.name == "c":
            raise ValueError("damaged")
        layout = Layout.load(model_dir.path / ADAPTERS_FILE) if settings.has_adapters else None
        if layout is not None and model_dir.path.name == "a":
            raise NoAdaptersError("its graph takes none")
        graph = None if layout is None else GraphAdapters(layout)
        return Engine(FakeRunner(VOCAB_SIZE), chunk_size=8, adapters=graph)

    monkeypatch.setattr("kvasir.server.process.app.build_engine", build)
    options = {"adapter_dir": tmp_path / "adapters", "adapter_admin_key": "admin"}
    named = [f"{name}={tmp_path / name}" for name in found]
    app = create_app(load_settings(model=named, adapter=f"own={adapter}", **options), found)
    models: ModelRegistry = app.state.models
    async with running(app) as client:
        await asyncio.wait_for(app.state.loading, TIMEOUT)
        assert models.states == dict.fromkeys("ab", "ready") | dict.fromkeys("cd", "failed")
        assert parents(models) == {"own": "b", "poet": "b"}
        assert models.adapted is not None
        assert models.adapted.bank.loaded.keys() == {"own"}
        headers = {"authorization": "Bearer admin"}
        for path, model, status, param, fault in (
            ("poet", "c", 503, None, "'c' could not be loaded"),
            ("poet", "d", 503, None, "'d' could not be loaded"),
            ("poet", "a", 400, "base_model_name", "is 'a'; expected a model here"),
            ("of_a", "", 400, "lora_path", "is 'a'; expected a model here"),
        ):
            body = {"lora_name": "new", "lora_path": path, "base_model_name": model}
            answer = await client.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert (answer.status_code, fault in answer.text) == (status, True), answer.text
            assert answer.json()["error"]["param"] == param
        threads = list[threading.Thread]()

        def read(folder: Path) -> dict[str, tuple[Any, ...]]:
            threads.append(threading.current_thread())
            return read_shapes(folder)

        monkeypatch.setattr("kvasir.server.requests.adapters.adapted_models.read_shapes", read)
        body = {"lora_name": "new", "lora_path": "poet"}
        answer = await client.post("/v1/load_lora_adapter", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert len(threads) == 1, "one read for all layouts"
        assert threads[0] is not threading.main_thread()


def test_an_adapter_of_a_model_that_could_not_be_loaded_is_of_no_other(tmp_path: Path) -> None:
    """Unless it names one: the first model may be the one that it fits."""
    found: dict[str, ModelDirectory | StartupError] = {"a": StartupError("damaged")}
    found["b"] = save_model(tmp_path / "b", 8)
    for name, base in (("no", None), ("of_a", "a"), ("of_b", "b")):
        save_peft(tmp_path / "adapters" / name, 8, base)
    known = load_settings(model=("a=x", "b=y"), adapter_dir=tmp_path / "adapters")
    models = ModelRegistry(known, found)
    assert parents(models) == {"of_b": "b"}
    for name in ("no", "of_a"):
        with pytest.raises(UnavailableError, match="'a' could not be loaded"):
            models.named(name)

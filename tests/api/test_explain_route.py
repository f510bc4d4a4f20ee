"""POST /explain gives the numbers of `kvasir explain`, within limits and beside streams."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest

from kvasir.model.directory import GRAPH_FILE, ModelDirectory
from kvasir.server.api.explain.answers import Explanation
from kvasir.server.api.explain.routes import MAX_WEIGHTS, Explanations
from kvasir.server.explain.explainer import Explainer
from kvasir.server.explain.explanation import Explanation as Explained
from kvasir.server.explain.explanation import Head, Questions
from tests.api.test_explain import TEXT, make_directory
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import serving


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return make_directory(tmp_path_factory.mktemp("explained") / "model", "fp32")[1]


@asynccontextmanager
async def explaining(
    model_dir: ModelDirectory, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(FakeRunner(model_dir.config.vocab_size), 0, model_dir, **settings) as served:
        yield served.client


async def test_answers_are_the_explainers(model_dir: ModelDirectory) -> None:
    """Each part is left out unless it is asked for."""
    of, off = {"layer": 1, "head": 3}, [{"layer": 0, "head": 1}]
    asked = Questions(2, 5, (Head(0, 1),), lens=3, entropies=True, values_of=Head(1, 3))
    expected = Explainer(model_dir, threads=1).explain(TEXT, [1, 0], asked)
    body = {"text": TEXT, "top_k": 2, "position": 5, "lens": 3, "without": off}
    some = {"layers": [1, 0, 1], "heads": [3, 2], "entropies": True, "head_values": of}
    async with explaining(model_dir) as client:
        response = await client.post("/explain", json=body | some)
        usual = (await client.post("/explain", json={"prompt": TEXT})).json()
        none = {"heads": [], "top_k": 0}
        without_maps = (await client.post("/explain", json=body | none)).json()
        limits = (await client.get("/model")).json()["explain_limits"]
    Explanation.model_validate_json(response.content)
    answer = response.json()
    parts = ("tokens", "token_ids", "next_tokens", "effect")
    assert {name: answer[name] for name in parts} == {
        name: value for name, value in asdict(expected).items() if name in parts
    }
    assert answer["lens"] == [
        {"layer": layer, "next_tokens": [asdict(token) for token in tokens]}
        for layer, tokens in enumerate(expected.lens)
    ]
    np.testing.assert_array_equal(np.float32(answer["entropies"]), expected.entropies)
    values = expected.head_values
    assert values is not None
    shown = answer["head_values"]
    assert (shown["layer"], shown["head"], shown["scale"]) == (1, 3, values.scale)
    for name in ("queries", "keys", "values", "scores"):
        np.testing.assert_array_equal(np.float32(shown[name]), getattr(values, name))
    heads = [(one["layer"], one["head"]) for one in answer["attention"]]
    assert heads == [(0, 2), (0, 3), (1, 2), (1, 3)]
    for one in answer["attention"]:
        weights = expected.weights[one["layer"]][one["head"]]
        np.testing.assert_array_equal(np.float32(one["weights"]), weights)
        (own,) = expected.behaviours(one["layer"], [one["head"]], model_dir.config)
        assert (one["behaviour"], one["shares"]) == (own.label, own.shares)
    assert [(one["layer"], one["head"]) for one in usual["attention"]] == [(0, i) for i in range(4)]
    assert len(usual["next_tokens"]) == 10
    assert without_maps["lens"] == answer["lens"]
    assert (without_maps["attention"], without_maps["next_tokens"]) == ([], [])
    assert "effect" not in without_maps  # it takes another run
    assert limits == {"max_tokens": 96, "max_weights": MAX_WEIGHTS}


async def test_weights_of_no_head_are_not_computed(
    model_dir: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's weights come for all its heads, so an answer's limit would not bound them."""
    found: list[dict[int, Any]] = []

    class Spy(Explainer):
        def explain_tokens(self, *args: Any) -> Any:
            explanation = super().explain_tokens(*args)
            found.append(explanation.weights)
            return explanation

    monkeypatch.setattr("kvasir.server.api.explain.routes.Explainer", Spy)
    async with explaining(model_dir) as client:
        for top_k in (0, 3):
            body = {"text": TEXT, "layers": [0, 1], "heads": [], "top_k": top_k}
            answer = (await client.post("/explain", json=body)).json()
            assert (answer["attention"], len(answer["next_tokens"])) == ([], top_k)
    assert found == [{}, {}]


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"text": "ab", "position": 2}, "position", "there is no position 2; the text has 0 to 1"),
    ({"text": "a", "without": [{"layer": 2, "head": 0}]}, "without", "there is no layer 2"),
    ({"text": "a", "without": [{"layer": 0}]}, "without.0.head", "Field required"),
    ({"text": "a", "head_values": {"layer": 0, "head": 4}}, "head_values", "there is no head 4"),
    ({"text": "abc", "heads": [0], "head_values": {"layer": 0, "head": 0}}, "heads", "143"),
    ({"text": "a", "layers": [0, 2]}, "layers", "there is no layer 2; the model has layers 0 to 1"),
    ({"text": "a", "heads": [4]}, "heads", "there is no head 4; layer 0 has heads 0 to 3"),
    ({"text": ""}, "text", "there is no token in the text"),
    ({"text": "a", "target": "b"}, "target", "target is for a model with an encoder"),
    ({"text": "a", "target_language": "fr"}, "target_language", "target_language is for a model"),
    ({"text": "a" * 97}, "text", "is 96 tokens"),
    ({"text": "a", "prompt": "a"}, None, "give either text or prompt"),
    ({}, None, "give either text or prompt"),
    ({"text": "a", "layers": []}, "layers", "layers: List should have at least 1 item"),
    ({"text": "uvwxyz"}, "heads", "4 maps of 6 tokens are 144 weights, more than the 143"),
]  # fmt: skip


async def test_a_bad_field_is_named(
    model_dir: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir.server.api.explain.routes.MAX_WEIGHTS", 143)
    async with explaining(model_dir) as client:
        for body, param, message in REFUSED:
            response = await client.post("/explain", json=body)
            assert response.status_code == 400, body
            assert message in response.json()["error"]["message"], body
            assert response.json()["error"]["param"] == param, body


async def test_its_tokens_are_of_the_keys_tokens_a_minute(
    model_dir: ModelDirectory, tmp_path: Path
) -> None:
    headers, keys = {"authorization": "Bearer a"}, tmp_path / "keys"
    keys.write_text("name=default tokens_per_minute=1 a")
    async with explaining(model_dir, api_key_file=keys) as client:
        first, second = [
            await client.post("/explain", json={"text": TEXT}, headers=headers) for _ in range(2)
        ]
        metrics = (await client.get("/metrics")).text
    n = len(first.json()["tokens"])
    labels = 'key="default",kind="prompt",model="fake-model"'
    assert f"kvasir_key_tokens_total{{{labels}}} {n}.0" in metrics
    assert (first.status_code, second.status_code) == (200, 429)
    assert "1 tokens a minute" in second.json()["error"]["message"]


async def test_it_can_be_switched_off() -> None:
    async with serving(explain=False) as served:
        for body in ({"text": "a"}, {"layers": "no list"}):
            response = await served.client.post("/explain", json=body)
            assert response.status_code == 404
            assert "/explain is switched off" in response.json()["error"]["message"]
        card = (await served.client.get("/model")).json()
    assert (card["has_attention"], card["explain_limits"]) == (False, None)


async def test_a_model_of_a_folder_is_explained_where_its_weights_have_room_again(
    model_dir: ModelDirectory, tmp_path: Path
) -> None:
    """Scales of int4 have 16 bits in its file, and 32 in memory."""
    int4 = make_directory(tmp_path / "int4", "int4")[1]
    for found in (model_dir, int4):
        n_file = sum(file.stat().st_size for file in found.path.glob("*.data"))
        stored = onnx.load(found.path / GRAPH_FILE, load_external_data=False).graph.initializer
        scales = (of.dims for of in stored if of.data_type == onnx.TensorProto.FLOAT16)
        most = n_file + (n_file // 9 if found is int4 else 0)
        needed = n_file + sum(2 * math.prod(shape) for shape in scales)
        assert (needed > n_file) is (found is int4)
        async with serving(FakeRunner(found.config.vocab_size), 0, found) as served:
            for n_free, status in ((needed - 1, 503), (most, 200)):
                free = partial(int, n_free)
                served.app.state.explanations["fake-model"] = Explanations(free)
                answer = await served.client.post("/explain", json={"text": TEXT})
                assert answer.status_code == status, answer.text


async def test_one_is_explained_three_wait_and_others_are_refused(
    model_dir: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers other requests meanwhile, and a finished explanation makes room."""
    may_finish, begun = threading.Event(), asyncio.Event()
    loop, explain = asyncio.get_running_loop(), Explainer.explain_tokens
    built: list[Explainer] = []
    nicenesses: set[int] = set()

    def held(explainer: Explainer, *arguments: Any, **options: Any) -> Explained:
        built.append(explainer)
        nicenesses.add(os.getpriority(os.PRIO_PROCESS, 0))  # of this thread, on Linux
        loop.call_soon_threadsafe(begun.set)
        assert may_finish.wait(TIMEOUT)
        return explain(explainer, *arguments, **options)

    monkeypatch.setattr(Explainer, "explain_tokens", held)
    async with explaining(model_dir) as client:

        def post() -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post("/explain", json={"text": TEXT}))

        first = post()
        await asyncio.wait_for(begun.wait(), TIMEOUT)
        waiting = [post() for _ in range(3)]
        refused = await post()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        ).status_code == 200
        may_finish.set()
        assert [
            one.status_code for one in (await first, *await asyncio.gather(*waiting), await post())
        ] == [200] * 5
    assert len(built) == 5
    assert len(set(map(id, built))) == 1  # loaded once
    if sys.platform == "linux":
        assert min(nicenesses) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 1)

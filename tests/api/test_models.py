"""GET /model agrees with the model directory and the engine, even after files are removed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from kvasir.model.directory import ModelDirectory
from kvasir.server.api.models import ModelCard
from kvasir.server.process.app import create_app
from kvasir.server.settings import load_settings
from tests.kit.fake_encoder import encoder_model_dir
from tests.kit.fake_runner import FakeRunner
from tests.kit.fake_seq2seq import small_config
from tests.kit.serving import MODEL, VOCAB_SIZE, fake_model_dir, serving


def model_dir_with_files(path: Path) -> ModelDirectory:
    for name, size in (("config.json", 7), ("model.onnx", 3000)):
        (path / name).write_bytes(b"x" * size)
    model_dir = fake_model_dir(path)
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}
    return replace(model_dir, manifest=model_dir.manifest.model_copy(update={"files": files}))


async def card_of(model_dir: ModelDirectory) -> ModelCard:
    app = create_app(load_settings(model=model_dir.path), model_dir)
    transport = httpx.ASGITransport(app)  # without the lifespan: nothing is loaded
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return ModelCard.model_validate_json((await http.get("/model")).content)


async def test_files_are_those_of_the_manifest_with_their_sizes(tmp_path: Path) -> None:
    """A file that has gone has none; keys and values are unknown until the model is loaded."""
    model_dir = model_dir_with_files(tmp_path)
    card = await card_of(model_dir)
    assert {file.name: file.sha256 for file in card.files} == model_dir.manifest.files
    assert {file.name: file.bytes for file in card.files} == {"config.json": 7, "model.onnx": 3000}
    assert card.config == json.loads(json.dumps(asdict(model_dir.config)))
    assert card.kv_cache is None
    (tmp_path / "model.onnx").unlink()
    sizes = {file.name: file.bytes for file in (await card_of(model_dir)).files}
    assert sizes == {"config.json": 7, "model.onnx": None}


@pytest.mark.parametrize("int8", [False, True])
async def test_memory_of_keys_and_values_is_what_the_rows_take(*, int8: bool) -> None:
    runner = FakeRunner(VOCAB_SIZE, int8=int8, budget_tokens=500)
    async with serving(runner) as served:
        card = ModelCard.model_validate_json((await served.client.get("/model")).content)
    assert card.model == MODEL
    assert card.kv_cache is not None
    per_token = (card.kv_cache.bytes_per_token, card.kv_cache.prompt_bytes_per_token)
    for n_bytes, memory in zip(per_token, (runner.kv.running, runner.kv.prompts), strict=True):
        _, n_rows, _, n_positions, _ = memory.array.shape
        assert n_bytes * n_rows * n_positions == memory.array.nbytes
    assert card.kv_cache.budget_tokens == 500


async def test_each_model_has_the_kind_of_its_use() -> None:
    model_dirs = {
        "chat": fake_model_dir(),
        "complete": fake_model_dir(chat_template=None),
        "translate": replace(fake_model_dir(), config=small_config()),
        "embed": encoder_model_dir(),
        "rank": encoder_model_dir(("score",)),
        "classify": encoder_model_dir(("good", "bad")),
    }
    app = create_app(load_settings(model=",".join(model_dirs)), model_dirs)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        listed = (await http.get("/v1/models")).json()["data"]
    assert [one["kind"] for one in listed] == [one["id"] for one in listed] == list(model_dirs)


async def test_models_are_listed_in_the_form_that_the_headers_ask_for() -> None:
    model_dirs = {name: fake_model_dir(Path(name)) for name in ("a", "b", "c")}
    app = create_app(load_settings(model="a,b,c"), model_dirs)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        version = {"anthropic-version": "2023-06-01"}

        async def page(**query: str | int) -> tuple[str, bool]:
            listed = (await http.get("/v1/models", params=query, headers=version)).json()
            names = "".join(one["id"] for one in listed["data"])
            ends = (listed["first_id"], listed["last_id"])
            assert ends == ((names[0], names[-1]) if names else (None, None))
            return names, listed["has_more"]

        assert await page() == ("abc", False)
        assert await page(limit=2) == ("ab", True)
        assert await page(limit=2, after_id="b") == ("c", False)
        assert await page(after_id="c") == ("", False)
        assert await page(limit=1, before_id="c") == ("b", True)
        assert await page(limit=2, before_id="c") == ("ab", False)
        one = (await http.get("/v1/models/b", headers=version)).json()
        assert (one["type"], one["id"], one["display_name"]) == ("model", "b", "b")
        assert datetime.fromisoformat(one["created_at"]).tzinfo is not None
        plain = (await http.get("/v1/models")).json()
        assert (plain["object"], len(plain["data"])) == ("list", 3)
        wrong = await http.get("/v1/models", params={"after_id": "x"}, headers=version)
        absent = await http.get("/v1/models/x", headers=version)
    assert (wrong.status_code, absent.status_code) == (400, 404)
    assert {answer.json()["type"] for answer in (wrong, absent)} == {"error"}

"""A prefix cache that outlives the server: found by the next one, and by none that differs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.model.directory import load_model_dir
from kvasir.server.engine.engine import Engine
from kvasir.server.errors import StartupError
from kvasir.server.process import engine_builder
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import build_engine
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.settings import load_settings
from kvasir.server.telemetry.start_clock import StartClock
from tests.kernels.graphs import needs_library

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"
PROMPT = "def join(parts):\n    return ''.join(parts)\n\n" * 12
OTHER = "import os\n\nfor name in os.listdir('.'):\n    print(name)\n" * 12


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = load_settings(
        model=EXAMPLE, kv_cache_memory=2**25, prefix_cache_memory=2**25, **{"threads": 1} | options
    )
    app = create_app(settings, load_model_dir(EXAMPLE))
    models: ModelRegistry = app.state.models
    engine_builder._find_library.cache_clear()
    await models.start(lambda one, _: build_engine(one.settings, one.model_dir), StartClock())
    engine = models.find().engine.engine
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    await models.close()
    assert isinstance(engine, Engine)
    if settings.prefix_dir is not None:
        engine.kv.files.wait()  # type: ignore[attr-defined]


Answer = tuple[int, str, list[float]]  # cached tokens, text, its log-probabilities


async def ask(client: httpx.AsyncClient, prompt: str, **headers: str) -> Answer:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
    (choice,) = answer["choices"]
    n_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n_cached, choice["text"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("kernels", [pytest.param("auto", marks=needs_library), "off"])
async def test_a_new_server_answers_as_the_old_one_without_computing_again(
    tmp_path: Path, kernels: str
) -> None:
    async with serving(kernels=kernels) as client:
        expected = [await ask(client, prompt) for prompt in (PROMPT, OTHER)]
    found = {}
    servers: dict[str, dict[str, Any]] = {
        "first": {"kernels": kernels},
        "second": {"kernels": kernels},
        "others": {"kernels": "off" if kernels == "auto" else "auto"},
        "threads": {"kernels": kernels, "threads": 2},
    }
    for name, options in servers.items():
        async with serving(prefix_dir=tmp_path, **options) as client:
            answers = [await ask(client, prompt) for prompt in (PROMPT, PROMPT, OTHER)]
        found[name] = [n_cached for n_cached, _, _ in answers]
        if name != "others":
            assert [one[1:] for one in answers] == [expected[n][1:] for n in (0, 0, 1)]
    n_blocks = found["first"][1]
    assert n_blocks >= 128
    assert found["first"] == [0, n_blocks, 0]
    assert found["second"] == [n_blocks, n_blocks, 0]
    assert found["others"] == [0, n_blocks, 0]
    # Operators of our own give the same bits on any number of threads.
    assert found["threads"][0] == (n_blocks if kernels == "auto" else 0)


async def test_keys_find_their_own_prefixes_by_a_salt(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("name=a k1\nname=b k2\n")
    with pytest.raises(StartupError, match="prefix_dir needs a salt"):
        async with serving(prefix_dir=tmp_path, api_key_file=keys):
            pass
    options: dict[str, Any] = {"prefix_dir": tmp_path, "api_key_file": keys, "salt": "s" * 16}
    async with serving(**options) as client:
        first = [(await ask(client, PROMPT, **{"x-api-key": "k1"}))[0] for _ in range(2)]
    async with serving(**options) as client:
        again = [(await ask(client, PROMPT, **{"x-api-key": key}))[0] for key in ("k2", "k1")]
    assert first[0] == 0
    assert again == [0, first[1]]

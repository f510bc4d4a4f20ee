"""A prefix cache that outlives the server: found by the next one, and by none that differs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.server.engine.engine import Engine
from kvasir.server.errors import StartupError
from tests.kernels.graphs import needs_library
from tests.process.example_server import serving

PROMPT = "def join(parts):\n    return ''.join(parts)\n\n" * 12
OTHER = "import os\n\nfor name in os.listdir('.'):\n    print(name)\n" * 12


@asynccontextmanager
async def caching(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the example with a prefix cache, whose files are whole at the end."""
    memory = {"kv_cache_memory": 2**25, "prefix_cache_memory": 2**25}
    async with serving(**memory, **options) as (models, client):
        engine = models.find().engine.engine
        yield client
    assert isinstance(engine, Engine)
    if "prefix_dir" in options:
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
    async with caching(kernels=kernels) as client:
        expected = [await ask(client, prompt) for prompt in (PROMPT, OTHER)]
    found = {}
    servers: dict[str, dict[str, Any]] = {
        "first": {"kernels": kernels},
        "second": {"kernels": kernels},
        "others": {"kernels": "off" if kernels == "auto" else "auto"},
        "threads": {"kernels": kernels, "threads": 2},
    }
    for name, options in servers.items():
        async with caching(prefix_dir=tmp_path, **options) as client:
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
        async with caching(prefix_dir=tmp_path, api_key_file=keys):
            pass
    options: dict[str, Any] = {"prefix_dir": tmp_path, "api_key_file": keys, "salt": "s" * 16}
    async with caching(**options) as client:
        first = [(await ask(client, PROMPT, **{"x-api-key": "k1"}))[0] for _ in range(2)]
    async with caching(**options) as client:
        again = [(await ask(client, PROMPT, **{"x-api-key": key}))[0] for key in ("k2", "k1")]
    assert first[0] == 0
    assert again == [0, first[1]]

"""A server on a fake runner: settings, a model without files, the app, a client in the process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.types import Message
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kvasir.model.config import TransformerConfig
from kvasir.model.directory import Manifest, ModelDirectory
from kvasir.model.records import Verification
from kvasir.model.tokenizer import train_tokenizer
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.kv.prefix_cache import PrefixCache
from kvasir.server.engine.sequence import Sequence
from kvasir.server.process.app import create_app
from kvasir.server.requests.async_engine import AsyncEngine, OutputStream
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import load_settings
from kvasir.server.telemetry.metrics import Metrics
from tests.kit.fake_runner import FakeRunner

VOCAB_SIZE = 300
EOS = 0
MODEL = "fake-model"

# Short, for small contexts; it writes calls as Hermes models do.
CHAT_TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{% for message in messages %}
{{ message.role[0] }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments":
{{- ' ' }}{{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}

{% endfor %}
{% if add_generation_prompt %}a>{% endif %}
"""


@cache
def small_tokenizer() -> Tokenizer:
    return train_tokenizer(["def read_json(path):\n    return json.load(path)\n"] * 4, VOCAB_SIZE)


def beginning_with_end_of_text() -> Tokenizer:
    """Return the same tokenizer, with a special token before every text, such as BOS."""
    tokenizer = Tokenizer.from_str(small_tokenizer().to_str())
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", EOS)]
    )
    return tokenizer


def fake_manifest(max_model_len: int, **changes: Any) -> Manifest:
    values: dict[str, Any] = {"format_version": 1, "architecture": "decoder", "parameters": 1}
    values |= {"device": "cpu", "precision": "fp32", "max_model_len": max_model_len}
    values |= {"graph_inputs": [], "graph_outputs": [], "versions": {}, "files": {}}
    verification = Verification(max_logit_error=0.0, greedy_agreement=1.0)
    return Manifest(**values | {"verification": verification} | changes)


def fake_model_dir(
    path: Path = Path(MODEL), *, max_model_len: int = 64, chat_template: str | None = CHAT_TEMPLATE
) -> ModelDirectory:
    config = TransformerConfig(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        n_layer=1,
        n_head=1,
        n_kv_head=1,
        head_dim=16,
        d_model=16,
        d_ff=16,
        eos_token_ids=(EOS,),
    )
    manifest = fake_manifest(max_model_len)
    return ModelDirectory(path, config, manifest, small_tokenizer(), chat_template=chat_template)


def saying(text: str, *, n_prompt: int) -> FakeRunner:
    """Return a runner that continues any prompt of `n_prompt` tokens with a text and its end."""
    ids = [*small_tokenizer().encode(text).ids, EOS]
    return FakeRunner(
        VOCAB_SIZE, next_token=lambda prefix: ids[min(len(prefix) - n_prompt, len(ids) - 1)]
    )


@dataclass
class Served:
    app: FastAPI
    runner: FakeRunner
    client: httpx.AsyncClient
    submitted: asyncio.Semaphore  # released for every request that the engine is handed

    @property
    def model(self) -> ServedModel:
        model: ServedModel = self.app.state.models.find()
        return model


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the sum of a server's series with these labels; None without any."""
    families = metrics.server.registry.collect()
    samples = [s for family in families for s in family.samples if s.name == f"kvasir_{name}"]
    values = [s.value for s in samples if labels.items() <= s.labels.items()]
    return sum(values) if values else None


def on_submission(engine: AsyncEngine, tell: Callable[[], object]) -> None:
    """Call a function after each request that the engine is handed."""
    submit = engine.submit

    def telling(sequences: list[Sequence]) -> OutputStream:
        stream = submit(sequences)
        tell()
        return stream

    engine.submit = telling  # type: ignore[method-assign]


def fake_app(
    runner: FakeRunner,
    cache_bytes: int = 0,
    model_dir: ModelDirectory | None = None,
    **settings: Any,
) -> FastAPI:
    """Return the app; `cache_bytes` is for the prefix cache, whose blocks are 4 tokens here."""
    known = load_settings(model=Path(MODEL), max_num_seqs=runner.kv.max_num_seqs, **settings)
    model_dir = model_dir or fake_model_dir(max_model_len=runner.max_model_len)
    runner.kv.cache = PrefixCache(cache_bytes // (4 * runner.kv.prompt_token_bytes), block_size=4)
    return create_app(
        known, model_dir, Engine(runner, chunk_size=8, speculate=bool(known.speculate))
    )


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application with its lifespan, and a client inside the process."""
    transport = httpx.ASGITransport(
        app, raise_app_exceptions=False, root_path=app.state.models.settings.root_path
    )
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


@asynccontextmanager
async def serving(
    runner: FakeRunner | None = None,
    cache_bytes: int = 0,
    model_dir: ModelDirectory | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Run the app on a fake runner, with its lifespan and a client."""
    runner = runner or FakeRunner(VOCAB_SIZE)
    app = fake_app(runner, cache_bytes, model_dir, **settings)
    async with running(app) as client:
        submitted = asyncio.Semaphore(0)
        on_submission(app.state.models.find().engine, submitted.release)
        try:
            yield Served(app, runner, client, submitted)
        finally:
            runner.release()


class RawRequest:
    """A POST straight to an application, whose client reads, and leaves, when the test says so."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.sent: list[Message] = []
        self.begun, self.reads, self.leaves = asyncio.Event(), asyncio.Event(), asyncio.Event()
        given: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Message:
            if given:
                return given.pop()
            await self.leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)
            self.begun.set()
            await self.reads.wait()

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "scheme": "http"}
        scope |= {"headers": [(b"host", b"localhost")], "query_string": b"", "root_path": ""}
        self.task = asyncio.create_task(app(scope, receive, send))

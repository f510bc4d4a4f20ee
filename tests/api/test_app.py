"""The application starts before its model has loaded, and says so."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kvasir.server.engine.engine import Engine
from kvasir.server.engine.runner import OnnxRunner
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import build_encoder_engine, build_engine
from kvasir.server.settings import load_settings
from tests.kit.fake_encoder import encoder_model_dir
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.random_models import RandomModel
from tests.kit.serving import EOS, MODEL, VOCAB_SIZE, fake_model_dir, running


async def test_it_answers_while_the_model_loads_and_serves_once_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_load = threading.Event()

    def build(*_: object) -> Engine:
        assert may_load.wait(TIMEOUT)
        return Engine(FakeRunner(VOCAB_SIZE), chunk_size=8)

    monkeypatch.setattr("kvasir.server.process.app.build_engine", build)
    app = create_app(load_settings(model=Path(MODEL)), fake_model_dir())
    monkeypatch.setattr(app.state.models.find().grammars, "warm_up", warm_up := Mock())
    loaded = asyncio.Event()
    start = app.state.models.find().engine.start

    async def noting(build: object) -> None:
        await start(build)
        loaded.set()

    monkeypatch.setattr(app.state.models.find().engine, "start", noting)
    async with running(app) as client:
        refused = await client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        warm_up.assert_called_once_with()
        assert (await client.get("/health/startup")).status_code == 503
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 64
        assert "kvasir_num_requests_running 0" in (await client.get("/metrics/router")).text
        may_load.set()
        await asyncio.wait_for(loaded.wait(), TIMEOUT)
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


BLOCK_BYTES = 64 * 2 * 2 * 2 * 32 * 4  # keys and values of 2 layers, 2 heads, 32 floats


@pytest.mark.parametrize(
    ("options", "target", "cache_bytes"),
    [
        ({}, None, 2**24 // 10),  # by default a tenth of the KV cache's memory
        ({"speculate": True}, None, 2**24 // 10),
        ({"itl_target_ms": 0, "prefix_cache_memory": "0"}, 0.0, 0),
        ({"itl_target_ms": 40, "prefix_cache_memory": "3MiB"}, 0.04, 3 * 2**20),
    ],
)
def test_settings_reach_the_engine(
    random_model: RandomModel,
    options: dict[str, Any],
    target: float | None,
    cache_bytes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Idle threads keep their processors for a moment, as the model's session itself tells."""
    model_dir = replace(fake_model_dir(random_model.graph.parent), config=random_model.config)
    options = {"threads": 1, "kv_cache_memory": 2**24, "kernels": "off", **options}
    settings = load_settings(model=model_dir.path, **options)
    with caplog.at_level("INFO", logger="kvasir"):
        engine = build_engine(settings, model_dir)
    assert engine.speculate is ("speculate" in options)
    assert ("speculation is on" in caplog.text) is engine.speculate
    assert engine.scheduler.capacity.target == target
    assert engine.kv.cache.capacity == cache_bytes // BLOCK_BYTES
    runner = engine.runner
    assert isinstance(runner, OnnxRunner)
    entry = runner._session.get_session_options().get_session_config_entry
    assert entry("session.intra_op.allow_spinning") == "1"
    assert entry("session.intra_op.spin_duration_us") == "100"


def test_token_types_that_the_model_lacks_are_refused_at_load() -> None:
    model_dir = encoder_model_dir(("relevant",))
    tokenizer = Tokenizer.from_str(model_dir.tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing(
        single="$A", pair="$A $B:2", special_tokens=[("<|endoftext|>", EOS)]
    )
    config = replace(model_dir.config, n_token_types=2)
    with pytest.raises(ValueError, match="token type 2"):
        build_encoder_engine(
            load_settings(model=model_dir.path),
            replace(model_dir, config=config, tokenizer=tokenizer),
        )


def test_importing_the_server_loads_neither_onnx_runtime_nor_opentelemetry() -> None:
    code = "import sys, kvasir.server.process.serve\n"
    code += "assert not {'onnxruntime', 'opentelemetry.sdk'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)

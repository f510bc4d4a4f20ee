"""Requests for vectors: in order, in time, cancelled with their task, refused without room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from time import perf_counter
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, processors

from kvasir.server.engine.encoder.engine import EncoderEngine
from kvasir.server.engine.encoder.sequence import Encoding
from kvasir.server.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    UnavailableError,
)
from kvasir.server.requests.encoding import Side, encode
from kvasir.server.requests.request import EmbeddingRequest
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import load_settings
from kvasir.server.telemetry.start_clock import StartClock
from tests.kit.fake_encoder import FakeTextRunner, encoder_model_dir, pair_tokenizer
from tests.kit.fake_runner import TIMEOUT
from tests.kit.serving import fake_model_dir, small_tokenizer


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[ServedModel, FakeTextRunner]]:
    model_dir = encoder_model_dir()
    assert model_dir.config.pooling is not None
    runner = FakeTextRunner(model_dir.config.pooling)
    served = ServedModel(load_settings(model=model_dir.path, **settings), model_dir)
    engine = EncoderEngine(runner, token_budget=20, max_num_seqs=2)
    await served.start(lambda: engine, StartClock())
    try:
        yield served, runner
    finally:
        runner.gate.set()
        await served.engine.stop()


def texts(first: list[int], **fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest(inputs=[Encoding([n]) for n in first], **fields)


async def test_a_deadline_ends_a_request_that_waits() -> None:
    async with serving() as (served, runner):
        runner.gate.clear()
        first = asyncio.create_task(served.embed(texts([1])))
        assert await asyncio.to_thread(runner.begun.wait, TIMEOUT)
        abort = served.engine.abort

        def aborting(*arguments: Any) -> None:
            abort(*arguments)
            runner.gate.set()

        served.engine.abort = aborting  # type: ignore[assignment,method-assign]
        for seconds in (-1.0, 0.01):
            with pytest.raises(DeadlineExceededError):
                await served.embed(texts([2], deadline=perf_counter() + seconds))
        runner.gate.set()
        await first
        assert [text.prompt_ids for text in runner.texts] == [[1]]


async def test_an_error_of_the_model_ends_every_request() -> None:
    async with serving() as (served, runner):
        runner.run = Mock(side_effect=RuntimeError("broken"))  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            await served.embed(texts([1, 2, 3]))
        assert not served.engine.is_healthy


async def test_requests_beyond_the_limits_are_refused() -> None:
    async with serving(max_num_seqs=1, max_queue=2) as (served, _):
        with pytest.raises(InvalidRequestError, match="4 sequences"):
            await served.embed(texts([1, 2, 3, 4]))
        await served.drain()
        with pytest.raises(UnavailableError):
            await served.embed(texts([1]))


PROCESSORS = {
    "template": pair_tokenizer().post_processor,
    "roberta": processors.RobertaProcessing(("j", 3), ("a", 4)),
    "sequence": processors.Sequence(
        [processors.ByteLevel(), processors.BertProcessing(("j", 3), ("a", 4))]
    ),
}


class Counted:
    """A tokenizer that counts how often it puts tokens around others."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.n_processed = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        self.n_processed += name == "post_process"
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize(
    ("name", "side"),
    [("template", "left"), ("template", "right"), ("roberta", "left"), ("sequence", "right")],
)
def test_texts_and_pairs_are_cut_as_the_tokenizer_cuts_them(name: str, side: Side) -> None:
    """A long text that is in many pairs costs each of them no more than what is left of it."""
    tokenizer = Tokenizer.from_str(small_tokenizer().to_str())
    tokenizer.post_processor = PROCESSORS[name]
    counted: Any = Counted(tokenizer)
    model_dir = fake_model_dir()
    served = ServedModel(load_settings(model=model_dir.path), model_dir)
    builder = replace(served.builder, model_dir=replace(model_dir, tokenizer=counted))
    texts = ["", "a", "json.load(path)", "read " * 30, "b" * 90, "c" * 91]
    inputs: list[Any] = [*texts, *product(texts, texts)]
    for longest in (4, 5, 17, 64):
        found = encode(builder, inputs, "inputs", truncate_to=longest, side=side)
        tokenizer.enable_truncation(longest, direction=side)
        expected = tokenizer.encode_batch(inputs)
        tokenizer.no_truncation()
        assert [list(one.ids) for one in found] == [one.ids for one in expected]
        types = [one.type_ids for one in expected]
        assert [one.type_ids for one in found] == [None] * len(texts) + types[len(texts) :]
    assert counted.n_processed == 4 * 2

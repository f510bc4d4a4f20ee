"""The engine over blocks, with the exported CUDA graph run by numpy, against the oracle.

The graph is traced in float32, which the operator in numpy accepts, so that tokens can be equal.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Semaphore
from typing import Any, cast
from unittest.mock import MagicMock

import httpx
import numpy as np
import onnx_ir
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException
from starlette.types import Message, Receive, Scope, Send

from kvasir.export import paged_graph
from kvasir.export.paged_graph import export_paged_graph
from kvasir.model.bundle import CANDIDATES_OUTPUT
from kvasir.model.network.transformer import Transformer
from kvasir.model.reference import generate
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu import runner as runner_module
from kvasir.server.engine.gpu.runner import Inputs, PagedRunner
from kvasir.server.engine.gpu.session import DeviceModel, warm_up_largest
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.logits import Candidates, Logits
from kvasir.server.engine.model_runner import warm_up
from kvasir.server.engine.sampling import Floats, SamplingParams
from kvasir.server.engine.sequence import Sequence
from kvasir.server.process.app import create_app
from kvasir.server.requests.async_engine import AsyncEngine, OutputStream
from kvasir.server.settings import load_settings
from tests import paged_reference
from tests.engine.test_candidates import random_params
from tests.engine_driver import Collector, make_sequence, run_to_end
from tests.random_models import make_config, make_decoder
from tests.serving import MODEL, fake_bundle

BLOCK = 8  # the graph takes it from the shape of its blocks


class NumpyModel:
    """The exported graph and its blocks, initially full of large numbers."""

    def __init__(self, path: Path, n_blocks: int, *, has_candidates: bool = True) -> None:
        self._graph = paged_reference.load(path)
        self._outputs = ["logits", *[CANDIDATES_OUTPUT] * has_candidates]
        self.n_read = 0  # rows of logits
        self.n_tokens: list[int] = []  # of each run
        self.shapes: list[tuple[int, int]] = []  # the most new tokens of a sequence, sequences
        self._results: list[list[Any]] = [[], []]  # rows of each output
        self._blocks: dict[str, Any] = {}
        for value in onnx_ir.load(path).graph.inputs:
            if str(value.name).startswith("past_key_values"):
                assert value.shape is not None
                shape = (n_blocks, BLOCK, *(int(str(size)) for size in value.shape[2:]))
                self._blocks[str(value.name)] = np.full(shape, 1e3, dtype=np.float32)

    def run(self, inputs: Inputs, first_row: int = 0) -> Logits:
        self.n_tokens.append(len(inputs["input_ids"]))
        self.shapes.append((int(inputs["attention_metadata"][0]), len(inputs["past_seqlens"])))
        given = {name: of for name, of in inputs.items() if name in self._graph.input_names}
        results: Any = self._graph.run(self._outputs, {**given, **self._blocks})
        for rows, new in zip(self._results, results, strict=False):
            rows[first_row:] = new
        logits, *packed = (np.stack(rows) for rows in self._results if rows)

        def read(start: int, stop: int) -> Floats:
            self.n_read += stop - start
            return logits[start:stop]

        return Logits(len(logits), read, Candidates.unpack(packed[0]) if packed else None)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Path]:
    decoder = make_decoder(make_config(sliding_window=30, sliding_window_layers=(1,), qk_norm=True))
    path = tmp_path_factory.mktemp("paged") / "model.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(paged_graph.DTYPES, "fp32", torch.float32)
        export_paged_graph(decoder.config, decoder.state_dict(), path, "fp32")
    return decoder, path


def make_engine(
    exported: tuple[Transformer, Path],
    *,
    n_blocks: int = 60,
    max_num_seqs: int = 4,
    rounds_kv: bool = False,
    has_candidates: bool = True,
    **options: Any,
) -> tuple[Engine, NumpyModel]:
    decoder, path = exported
    config = decoder.config
    model = NumpyModel(path, n_blocks, has_candidates=has_candidates)
    blocks = KVBlocks(
        n_blocks=n_blocks,
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_model_len=config.max_model_len,
    )
    runner = PagedRunner(
        model,
        blocks,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        rounds_kv=rounds_kv,
    )
    warm_up(runner, 30)
    assert model.n_tokens == [30, 1]
    model.n_tokens.clear()
    model.shapes.clear()
    return Engine(runner, **{"chunk_size": 16, **options}), model


def make_prompts(n: int, seed: int, vocab_size: int = 300) -> list[list[int]]:
    """Half of them begin like the first."""
    generator = np.random.default_rng(seed)
    common = generator.integers(vocab_size, size=40).tolist()
    prompts = []
    for i in range(n):
        own = generator.integers(vocab_size, size=int(generator.integers(1, 20))).tolist()
        prompts.append(common[: 8 * int(generator.integers(0, 6))] + own if i % 2 else own)
    return prompts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 8, "chunk_size": 64},
        {"speculate": True, "chunk_size": 3},
        {"rounds_kv": True, "speculate": True},
    ],
)
def test_every_sequence_gets_the_oracles_tokens(
    exported: tuple[Transformer, Path], options: dict[str, Any]
) -> None:
    """Prompts, chunks, decodes and drafts in one run, prefixes shared, sampled and greedy."""
    engine, model = make_engine(exported, **options)
    prompts = make_prompts(9, seed=1)
    wanted: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_k": 30, "seed": 7},
        {"temperature": 0.0},
    ] * 5
    requests = list(zip(prompts, wanted, strict=False))
    sequences = [
        make_sequence(i, p, SamplingParams(max_tokens=12, **w)) for i, (p, w) in enumerate(requests)
    ]
    results = run_to_end(engine, sequences)
    for i, (prompt, how) in enumerate(requests):
        assert results[i].token_ids == generate(exported[0], prompt, max_tokens=12, **how)
    assert sum(sequence.n_cached for sequence in sequences) > 0
    assert max(model.n_tokens) > 4  # a chunk ran
    mixed = [n for (longest, n) in model.shapes if longest > 1 and n > 1]
    assert mixed or options.get("rounds_kv")
    assert engine.runner.kv.reserved_tokens == 0


def test_candidates_change_no_token_and_save_rows(exported: tuple[Transformer, Path]) -> None:
    """All parameters in mixed batches; greedy and filtered sequences hardly read whole rows."""
    generator = np.random.default_rng(4)
    prompts = make_prompts(24, seed=6)
    params = [
        replace(random_params(generator), max_tokens=8, logprobs=[None, 0, 5, 20][i % 4])
        for i in range(24)
    ]
    results = []
    for has_candidates, rounds_kv in ((False, False), (True, False), (True, True)):
        engine, _ = make_engine(
            exported, has_candidates=has_candidates, rounds_kv=rounds_kv, speculate=True
        )
        sequences = [
            make_sequence(i, prompt, of)
            for i, (prompt, of) in enumerate(zip(prompts, params, strict=True))
        ]
        results.append(run_to_end(engine, sequences))
    for i in range(24):
        expected, *found = (result[i] for result in results)
        assert expected.token_ids == found[0].token_ids == found[1].token_ids, params[i]
        for ours, theirs in zip(found[0].logprobs, expected.logprobs, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                assert ours.rank == theirs.rank
                assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]


def test_only_who_needs_them_reads_whole_rows(exported: tuple[Transformer, Path]) -> None:
    wanted: list[tuple[int, dict[str, Any]]] = [  # rows, of four tokens
        (0, {"temperature": 0.0, "logprobs": 20}),
        (0, {"top_k": 20, "top_p": 0.9, "logprobs": 3}),
        (0, {"min_p": 0.9}),
        (4, {}),
        (4, {"temperature": 0.0, "repetition_penalty": 1.1}),
        (4, {"temperature": 0.0, "logit_bias": {3: 1.0}}),
        (2, {"temperature": 0.0, "min_tokens": 2}),
        (4, {"top_k": 200}),
    ]
    for together in ([one] for one in wanted), [wanted]:
        for group in together:
            engine, model = make_engine(exported, max_num_seqs=8)
            run_to_end(
                engine,
                [
                    make_sequence(i, [5, 6 + i], SamplingParams(max_tokens=4, **how))
                    for i, (_, how) in enumerate(group)
                ],
            )
            assert model.n_read == sum(n for n, _ in group), group


def test_only_decodes_without_prompts_are_timed_apart(exported: tuple[Transformer, Path]) -> None:
    engine, _ = make_engine(exported)
    engine.add(make_sequence(0, [1] * 9, SamplingParams(max_tokens=9)))
    before = engine.runner.decode_seconds
    engine.step()
    assert engine.runner.decode_seconds == before
    engine.step()
    engine.add(make_sequence(1, [1] * 9, SamplingParams(max_tokens=9)))
    decoded = engine.runner.decode_seconds
    assert decoded > before
    engine.step()
    assert engine.runner.decode_seconds == decoded


def test_prompts_over_8_bit_blocks_run_apart_from_decodes(
    exported: tuple[Transformer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of more than decodes makes all sequences' keys as long as the longest's, as floats."""
    monkeypatch.setattr(runner_module, "_DENSE_TOKENS", 50)
    engine, model = make_engine(exported, max_num_seqs=6, chunk_size=64, rounds_kv=True)
    for i, length in enumerate((60, 9, 20, 20, 11)):
        engine.add(make_sequence(i, [i] * length, SamplingParams(max_tokens=9, temperature=0.0)))
        if i == 0:
            engine.step()
    model.shapes.clear()
    before = engine.runner.decode_seconds
    _, stats = engine.step()
    assert stats.kind == "mixed"
    # The decode, two prompts of 9 and 20 tokens, 20 and 11.
    assert model.shapes == [(1, 1), (20, 2), (20, 2)]
    assert engine.runner.decode_seconds > before
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step()[0])
    assert all((longest == 1) or n <= 2 for longest, n in model.shapes)


def test_the_largest_steps_are_warmed_up(exported: tuple[Transformer, Path]) -> None:
    """All rows, the real chunk, and both in one run; as many rows as there are blocks for."""
    for n_blocks, shapes in (
        (60, [(70, 1), (70, 4), (1, 4)]),
        (11, [(70, 1), (70, 3), (1, 3)]),  # nine hold the chunk
        (5, [(40, 1), (1, 1)]),
    ):
        engine, model = make_engine(exported, n_blocks=n_blocks)
        assert isinstance(engine.runner, PagedRunner)
        warm_up_largest(engine.runner, chunk=70)
        assert model.shapes == shapes
        assert engine.kv.reserved_tokens == 0


def test_sequences_of_different_salts_share_no_block(exported: tuple[Transformer, Path]) -> None:
    """The first with a salt computes the whole prompt; the answers are the same."""
    engine, _ = make_engine(exported)
    prompt, n_cached = list(range(30)), []
    for i, salt in enumerate((b"", b"a", b"b", b"a", b"")):
        params = SamplingParams(max_tokens=4, temperature=0.0)
        sequence = make_sequence(i, prompt, params)
        sequence.cache_salt = salt
        result = run_to_end(engine, [sequence])[i]
        assert result.token_ids == generate(exported[0], prompt, max_tokens=4)
        n_cached.append(sequence.n_cached)
    assert n_cached == [0, 0, 0, 24, 24]


def test_sequences_wait_for_blocks_and_running_ones_keep_theirs(
    exported: tuple[Transformer, Path],
) -> None:
    """There are blocks for two sequences and a half; an aborted one makes room at once."""
    engine, _ = make_engine(exported, n_blocks=12, max_num_seqs=8)
    prompts = [prompt[:24] + [1] * max(0, 24 - len(prompt)) for prompt in make_prompts(6, seed=2)]
    for i, prompt in enumerate(prompts):
        engine.add(make_sequence(i, prompt, SamplingParams(max_tokens=16, temperature=0.0)))
    collector, most = Collector(), 0
    while engine.has_work:
        collector.take(engine.step()[0])
        rows = engine.runner.kv
        assert rows.reserved_tokens <= rows.budget_tokens
        most = max(most, len(engine.scheduler.held))
        if len(collector.results[0].token_ids) == 3 and (output := engine.abort(0)):
            collector.take([output])
    assert 2 <= most < 6
    assert collector.results[0].finish_reasons == ["abort"]
    for i, prompt in enumerate(prompts):
        expected = generate(exported[0], prompt, max_tokens=16)
        assert collector.results[i].token_ids == (expected[:3] if i == 0 else expected)
    with pytest.raises(ValueError, match="cannot fit"):
        engine.add(make_sequence(9, [1] * 90, SamplingParams(max_tokens=7)))


def test_scores_of_a_prompt_are_those_of_the_decoder(exported: tuple[Transformer, Path]) -> None:
    """In chunks, beside others, without the use of shared blocks."""
    engine, _ = make_engine(exported, chunk_size=7)
    prompt = make_prompts(2, seed=3)[1]
    scored = make_sequence(0, prompt, SamplingParams(max_tokens=0, prompt_logprobs=2))
    others = [
        make_sequence(i, prompt, SamplingParams(max_tokens=5, temperature=0.0)) for i in (1, 2)
    ]
    results = run_to_end(engine, [others[0], scored, others[1]])
    with torch.inference_mode():
        logprobs = exported[0](torch.tensor([prompt]))[0].log_softmax(-1)
    found = results[0].prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        assert entry.logprob == pytest.approx(
            float(logprobs[position, prompt[position + 1]]), abs=1e-3
        )


class FailingSession:
    """A session whose runs raise what ONNX Runtime raises for an error on the card."""

    def io_binding(self) -> Any:
        return MagicMock()

    def get_inputs(self) -> list[Any]:
        return []

    def run_with_iobinding(self, _binding: Any, _options: Any) -> None:
        raise RuntimeException("CUDA failure 2: out of memory ; GPU=0")


async def test_an_error_on_the_card_ends_every_stream_and_the_engine(
    exported: tuple[Transformer, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Streams that have begun end in an error, the server says so, and it takes no new request.

    The first run waits for both requests, and the fifth, which fails, for both streams' first text.
    """
    engine, model = make_engine(exported)
    broken = DeviceModel(cast("Any", FailingSession()), 1)
    n_runs, arrived, begun = count(), Semaphore(0), Semaphore(0)

    def run(inputs: Inputs, first_row: int) -> Logits:
        run = next(n_runs)
        if run == 0:
            assert all(arrived.acquire(timeout=60) for _ in range(2))
        if run < 4:
            return original(inputs, first_row)
        assert all(begun.acquire(timeout=60) for _ in range(2))
        return broken.run(inputs, first_row)

    def submit(engine: AsyncEngine, sequences: list[Sequence]) -> OutputStream:
        stream = original_submit(engine, sequences)
        arrived.release()
        return stream

    original, original_submit = model.run, AsyncEngine.submit
    monkeypatch.setattr(model, "run", run)
    monkeypatch.setattr(AsyncEngine, "submit", submit)
    bundle = fake_bundle(max_model_len=exported[0].config.max_model_len)
    app = create_app(load_settings(model=Path(MODEL), max_num_seqs=4), bundle, engine)

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        """The application; counts the streams whose first text was sent."""
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            await send(message)
            if b'"text"' in message.get("body", b"") and not has_begun:
                has_begun = True
                begun.release()

        await app(scope, receive, watched_send)

    transport = httpx.ASGITransport(watched)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        body = {"max_tokens": 20, "ignore_eos": True, "stream": True, "prompt": [5, 6]}
        body["logit_bias"] = {"66": 100}  # a token with a text; others may be parts of characters
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for _ in range(2))
        )
        live = await client.get("/health/live")
        late = await client.post("/v1/completions", json=body)
    for answer in answers:
        events = [one for one in answer.text.strip().split("\n\n") if not one.startswith(":")]
        assert '"text"' in events[0]
        assert sum('"error"' in event for event in events) == 1
        assert '"error"' in events[-2]
    assert (live.status_code, live.json()["status"]) == (503, "unavailable")
    assert late.status_code == 500
    assert "the engine failed" in caplog.text
    assert "out of memory" in caplog.text


async def test_the_api_over_blocks_is_the_same_api(exported: tuple[Transformer, Path]) -> None:
    """Two requests at once over HTTP, and the metrics after them."""
    engine, _ = make_engine(exported)
    decoder = exported[0]
    bundle = fake_bundle(max_model_len=decoder.config.max_model_len)
    app = create_app(load_settings(model=Path(MODEL), max_num_seqs=4), bundle, engine)
    prompts = [[5, 6, 7], list(range(8, 30))]
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts)
        )
        metrics = (await client.get("/metrics")).text
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status_code == 200, answer.text
        expected = generate(decoder, prompt, max_tokens=6)
        assert answer.json()["choices"][0]["text"] == bundle.tokenizer.decode(expected)
        assert answer.json()["usage"]["completion_tokens"] == 6
    assert f'kvasir_kv_cache_usage_ratio{{model="{MODEL}"}} 0.0' in metrics
    assert f'kvasir_generation_tokens_total{{model="{MODEL}"}} 12.0' in metrics

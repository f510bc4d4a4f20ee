"""The engine over blocks, with the exported CUDA graph run by numpy, against the oracle.

The graph is traced in float32, which the operator in numpy accepts, so that tokens can be equal.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx_ir
import pytest
import torch

from export import paged_graph
from export.paged_graph import export_paged_graph
from model.network.transformer import Transformer
from model.reference import generate
from server.engine.cuda.runner import Inputs, PagedRunner
from server.engine.engine import Engine, warm_up
from server.engine.kv.blocks import KVBlocks
from server.engine.sampling import Floats, SamplingParams
from server.process.app import create_app
from server.settings import load_settings
from tests import paged_reference
from tests.engine_driver import Collector, make_sequence, run_to_end
from tests.random_models import make_config, make_decoder
from tests.serving import MODEL, fake_bundle

BLOCK = 8  # the graph takes it from the shape of its blocks


class NumpyModel:
    """The exported graph and its blocks, initially full of large numbers."""

    def __init__(self, path: Path, n_blocks: int) -> None:
        self._graph = paged_reference.load(path)
        self.n_tokens: list[int] = []  # of each run
        self._blocks: dict[str, Any] = {}
        for value in onnx_ir.load(path).graph.inputs:
            if str(value.name).startswith("past_key_values"):
                assert value.shape is not None
                shape = (n_blocks, BLOCK, *(int(str(size)) for size in value.shape[2:]))
                self._blocks[str(value.name)] = np.full(shape, 1e3, dtype=np.float32)

    def run(self, inputs: Inputs) -> Floats:
        self.n_tokens.append(len(inputs["input_ids"]))
        outputs: Any = self._graph.run(["logits"], {**inputs, **self._blocks})
        logits: Floats = outputs[0]
        return logits


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Path]:
    decoder = make_decoder(make_config(sliding_window=30, sliding_window_layers=(1,), qk_norm=True))
    path = tmp_path_factory.mktemp("paged") / "model.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(paged_graph.DTYPES, "fp32", torch.float32)
        export_paged_graph(decoder.config, decoder.state_dict(), path, "fp32")
    return decoder, path


def make_engine(
    exported: tuple[Transformer, Path], *, n_blocks: int = 60, max_num_seqs: int = 4, **options: Any
) -> tuple[Engine, NumpyModel]:
    decoder, path = exported
    config = decoder.config
    model = NumpyModel(path, n_blocks)
    blocks = KVBlocks(
        n_blocks=n_blocks,
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_model_len=config.max_model_len,
    )
    runner = PagedRunner(
        model, blocks, max_model_len=config.max_model_len, vocab_size=config.vocab_size
    )
    warm_up(runner, 30)
    assert model.n_tokens == [30, 1]
    model.n_tokens.clear()
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
    "options", [{}, {"max_num_seqs": 8, "chunk_size": 64}, {"speculate": True, "chunk_size": 3}]
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
    assert max(model.n_tokens) > 4  # a chunk ran beside decodes
    assert engine.runner.kv.reserved_tokens == 0


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

"""The engine over blocks, with the paged_model CUDA graph run by numpy, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.model.reference import generate
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu import runner as runner_module
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.gpu.session import warm_up_largest
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.model_runner import warm_up
from kvasir.server.engine.sampling.params import SamplingParams
from tests.engine.test_candidates import random_params
from tests.kit.engine_driver import Collector, make_sequence, run_to_end
from tests.kit.numpy_session import BLOCK, NumpyModel
from tests.kit.random_models import RandomModel


def make_engine(
    paged_model: RandomModel,
    *,
    n_blocks: int = 60,
    max_num_seqs: int = 4,
    rounds_kv: bool = False,
    has_candidates: bool = True,
    **options: Any,
) -> tuple[Engine, NumpyModel]:
    config = paged_model.config
    model = NumpyModel(paged_model.graph, n_blocks, has_candidates=has_candidates)
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
    assert model.shapes == [(30, 1), (1, 1)]
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
        {"max_num_seqs": 8, "chunk_size": 64},
        {"max_num_seqs": 8, "n_blocks": 12},  # for two sequences: the others wait
        {"speculate": True, "chunk_size": 3},
        {"rounds_kv": True, "speculate": True},
    ],
)
def test_every_sequence_gets_the_oracles_tokens(
    paged_model: RandomModel, options: dict[str, Any]
) -> None:
    """Prompts, chunks, decodes and drafts in one run, prefixes shared, sampled and greedy."""
    engine, model = make_engine(paged_model, **options)
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
        assert results[i].token_ids == generate(paged_model.decoder, prompt, max_tokens=12, **how)
    assert sum(sequence.n_cached for sequence in sequences) > 0
    mixed = [n for (longest, n) in model.shapes if longest > 1 and n > 1]
    assert mixed or options.get("rounds_kv")
    assert engine.runner.kv.reserved_tokens == 0


def test_candidates_change_no_token_and_save_rows(paged_model: RandomModel) -> None:
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
            paged_model, has_candidates=has_candidates, rounds_kv=rounds_kv, speculate=True
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


def test_only_who_needs_them_reads_whole_rows(paged_model: RandomModel) -> None:
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
            engine, model = make_engine(paged_model, max_num_seqs=8)
            run_to_end(
                engine,
                [
                    make_sequence(i, [5, 6 + i], SamplingParams(max_tokens=4, **how))
                    for i, (_, how) in enumerate(group)
                ],
            )
            assert model.n_read == sum(n for n, _ in group), group


def test_only_decodes_without_prompts_are_timed_apart(paged_model: RandomModel) -> None:
    engine, _ = make_engine(paged_model)
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
    paged_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of more than decodes makes all sequences' keys as long as the longest's, as floats."""
    monkeypatch.setattr(runner_module, "_DENSE_TOKENS", 50)
    engine, model = make_engine(paged_model, max_num_seqs=6, chunk_size=64, rounds_kv=True)
    for i, length in enumerate((60, 9, 20, 20, 11)):
        engine.add(make_sequence(i, [i] * length, SamplingParams(max_tokens=9, temperature=0.0)))
        if i == 0:
            engine.step()
    model.shapes.clear()
    before = engine.runner.decode_seconds
    _, stats = engine.step()
    assert stats.kind == "mixed"
    # The decode, two prompts of 9 and 11 tokens, which are first, and two of 20.
    assert model.shapes == [(1, 1), (11, 2), (20, 2)]
    assert engine.runner.decode_seconds > before
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step()[0])
    assert all((longest == 1) or n <= 2 for longest, n in model.shapes)


def test_the_largest_steps_are_warmed_up(paged_model: RandomModel) -> None:
    """All rows, the real chunk, and both in one run; as many rows as there are blocks for."""
    for n_blocks, shapes in (
        (60, [(70, 1), (70, 4), (1, 4)]),
        (11, [(70, 1), (70, 3), (1, 3)]),  # nine hold the chunk
        (5, [(40, 1), (1, 1)]),
    ):
        engine, model = make_engine(paged_model, n_blocks=n_blocks)
        assert isinstance(engine.runner, PagedRunner)
        warm_up_largest(engine.runner, chunk=70)
        assert model.shapes == shapes
        assert engine.kv.reserved_tokens == 0


def test_scores_of_a_prompt_are_those_of_the_decoder(paged_model: RandomModel) -> None:
    """In chunks, beside others, without the use of shared blocks."""
    engine, _ = make_engine(paged_model, chunk_size=7)
    prompt = make_prompts(2, seed=3)[1]
    scored = make_sequence(0, prompt, SamplingParams(max_tokens=0, prompt_logprobs=2))
    others = [
        make_sequence(i, prompt, SamplingParams(max_tokens=5, temperature=0.0)) for i in (1, 2)
    ]
    results = run_to_end(engine, [others[0], scored, others[1]])
    with torch.inference_mode():
        logprobs = paged_model.decoder(torch.tensor([prompt]))[0].log_softmax(-1)
    found = results[0].prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        assert entry.logprob == pytest.approx(
            float(logprobs[position, prompt[position + 1]]), abs=1e-3
        )

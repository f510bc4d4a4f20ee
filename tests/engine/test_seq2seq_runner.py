"""Exported encoder-decoders in the engine: as in PyTorch, and the same bits beside any others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.model.network.transformer import Transformer
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import BeamParams, SamplingParams
from kvasir.server.engine.seq2seq.runner import Seq2SeqRunner
from kvasir.server.engine.sequence import FinishReason, Sequence
from tests.engine.test_seq2seq import expected
from tests.kit.beam_search import beam_search
from tests.kit.encoder_decoders import export_both
from tests.kit.engine_driver import Result, assert_same, run_at_random, run_to_end
from tests.kit.fake_seq2seq import EOS, read, small_config, small_lstm_config, small_model

N_REQUESTS = 14
BEAMS = {
    2: BeamParams(2),
    4: BeamParams(4, 0.0),
    6: BeamParams(3, 2.5, early_stopping=True),
    8: BeamParams(3, 1.5, early_stopping="never"),
    13: BeamParams(3, 2.0),
    10: BeamParams(5, -1.0, early_stopping="never"),
}


@dataclass(frozen=True)
class Exported:
    """A random model, and its graphs."""

    folder: Path
    model: Transformer
    precision: str

    def runner(self, **options: Any) -> Seq2SeqRunner:
        graphs = self.folder / "encoder.onnx", self.folder / "model.onnx"
        options = {"kv_cache_bytes": 10**6, "threads": 1} | options
        return Seq2SeqRunner(*graphs, self.model.config, **options)


KINDS = ("relative fp32", "relative int8", "none fp32", "additive fp32", "additive int8")


@pytest.fixture(scope="module", params=KINDS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    kind, precision = request.param.split()
    if kind in ("none", "additive"):
        model = small_model(small_lstm_config((3, 7), cross_attention=kind), seed=11)
    else:
        config = small_config((3, 7))
        assert config.encoder is not None
        encoder = replace(config.encoder, position=kind)
        model = small_model(replace(config, position=kind, encoder=encoder))
    folder = tmp_path_factory.mktemp("exported")
    export_both(model.config, model.state_dict(), folder, precision)
    return Exported(folder, model, precision)


def make_request(model: Transformer, i: int) -> Sequence:
    """Request i: sources of one token and of many; greedy, sampled and searched.

    Half of those that are not searched, and one that is, give more of the target's beginning.
    """
    generator = np.random.default_rng(i)
    length = [1, 2, 24, *generator.integers(1, 25, size=2).tolist()][i % 5]
    source_ids = generator.integers(4, model.config.vocab_size, size=length).tolist()
    params = SamplingParams(
        max_tokens=12 if i in BEAMS else int(generator.integers(1, 15)),
        temperature=[0.0, 0.9][i % 2],
        top_k=[0, 20][i % 3 == 1],
        repetition_penalty=[1.0, 1.3][i % 4 == 3],
        presence_penalty=[0.0, 0.3][i % 5 == 2],
        seed=i,
        logprobs=2,
        beams=BEAMS.get(i),
    )
    prefix = [*model.config.target_prefix, *([11, 12, 13][: i % 4] if i % 2 else [])]
    n_others = [2 if i in BEAMS else 15, 0][i % 4 // 2]
    ending_ids = frozenset({EOS, *range(11, 11 + n_others)})
    return Sequence(i, source_ids, params, ending_ids, 0.0, target_prefix=prefix)


@pytest.fixture(scope="module")
def alone(exported: Exported) -> list[Result]:
    """Each request alone, with as many rows as it needs."""
    requests = [make_request(exported.model, i) for i in range(N_REQUESTS)]
    widths = {request.params.n_rows for request in requests}
    engines = {n: Engine(exported.runner(max_num_seqs=n), chunk_size=100) for n in widths}
    return [run_to_end(engines[one.params.n_rows], [one])[one.id] for one in requests]


def test_answers_are_those_of_the_network(exported: Exported, alone: list[Result]) -> None:
    """An fp32 graph's, to the token; scores nearly."""
    model, endings = exported.model, list[bool]()
    if exported.precision != "fp32":
        pytest.skip("int8 rounds")
    for i in range(N_REQUESTS):
        request = make_request(model, i)
        params, result = request.params, alone[i]
        if params.beams is None and not params.penalises:
            assert result.token_ids == expected(request, model)
            endings.append(result.token_ids[-1] in request.ending_ids)
            ended = FinishReason.STOP if endings[-1] else FinishReason.LENGTH
            assert result.finish_reasons == [ended]
        elif params.beams is not None and i % 2 == 0:
            best = beam_search(
                model,
                read(model, request.prompt_ids),
                n_beams=params.beams.width,
                max_tokens=params.max_tokens,
                length_penalty=params.beams.length_penalty,
                early_stopping=params.beams.early_stopping,
                ending_ids=request.ending_ids,
            )
            texts = result.hypotheses
            assert [text.token_ids for text in texts] == [text.token_ids for text in best]
            scores = [text.score for text in texts]
            np.testing.assert_allclose(scores, [text.score for text in best], rtol=1e-4)
    assert set(endings) == {True, False}


@pytest.mark.parametrize("seed", range(3))
def test_same_request_same_bits(exported: Exported, alone: list[Result], seed: int) -> None:
    """In any order and company, with rows that move, and aborts; beams and scores included."""
    generator = np.random.default_rng(seed)
    runner = exported.runner(max_num_seqs=[5, 12, 6][seed], threads=[1, 2][seed % 2])
    runner._never_alone |= seed == 1  # as on a CPU whose kernel for a lone row differs
    engine = Engine(runner, chunk_size=[4, 30, 100][seed])
    requests = [make_request(exported.model, i) for i in range(N_REQUESTS)]
    results = run_at_random(engine, requests, generator, n_aborted=seed, longest_wait=6)
    assert_same(results, alone)
    assert engine.kv.reserved_tokens == 0


def test_states_take_memory_before_tokens_do(exported: Exported) -> None:
    """One for each sequence, and a row that decoding may run beside the last."""
    with pytest.raises(ValueError, match="kv_cache_memory of 3 bytes"):
        exported.runner(max_num_seqs=1, kv_cache_bytes=3)
    state_bytes = exported.runner(max_num_seqs=1).kv.state_bytes
    kv = exported.runner(max_num_seqs=2, kv_cache_bytes=3 * state_bytes + 16_000).kv
    assert kv.budget_tokens == min(16_000 // kv.token_bytes, 2 * (24 + 20))
    if state_bytes:
        with pytest.raises(ValueError, match=f"states of 2 sequences {3 * state_bytes}; raise it"):
            exported.runner(max_num_seqs=2, kv_cache_bytes=3 * state_bytes)

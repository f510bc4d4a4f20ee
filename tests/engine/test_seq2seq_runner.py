"""Exported encoder-decoders in the engine: as in PyTorch, and the same bits beside any others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.model.network.transformer import Transformer
from kvasir.server.engine.beams import Hypothesis
from kvasir.server.engine.engine import BeamOutput, Engine
from kvasir.server.engine.sampling import BeamParams, SamplingParams
from kvasir.server.engine.seq2seq.runner import Seq2SeqRunner
from kvasir.server.engine.sequence import Sequence
from tests.beam_search import beam_search
from tests.encoder_decoders import export_both
from tests.engine.test_seq2seq import expected
from tests.engine_driver import Collector, Result
from tests.fake_seq2seq import EOS, read, small_config, small_model

N_REQUESTS = 12
BEAMS = {2: BeamParams(2), 6: BeamParams(4, 0.5, early_stopping=True), 9: BeamParams(3, 2.0)}


@dataclass(frozen=True)
class Exported:
    """A random model, and its graphs."""

    folder: Path
    model: Transformer
    precision: str

    def runner(self, **options: Any) -> Seq2SeqRunner:
        graphs = self.folder / "encoder.onnx", self.folder / "model.onnx"
        options = {"kv_cache_bytes": 10**6, "threads": 1, "spin_microseconds": 0} | options
        return Seq2SeqRunner(*graphs, self.model.config, **options)


@pytest.fixture(scope="module", params=["sinusoidal fp32", "sinusoidal int8", "relative int8"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    position, precision = request.param.split()
    config = small_config((3, 7))
    assert config.encoder is not None
    encoder = replace(config.encoder, position=position)
    model = small_model(replace(config, position=position, encoder=encoder))
    folder = tmp_path_factory.mktemp("exported")
    export_both(model.config, model.state_dict(), folder, precision)
    return Exported(folder, model, precision)


def make_request(model: Transformer, i: int) -> Sequence:
    """Request i: sources of one token and of many; greedy, sampled and searched."""
    generator = np.random.default_rng(i)
    length = [1, 2, 24, *generator.integers(1, 25, size=2).tolist()][i % 5]
    source_ids = generator.integers(4, model.config.vocab_size, size=length).tolist()
    params = SamplingParams(
        max_tokens=int(generator.integers(1, 15)),
        temperature=[0.0, 0.9][i % 2],
        top_k=[0, 20][i % 3 == 1],
        repetition_penalty=[1.0, 1.3][i % 4 == 3],
        presence_penalty=[0.0, 0.3][i % 5 == 2],
        seed=i,
        logprobs=2,
        beams=BEAMS.get(i),
    )
    prefix = [*model.config.target_prefix, *[11, 12, 13][: i % 4]]
    return Sequence(i, source_ids, params, frozenset({EOS}), 0.0, target_prefix=prefix)


@dataclass
class Answers(Collector):
    """Tokens and log-probabilities, and the texts of searches."""

    searched: dict[int, list[Hypothesis]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def step(self, engine: Engine) -> None:
        outputs = engine.step()[0]
        self.take(outputs)
        found = (output for output in outputs if isinstance(output, BeamOutput))
        self.searched |= {output.sequence_id: output.hypotheses for output in found}

    def of(self, i: int) -> tuple[Result, list[Hypothesis] | None]:
        return self.results[i], self.searched.get(i)


@pytest.fixture(scope="module")
def alone(exported: Exported) -> Answers:
    """Each request alone, with as many rows as it needs."""
    answers = Answers()
    for i in range(N_REQUESTS):
        request = make_request(exported.model, i)
        n_rows = request.params.n_rows
        engine = Engine(exported.runner(max_num_seqs=n_rows), chunk_size=100)
        engine.add(request)
        while engine.has_work:
            answers.step(engine)
    return answers


def test_answers_are_those_of_the_network(exported: Exported, alone: Answers) -> None:
    """An fp32 graph's, to the token; log-probabilities and scores nearly."""
    model, n_compared = exported.model, 0
    if exported.precision != "fp32":
        pytest.skip("int8 rounds")
    for i in range(N_REQUESTS):
        request = make_request(model, i)
        params, (result, texts) = request.params, alone.of(i)
        source = read(model, request.prompt_ids)
        if params.beams is None and not params.penalises:
            assert result.token_ids == expected(request, model)
            n_compared += 1
        elif params.beams is not None and len(request.target_prefix) == 2:
            best = beam_search(
                model,
                source,
                n_beams=params.beams.width,
                max_tokens=params.max_tokens,
                length_penalty=params.beams.length_penalty,
                early_stopping=params.beams.early_stopping,
                ending_ids=[EOS],
            )
            assert texts is not None
            assert [one.token_ids for one in texts] == [one.token_ids for one in best]
            scores = [one.score for one in texts]
            np.testing.assert_allclose(scores, [one.score for one in best], rtol=1e-4)
    assert n_compared > 3


@pytest.mark.parametrize("seed", range(6))
def test_same_request_same_bits(exported: Exported, alone: Answers, seed: int) -> None:
    """In any order and company, with rows that move, and aborts; beams and scores included."""
    generator = np.random.default_rng(seed)
    runner = exported.runner(max_num_seqs=[4, 6, 12][seed % 3], threads=[1, 2][seed % 2])
    runner._never_alone |= seed % 4 == 1  # as on a CPU whose kernel for a lone row differs
    engine, answers = Engine(runner, chunk_size=[4, 30, 100][seed // 2]), Answers()
    pending = generator.permutation(N_REQUESTS).tolist()
    waits = generator.integers(0, 6, size=N_REQUESTS).tolist()
    aborted = {int(i): int(generator.integers(0, 20)) for i in pending[: seed % 4]}
    while engine.has_work or pending:
        while pending and (waits[0] <= 0 or not engine.has_work):
            engine.add(make_request(exported.model, pending.pop(0)))
            waits.pop(0)
        waits[:1] = [wait - 1 for wait in waits[:1]]
        answers.step(engine)
        for i in list(aborted):
            aborted[i] -= 1
            if aborted[i] <= 0 and (output := engine.abort(i)):
                answers.take([output])
    for i in range(N_REQUESTS):
        (found, texts), (expected, best) = answers.of(i), alone.of(i)
        if found.finish_reasons == ["abort"]:
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
        else:
            assert (found, texts) == (expected, best)
    assert engine.kv.reserved_tokens == 0


def test_memory_for_less_than_a_source_is_refused(exported: Exported) -> None:
    with pytest.raises(ValueError, match="kv_cache_memory of 500 bytes"):
        exported.runner(max_num_seqs=1, kv_cache_bytes=500)

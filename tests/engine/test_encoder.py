"""Encoders: a text has PyTorch's vector, bit for bit the same whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest

from kvasir.model.config import Pooling
from kvasir.model.packing import pack
from kvasir.server.engine.encoder.engine import MAX_PADDING, EncoderEngine
from kvasir.server.engine.encoder.sequence import EncoderOutput, EncoderSequence
from kvasir.server.engine.sampling.params import Floats, SamplingParams
from kvasir.server.engine.sequence import FinishReason
from tests.kit.encoders import (
    BERT,
    LAST_TOKEN,
    MODERN,
    MPNET,
    expected_vectors,
    export_encoder,
    make_text,
    of_tokens,
    open_runner,
)
from tests.kit.fake_encoder import FakeTextRunner
from tests.kit.fake_runner import TIMEOUT
from tests.kit.random_models import RandomModel

N_TEXTS = 21
MEAN = Pooling(kind="mean")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("fp32", BERT),
    "one type": ("fp32", MPNET | {"n_token_types": 1}),
    "int8 modernbert": ("int8", MODERN),
    "decoder": ("fp32", LAST_TOKEN),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RandomModel]:
    @cache
    def export(name: str) -> RandomModel:
        precision, changes = MODELS[name]
        return export_encoder(tmp_path_factory.mktemp("encoder") / precision, precision, **changes)

    return export


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, exported: Callable[[str], RandomModel]) -> RandomModel:
    return exported(request.param)


def test_vectors_are_pytorchs(model: RandomModel) -> None:
    """Types that the model lacks have no effect: a tokenizer may give a second text type 1."""
    runner = open_runner(model)
    texts = [make_text(model, i) for i in range(N_TEXTS)]
    is_rounded = model.graph.parent.name == "int8"
    for text, vector, tokens in zip(
        texts, runner.run(texts), runner.run(list(map(of_tokens, texts))), strict=True
    ):
        if model.config.n_token_types == 1:
            text.type_ids = None
        for found, expected in zip((vector, tokens), expected_vectors(model, text), strict=True):
            cosines = (found * expected).sum(-1) / (
                np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
            )
            assert found.shape == expected.shape
            assert cosines.min() > (0.99 if is_rounded else 0.99999)
            if not is_rounded:
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_same_text_same_bits(model: RandomModel, seed: int) -> None:
    generator = np.random.default_rng(seed)
    alone = open_runner(model, threads=1)
    # Products of int8 encoders are exact either way.
    runner = open_runner(model, threads=[1, 2][seed], fits_16_bits=True)
    budget, max_num_seqs = [40, 2000][seed], [3, 16][seed]
    engine = EncoderEngine(runner, token_budget=budget, max_num_seqs=max_num_seqs)
    order = generator.permutation(N_TEXTS).tolist()
    found: dict[int, Floats | None] = {}

    def take(outputs: list[EncoderOutput]) -> None:
        for output in outputs:
            assert output.sequence_id not in found, "an output after the terminal one"
            found[output.sequence_id] = output.vectors

    while order or engine.has_work:
        for _ in range(min(len(order), int(generator.integers(4)))):
            engine.add(make_text(model, order.pop()))
        if engine.has_work:
            take(engine.step()[0])
    for i in range(N_TEXTS):
        (expected,) = alone.run([make_text(model, i)])
        vector = found[i]
        assert vector is not None
        assert np.array_equal(vector, expected)


def test_sessions_are_those_of_the_files_at_first(
    exported: Callable[[str], RandomModel], tmp_path: Path
) -> None:
    """One that is opened later, or again, must not read a model that took the first one's place."""
    model = exported("bert")
    copytree(model.graph.parent, tmp_path / "copy")
    model = replace(model, graph=tmp_path / "copy" / model.graph.name)
    runner, texts = open_runner(model), [make_text(model, i) for i in range(N_TEXTS)]
    expected = runner.run(texts)
    for is_changed in (False, True):
        if is_changed:
            other = model.graph.with_name("other")
            other.write_bytes(b"another model")
            other.replace(model.graph)
        for alone in (True, False):
            for vector, found in zip(expected, runner.run(texts, alone=alone), strict=True):
                assert np.array_equal(vector, found)
        runner.release_idle_memory()


@pytest.mark.parametrize("types", [None, [None], [[0, 0, 1, 1]]])
def test_a_lone_text_is_packed_as_the_first_of_two(types: list[list[int] | None] | None) -> None:
    """The inputs of a lone text have a short way of their own."""
    text = [5, 3, 8, 1]
    lone, ends = pack([text], types)
    two, _ = pack([text, text], types and types * 2)
    assert ends.tolist() == [4]
    assert lone.keys() == two.keys()
    for name, of_two in two.items():
        half = of_two[: len(of_two) // 2]
        assert lone[name].dtype == half.dtype
        np.testing.assert_array_equal(lone[name], half)


def fake_runner() -> FakeTextRunner:
    return FakeTextRunner(MEAN, max_model_len=100)


def make_texts(lengths: list[int], **fields: Any) -> list[EncoderSequence]:
    params = SamplingParams(max_tokens=0)
    return [
        EncoderSequence(i, [0] * length, params, frozenset(), 0.0, **fields)
        for i, length in enumerate(lengths)
    ]


def test_a_step_takes_the_first_text_and_others_within_its_limits() -> None:
    generator = np.random.default_rng(0)
    runner = fake_runner()
    engine = EncoderEngine(runner, token_budget=60, max_num_seqs=4)
    texts = make_texts(generator.integers(1, 100, size=100).tolist())
    for text in texts:
        text.priority = int(generator.integers(-2, 3))
        engine.add(text)
    waiting = sorted(texts, key=lambda text: text.queue_key)
    while engine.has_work:
        outputs, stats = engine.step()
        batch = runner.batches[-1]
        lengths = [len(text.prompt_ids) for text in batch]
        assert batch[0] is waiting[0]
        assert {output.sequence_id for output in outputs} == {text.id for text in batch}
        assert stats.n_prefill_tokens == sum(lengths)
        if len(batch) > 1:
            assert sum(lengths) <= 60
            assert len(batch) <= 4
            assert max(lengths) * len(batch) <= MAX_PADDING * sum(lengths)
        waiting = [text for text in waiting if text not in batch]
    assert not waiting


def test_texts_run_at_the_same_time_and_one_that_runs_may_be_aborted() -> None:
    """As many runs as threads; fewer texts than threads run alone, with all of them."""
    both, may_end, runs_alone = Barrier(2), Event(), list[bool]()

    class Pair(FakeTextRunner):
        max_runs = 2

        def run(self, texts: list[EncoderSequence], *, alone: bool = True) -> list[Floats]:
            runs_alone.append(alone)
            if not alone:
                both.wait(TIMEOUT)
                assert texts[0].id == 0 or may_end.wait(TIMEOUT)
            return super().run(texts)

    engine = EncoderEngine(Pair(MEAN, max_model_len=100), token_budget=60, max_num_seqs=4)
    first, second = make_texts([60, 60])
    engine.add(first)
    engine.add(second)
    assert [output.sequence_id for output in engine.step()[0]] == [0]
    ended = engine.abort(second.id)
    assert ended is not None
    assert ended.finish_reason is FinishReason.ABORT
    assert engine.abort(second.id) is None
    may_end.set()
    assert not engine.step()[0]
    assert not engine.has_work
    engine.add(*make_texts([5]))
    assert len(engine.step()[0]) == 1
    assert runs_alone == [False, False, True]


def test_an_aborted_text_never_runs() -> None:
    engine = EncoderEngine(runner := fake_runner(), token_budget=60, max_num_seqs=4)
    first, second = make_texts([3, 4])
    engine.add(first)
    engine.add(second)
    ended = engine.abort(first.id, FinishReason.TIMEOUT)
    assert ended is not None
    assert (ended.finish_reason, ended.vectors) == (FinishReason.TIMEOUT, None)
    assert engine.abort(first.id) is None
    engine.step()
    assert runner.batches == [[second]]
    assert not engine.has_work


@pytest.mark.parametrize("length", [0, 101])
def test_a_text_that_cannot_fit_is_refused(length: int) -> None:
    engine = EncoderEngine(fake_runner(), token_budget=60, max_num_seqs=4)
    with pytest.raises(ValueError, match=f"{length} tokens"):
        engine.add(*make_texts([length]))

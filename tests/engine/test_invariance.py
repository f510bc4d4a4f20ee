"""Determinism: a request always gets the same tokens and log-probabilities, bit by bit.

Other sequences, their order and aborts, the chunk sizes, rows and their moves, and the prefix cache
must not change them.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from kvasir.server.engine.engine import Engine
from kvasir.server.engine.grammar.compiler import GrammarCompiler
from kvasir.server.engine.grammar.constraints import Grammar
from kvasir.server.engine.kv.prefix_cache import PrefixCache
from kvasir.server.engine.runner import OnnxRunner
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence
from kvasir.server.engine.step_capacity import PromptCost, StepCapacity, StepRoom
from tests.kit.engine_driver import Result, assert_same, make_sequence, run_at_random, run_to_end
from tests.kit.random_models import RandomModel
from tests.kit.serving import VOCAB_SIZE, small_tokenizer

N_REQUESTS = 14
CONSTRAINED = {
    3: Grammar("regex", "[a-z ]{2,60}", "regex"),
    5: Grammar.json_schema({"type": "object"}),
    12: Grammar("regex", "(def|json|[.()])+", "regex"),
}

compiler = GrammarCompiler(small_tokenizer().to_str(), VOCAB_SIZE, [])


def make_request(model: RandomModel, i: int) -> Sequence:
    """Request i: prompts of one token, of a chunk and a token, and of anything; greedy and sampled.

    Two of three begin like all those. Half of them have a salt, some a grammar.
    """
    generator = np.random.default_rng(i)
    length = [1, 2, 33, 65, 129, *generator.integers(1, 150, size=3).tolist()][i % 8]
    length = min(length, model.config.max_model_len - 24)
    prompt_ids = generator.integers(model.config.vocab_size, size=length).tolist()
    n_shared = int(generator.integers(length + 1)) if i % 3 else 0
    prompt_ids[:n_shared] = (
        np.random.default_rng(99).integers(model.config.vocab_size, size=n_shared).tolist()
    )
    params = SamplingParams(
        max_tokens=int(generator.integers(1, 24)),
        temperature=[0.0, 0.9][i % 2],
        top_k=[0, 20][i % 7 == 1],
        top_p=[0.95, 1.0][i % 7 == 3],
        min_p=[0.0, 0.02][i % 7 == 3],
        typical_p=[1.0, 0.9][i % 7 == 5],
        repetition_penalty=[1.0, 1.2][i % 3 == 0],
        frequency_penalty=[0.0, 0.3][i % 4 == 1],
        presence_penalty=[0.0, 0.3][i % 4 == 3],
        logit_bias={5: 2.0} if i % 5 == 1 else {},
        min_tokens=i % 3,
        seed=i,
        logprobs=[3, 0][i % 2],
        prompt_logprobs=2 if i % 5 == 0 else None,
    )
    sequence = make_sequence(i, prompt_ids, params)
    sequence.cache_salt, sequence.owner = [b"", b"salt"][i % 2], ["", "a", "b"][i % 3]
    sequence.constraint = compiler.compile(CONSTRAINED[i]) if i in CONSTRAINED else None
    return sequence


MODELS = [
    *("random_model", "random_int8_model", "random_int4_model", "random_windowed_model"),
    *("random_biased_model", "random_mixture_model", "random_int8_mixture_model"),
    *("random_int4_mixture_model", "random_latent_model"),
    *("random_hybrid_model", "random_delta_model", "random_recurrent_model"),
    *("random_mamba_model", "random_both_model"),
]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> RandomModel:
    """Rounded models keep the promise, because each token has scales of its own."""
    exported: RandomModel = request.getfixturevalue(request.param)
    return exported


def number_of(model: RandomModel) -> int:
    return MODELS.index(model.graph.parent.name)


@cache
def run_alone(model: RandomModel) -> list[Result]:
    """The results of each request alone, its prompt in one piece."""
    engine = Engine(model.runner(max_num_seqs=1), chunk_size=200)
    return [run_to_end(engine, [make_request(model, i)])[i] for i in range(N_REQUESTS)]


def make_engine(runner: OnnxRunner, *, chunk_size: int, cache_blocks: int = 0) -> Engine:
    """The blocks of the prefix cache have 16 tokens here, and every other one may have a state."""
    n_states = cache_blocks // 2 + 1 if runner.kv.prompts.states else None
    runner.kv.cache = PrefixCache(cache_blocks, block_size=16, n_states=n_states)
    return Engine(runner, chunk_size=chunk_size)


class RandomCapacity(StepCapacity):
    """Any room for prompts, and any cost and thus order of them, as measured times could give."""

    def __init__(self, generator: np.random.Generator) -> None:
        super().__init__(200, None)
        self._generator = generator

    def room(self, *, has_streams: bool) -> StepRoom:  # noqa: ARG002
        first, later, seconds = self._generator.random(3) + 1e-3
        self.cost = PromptCost(200, 0.0, first, later * 10)
        return StepRoom(self.cost, 200, seconds / 2, int(self._generator.integers(2, 20)))

    def record(self, *_: object) -> None:
        """Measure nothing."""


@pytest.mark.parametrize("kind", range(3))
def test_same_request_same_bits(model: RandomModel, kind: int) -> None:
    """In three runs a model, all of which differ in rows, chunks and the prefix cache."""
    n = 4 * number_of(model) + kind
    generator = np.random.default_rng(n)
    runner = model.runner(max_num_seqs=[2, 5, 8][n % 3], threads=[1, 2][n % 2])
    runner._never_alone |= kind == 1  # as on a CPU whose kernel for a lone row differs
    chunk_size = [2, 3, 16, 32, 64, 200][n % 6] if kind < 2 else 200
    engine = make_engine(runner, chunk_size=chunk_size, cache_blocks=[100, 3, 0, 100, 1][n % 5])
    if kind == 2:
        engine.scheduler.capacity = RandomCapacity(generator)
    requests = [make_request(model, i) for i in range(N_REQUESTS)]
    assert_same(run_at_random(engine, requests, generator, n_aborted=n % 6), run_alone(model))


def test_cold_and_warm_answers_are_the_same(model: RandomModel) -> None:
    """All at once, one again and again, and all in another order, with a large or a tiny cache."""
    cache_blocks, chunk_size = [(1000, 3), (4, 48), (1, 16)][number_of(model) % 3]
    runner = model.runner(max_num_seqs=6)
    engine = make_engine(runner, chunk_size=chunk_size, cache_blocks=cache_blocks)
    wanted, alone = range(N_REQUESTS), run_alone(model)
    n_cached = 0
    for ids in (wanted, [4], [4], [4], wanted[::-1]):
        requests = [make_request(model, i) for i in ids]
        results = run_to_end(engine, requests)
        assert [results[i] for i in ids] == [alone[i] for i in ids]
        n_cached += sum(request.n_cached for request in requests)
    assert n_cached > 0


def test_prompt_logprobs_for_every_way_of_cutting(model: RandomModel) -> None:
    """A one-token tail starts a token earlier and must write and score the same bits."""
    runner = model.runner(max_num_seqs=1)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=5, prompt_logprobs=5)
    length = min(129, model.config.max_model_len - 5)
    prompt_ids = np.random.default_rng(0).integers(model.config.vocab_size, size=length).tolist()
    whole, *cut = (
        run_to_end(Engine(runner, chunk_size=chunk_size), [make_sequence(0, prompt_ids, params)])[0]
        for chunk_size in (200, 2, 32, length - 1)
    )
    assert cut == [whole] * 3

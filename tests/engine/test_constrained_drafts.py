"""Drafts under grammars: equal bits with and without them, right up to a matcher's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from kvasir.server.engine.grammar import compiler as compiling
from kvasir.server.engine.grammar import constraints
from kvasir.server.engine.grammar.compiler import GrammarCompiler
from kvasir.server.engine.grammar.constraints import Grammar
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import FinishReason, Sequence
from tests.kit.engine_driver import (
    CountingEngine,
    Result,
    assert_same,
    make_sequence,
    run_at_random,
    run_to_end,
)
from tests.kit.fake_runner import FakeRunner
from tests.kit.random_schemas import random_schema
from tests.kit.serving import EOS, VOCAB_SIZE, small_tokenizer

N_REQUESTS = 28
tokenizer = small_tokenizer()
X = tokenizer.encode("x").ids[0]
compiler = GrammarCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])
# Random logits rarely end a text: a bias for these tokens ends strings, lists and objects.
CLOSING = {tokenizer.encode(mark).ids[0]: 6.0 for mark in '"]}'}
OTHERS = (
    Grammar("regex", "(yes|no)(, (sir|madam))*[!?]", ""),
    Grammar("regex", r"(\d{1,3}\.){9}\d{1,3}", ""),
    Grammar("regex", "(abc|bcd|[a-h]{2,9}x?){1,20}", ""),
    Grammar("regex", "(.*a.{9})?[a-h ]{20,80}", ""),
    Grammar("json", '{"enum": ["abc", "abd", "def read", 1]}', ""),
    Grammar("json", '{"type": "object"}', "", lead='before: /[a-z ]{0,9}/ "!"'),
    Grammar("lark", 'start: sum\nsum: item ("+" item)*\nitem: /[1-9]+/ | "(" sum ")"', ""),
    Grammar("lark", 'start: "abcde" rest\nrest: rest "c"', ""),  # has no text
)


def make_request(i: int) -> Sequence:
    """A request with its own sampler and grammar; 0 has none."""
    chance = Random(i)
    options: dict[str, Any] = {
        "min_tokens": chance.choice([0, 0, 5]),
        "temperature": chance.choice([0.0, 0.7, 1.2]),
        "top_k": chance.choice([0, 0, 9]),
        "top_p": chance.choice([1.0, 0.8]),
        "typical_p": chance.choice([1.0, 1.0, 0.9]),
        "repetition_penalty": chance.choice([1.0, 1.2]),
        "presence_penalty": chance.choice([0.0, 0.5]),
        "logprobs": chance.choice([None, 0, 2]),
        "stop_token_ids": frozenset(chance.sample(range(VOCAB_SIZE), chance.choice([0, 2]))),
    }
    params = SamplingParams(max_tokens=100, seed=i, logit_bias=CLOSING, **options)
    sequence = make_sequence(i, [5, 7, i, 5, 7], params, eos=[EOS])
    if i:
        schema = Grammar.json_schema(random_schema(chance))
        sequence.constraint = compiler.compile(OTHERS[i // 2 % len(OTHERS)] if i % 2 else schema)
    return sequence


def repeating(prefix: list[int]) -> int | None:
    """A model that mostly repeats the token three places back, whatever a grammar allows."""
    return prefix[-3] if sum(prefix) % 5 else None


def make_engine(
    next_token: Callable[[list[int]], int | None] | None = repeating,
    max_num_seqs: int = 1,
    **options: Any,
) -> CountingEngine:
    runner = FakeRunner(
        VOCAB_SIZE, max_model_len=200, max_num_seqs=max_num_seqs, next_token=next_token
    )
    runner.kv.steps_are_runs = True  # for the lengths of drafts alone
    return CountingEngine(runner, chunk_size=8, **options)


def predict(sequence: Sequence, result: Result, errors: np.random.Generator) -> None:
    """Give a sequence a prediction that misses, changes and adds some of its tokens."""
    error = [0.0, 0.2, 1.0][sequence.id % 3]
    for token in result.token_ids:
        other = int(errors.choice(result.token_ids))  # the grammar may well allow it
        kept = [[token], [], [other], [token, other]]
        sequence.prediction += kept[errors.choice(4, p=[1 - error, *[error / 3] * 3])]


@pytest.mark.parametrize("n_states", [50_000, 70])
def test_drafts_change_no_bit(monkeypatch: pytest.MonkeyPatch, n_states: int) -> None:
    """In any crowd, with right and wrong predictions.

    With few states of a lexer many texts end because these are used up. Would catch a mask of
    another place, and a matcher that looks at tokens which are not accepted.
    """
    monkeypatch.setattr(compiling, "_LIMITS", LLParserLimits(max_lexer_states=n_states))
    monkeypatch.setattr(constraints, "_SLOW_SECONDS_PER_TOKEN", 60.0)
    alone = [run_to_end(make_engine(), [make_request(i)])[i] for i in range(N_REQUESTS)]
    is_cut = [result.finish_reasons == [FinishReason.GRAMMAR] for result in alone]
    assert sum(is_cut) < 3 if n_states == 50_000 else 3 < sum(is_cut) < 20
    for n, max_num_seqs in enumerate((2, 6)):
        generator = np.random.default_rng(n)
        requests = [make_request(i) for i in range(N_REQUESTS)]
        for request in requests:
            predict(request, alone[request.id], generator)
        engine = make_engine(max_num_seqs=max_num_seqs, speculate=True)
        assert_same(run_at_random(engine, requests, generator, n_aborted=3), alone)
        assert 90 < engine.n_accepted < engine.n_drafted


def saying_x(pattern: str) -> Sequence:
    """A request that predicts 40 times the token x, which the model says wherever it may."""
    sequence = make_sequence(0, [5, 7], SamplingParams(max_tokens=40, temperature=0.0), [EOS])
    sequence.constraint = compiler.compile(Grammar("regex", pattern, ""))
    sequence.prediction = [X] * 40
    return sequence


def test_a_token_that_the_grammar_forbids_is_not_accepted() -> None:
    engine = make_engine(lambda _: X, speculate=True)
    result = run_to_end(engine, [saying_x("(x{5}y){6}x*")])[0]
    assert tokenizer.decode(result.token_ids) == "xxxxxy" * 6 + "xxxx"
    assert 20 < engine.n_accepted < engine.n_drafted


def test_a_slow_token_is_the_last_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would delay streams beside it; the next step has no draft. Every third is slow."""

    def ticks() -> Iterator[float]:
        for token in count():
            yield token
            yield token + (0.01 if token % 3 == 2 else 0.0)

    monkeypatch.setattr(constraints, "thread_time", partial(next, ticks()))
    engine = make_engine(lambda _: X, speculate=True)
    assert run_to_end(engine, [saying_x("x*")])[0].token_ids == [X] * 40
    assert 10 < engine.n_accepted < 15

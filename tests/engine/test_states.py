"""States of recurrent layers: moved once by each token, by no padding, and kept at block ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.model.configuration.recurrences import ShortConvolution
from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.kv.prefix_cache import PrefixCache
from kvasir.server.engine.kv.rows import KVRows
from kvasir.server.engine.runner import OnnxRunner
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence, SequenceStatus
from tests.kit.engine_driver import make_sequence
from tests.kit.random_models import RandomModel

BLOCK = 4  # tokens
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def make_rows(capacity: int = 8, n_states: int = 8, n_seqs: int = 4) -> KVRows:
    shape = KVShape(1, 1, 1, states=((2, 3), (5,)))
    cache = PrefixCache(capacity, BLOCK, n_states)
    return KVRows(shape, max_num_seqs=n_seqs, max_model_len=200, budget_tokens=999, cache=cache)


@given(st.integers(1, 60), st.lists(st.integers(1, 30), min_size=1), st.booleans())
def test_no_token_of_a_prompt_runs_twice_or_alone(
    n_prompt: int, limits: list[int], caches: bool
) -> None:
    """Any limits. Where states are kept, a chunk ends where the same prompt goes on."""
    rows, ends = make_rows(8 if caches else 0), [0]
    assert rows.admit(n_prompt, 1, []) == (0, 0)
    while ends[-1] < n_prompt:
        limit = limits[len(ends) % len(limits)]
        start, end = rows.cut(0, ends[-1], limit, n_prompt)
        assert start == ends[-1]
        assert min(2, n_prompt) <= end - start <= max(limit, 2) + 1
        ends.append(end)
    if caches and min(limits) >= BLOCK + 2:  # else a chunk may end a token before a block does
        assert max(0, n_prompt - 2) // BLOCK * BLOCK in ends


def begin(rows: KVRows, prompt: list[int], n_new: int) -> tuple[int, int]:
    """Return a prompt's row, and its tokens that the prefix cache had."""
    names = rows.cache.names(prompt)[: max(0, len(prompt) - 2) // BLOCK]
    admitted = rows.admit(len(prompt), n_new, names)
    assert admitted is not None
    n_found = rows.restore(admitted[0], names, 0, BLOCK)
    assert rows.restore(admitted[0], names, n_found, BLOCK) == n_found
    return admitted[0], n_found


def count(rows: KVRows, row: int, start: int, end: int) -> None:
    """Run a model whose state is the number of tokens so far: what it must find in its row."""
    prompt_row = rows.prompt_row(row)
    for state in rows.prompts.states:
        assert (state[prompt_row] == start).all()
        state[prompt_row] = end


def serve(rows: KVRows, prompt: list[int], limit: Callable[[], int]) -> int:
    """Compute a prompt in chunks of at most `limit` tokens; return its tokens that need not be."""
    names = rows.cache.names(prompt)
    row, n_found = begin(rows, prompt, 4)
    end = n_found
    while end < len(prompt):
        start, end = rows.cut(row, end, limit(), len(prompt))
        count(rows, row, start, end)
        rows.record_prefill(row, start, end, names)
    assert all((state[row] == len(prompt)).all() for state in rows.running.states)
    rows.free(row)
    return n_found


@pytest.mark.parametrize(("capacity", "n_states"), [(40, 40), (6, 2), (3, 1), (1, 1), (9, 3)])
def test_a_prompt_goes_on_from_the_state_of_its_own_beginning(capacity: int, n_states: int) -> None:
    """Few prompts with common beginnings, many times, in caches that hold some of them."""
    chance, rows, n_found = random.Random(capacity), make_rows(capacity, n_states), 0
    beginnings = [[chance.randrange(9) for _ in range(30)] for _ in range(3)]
    for _ in range(300):
        prompt = chance.choice(beginnings)[: chance.randint(2, 30)] + [9] * chance.randint(0, 9)
        n_found += serve(rows, prompt, lambda: chance.randint(2, 20)) > 0
        assert rows.cache.states.keys() <= rows.cache.blocks.keys()
        assert len(rows.cache.states) <= n_states
    assert n_found > 10


@pytest.mark.parametrize("limit", [BLOCK, 100])
def test_the_next_turn_goes_on_where_the_last_one_ended(limit: int) -> None:
    """However many turns or chunks a chat has: where few states fit, it needs its newest."""
    rows, chat = make_rows(40, 3), list(range(50))
    for turn in range(6):
        last_end = 0 if turn == 0 else (len(chat) - 10 - 2) // BLOCK * BLOCK
        assert serve(rows, chat, lambda: limit) >= last_end
        chat += [100 + turn] * 10


@pytest.mark.parametrize(("limit", "found"), [(100, [0, 0, 8, 8, 8]), (BLOCK, [0, 8, 8, 8, 8])])
def test_a_common_beginning_is_found_once_its_state_was_kept(limit: int, found: list[int]) -> None:
    """A first prompt in one piece keeps none where others will differ; the second one's run ends
    there. In small chunks there are more than states fit.
    """
    rows, begins = make_rows(80, 3), list(range(9))
    assert [serve(rows, begins + [20 + i] * 30, lambda: limit) for i in range(5)] == found


def test_a_move_takes_the_state_along() -> None:
    rows = make_rows()
    for row in range(3):
        assert rows.admit(3, 2, []) == (row, 0)
        count(rows, row, 0, 3)
        rows.record_prefill(row, 0, 3, [])
    rows.running.states[0][2] = 7.0
    rows.free(0)
    assert rows.move(2, 3) == 0
    assert (rows.running.states[0][0] == 7.0).all()
    assert (rows.running.states[1][0] == 3.0).all()


MODELS = ["random_hybrid_model", "random_delta_model", "random_recurrent_model"]
MODELS += ["random_mamba_model", "random_both_model"]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> RandomModel:
    exported: RandomModel = request.getfixturevalue(request.param)
    return exported


def prefill(runner: OnnxRunner, prompts: list[list[int]]) -> list[Sequence]:
    """Compute prompts in one step, each on a row of its own."""
    sequences = [make_sequence(i, prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        admitted = runner.kv.admit(len(sequence.prompt_ids), 8, [])
        assert admitted is not None
        sequence.rows = [admitted[0]]
    chunks = [Chunk(one, 0, len(one.prompt_ids), 1) for one in sequences]
    runner.run(StepBatch(prefills=chunks))
    for chunk in chunks:
        runner.kv.record_prefill(chunk.row, 0, chunk.end, [])
        chunk.sequence.status, chunk.sequence.n_computed = SequenceStatus.RUNNING, chunk.end
        chunk.sequence.output_ids = [5]
    return sequences


def states(runner: OnnxRunner, row: int) -> Any:
    return runner.kv.running.read_states(row)


def test_padding_and_rows_that_ride_along_move_no_state(model: RandomModel) -> None:
    """Prompts of similar lengths share a run; then every other row decodes."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(300, size=n).tolist() for n in (30, 33, 28, 31)]
    runner = model.runner(max_num_seqs=4)
    crowd = prefill(runner, prompts)
    for i, prompt in enumerate(prompts):
        alone = model.runner(max_num_seqs=1)
        (sequence,) = prefill(alone, [prompt])
        assert np.array_equal(states(runner, i), states(alone, 0))
        before = states(runner, i)
        if i % 2:  # the others ride along
            chunk = Chunk(crowd[i], len(prompt), 1, 1)
            others = [states(runner, j) for j in range(4) if j != i]
            runner.run(StepBatch([chunk], [*crowd]))
            after = [states(runner, j) for j in range(4) if j != i]
            assert np.array_equal(others, after)
            assert not np.array_equal(states(runner, i), before)
            alone.run(StepBatch([Chunk(sequence, len(prompt), 1, 1)], [sequence]))
            assert np.array_equal(states(runner, i), states(alone, 0))


def test_the_state_of_a_served_row_is_that_of_the_network(random_delta_model: RandomModel) -> None:
    """Within what rounding to int8 costs: a state that no token moved is far away."""
    prompt = np.random.default_rng(2).integers(300, size=40).tolist()
    runner = random_delta_model.runner(max_num_seqs=1)
    prefill(runner, [prompt])
    found, decoder = states(runner, 0), random_delta_model.decoder
    with torch.inference_mode():
        x = decoder.embed(torch.tensor([prompt]), torch.arange(40)[None])
        block: Any = decoder.blocks[0]
        empty = block.empty_cache(x, 40)
        _, first = block.recurrence.mix(block.attention_norm(x), empty, torch.tensor([40]))
    expected = np.concatenate([part.numpy().ravel() for part in first])
    error = np.linalg.norm(found[: expected.size] - expected) / np.linalg.norm(expected)
    assert error < 0.05


def readers(graph: onnx.GraphProto, name: str) -> int:
    """The most nodes that read a value in a run, of which a branch is a part."""
    inside = [a.g for node in graph.node for a in node.attribute if a.type == a.GRAPH]
    own = sum(name in node.input for node in graph.node)
    return own + max((readers(branch, name) for branch in inside), default=0)


def test_a_state_has_one_reader(model: RandomModel) -> None:
    """Another one might run when the new state has taken its place."""
    graph = onnx.load(model.graph, load_external_data=False).graph
    names = [value.name for value in graph.input if value.name.startswith("past_states.")]
    assert len(names) == len(model.config.states) * len(model.config.recurrent_layers)
    assert [readers(graph, name) for name in names] == [1] * len(names)


def test_a_graph_of_other_states_than_its_configuration_is_refused(
    random_delta_model: RandomModel,
) -> None:
    """Buffers have the configuration's states."""
    config = random_delta_model.config
    others: list[dict[str, Any]] = [
        {"recurrent_layers": config.attention_layers},
        {"recurrent_layers": (), "recurrence": None},
        {"recurrence": ShortConvolution(kernel=4)},
    ]
    for other in others:
        with pytest.raises(ValueError, match=r"the graph has the states \['past_states"):
            OnnxRunner(random_delta_model.graph, replace(config, **other), max_num_seqs=1)


def test_too_little_memory_for_states_is_refused(random_delta_model: RandomModel) -> None:
    with pytest.raises(ValueError, match="and the states of 3 sequences"):
        random_delta_model.runner(max_num_seqs=3, kv_cache_bytes=20_000)

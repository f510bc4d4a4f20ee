"""Fleets on paper against what can be told without a scheduler."""

from __future__ import annotations

from collections import defaultdict

import pytest

from kvasir.loadtest.fleet import ROUTERS, Mix, StepCosts, simulate

BLOCK, PER_REPLICA = 64, 6
COSTS = StepCosts(step=0.002, stream=0.001, prompt_token=0.0001)


def shares_cached(mix: Mix, router: str, n_replicas: int) -> float:
    """Return the share of prompt tokens whose blocks their replica has seen in earlier turns."""
    seen = defaultdict[int, set[tuple[int, ...]]](set)
    n_cached = n_prompt = 0
    for turn in range(mix.n_turns):
        for conversation in range(PER_REPLICA * n_replicas):
            prompt = mix.prompt(conversation, turn)
            known = seen[ROUTERS[router](n_replicas, conversation, turn)]
            blocks = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
            reusable = blocks[: (len(prompt) - 2) // BLOCK]  # two tokens always run
            n_cached += BLOCK * next(
                (n for n, one in enumerate(reusable) if one not in known), len(reusable)
            )
            n_prompt += len(prompt)
            known.update(blocks)
    return n_cached / n_prompt


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    ("n_replicas", "mix"), [(1, Mix()), (3, Mix()), (2, Mix(n_turns=3, asked=70, answered=3))]
)
def test_prompts_are_cached_where_an_earlier_turn_ran(
    n_replicas: int, mix: Mix, router: str
) -> None:
    hit_rate, _, waits = simulate(mix, router, COSTS, n_replicas, PER_REPLICA, n_blocks=500)
    assert hit_rate == pytest.approx(shares_cached(mix, router, n_replicas), abs=1e-12)
    assert len(waits) == PER_REPLICA * n_replicas * mix.n_turns


def test_a_shared_beginning_is_computed_once_for_each_replica_that_has_conversations_with_it() -> (
    None
):
    mix = Mix(n_turns=1, asked=10, answered=2, beginning=128, n_beginnings=2)
    hit_rate, *_ = simulate(mix, "bound", COSTS, 2, PER_REPLICA, n_blocks=500)
    assert hit_rate == pytest.approx(128 * (PER_REPLICA - 1) / (138 * PER_REPLICA))


def test_a_cache_that_is_too_small_forgets() -> None:
    large, small = (simulate(Mix(), "bound", COSTS, 1, 8, n_blocks=n)[0] for n in (500, 24))
    assert small < large / 2


def test_time_is_the_sum_of_the_steps() -> None:
    """A lone conversation of one turn: its prompt in one step, and a step for each later token."""
    mix = Mix(n_turns=1, asked=100, answered=5)
    _, speed, (wait,) = simulate(mix, "bound", COSTS, 1, 1, n_blocks=100)
    assert wait == pytest.approx(0.002 + 100 * 0.0001)
    assert mix.answered / speed == pytest.approx(wait + 4 * (0.002 + 0.001))

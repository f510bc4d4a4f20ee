"""Whose prompt is computed first; docs/adr/0008-whose-tokens-first.md has the reasons.

Prompts with little work left come first, and every prompt's age counts. Each owner has one prompt
at a time in the race with those of others. One step in four begins with the oldest prompt of all,
so none waits for more than a bounded amount of work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.kv.prefix_cache import BlockCache
from kvasir.server.engine.sequence import Sequence, SequenceStatus, queue_time
from kvasir.server.engine.step_capacity import PromptCost

SECONDS_PER_WORK = 32.0  # of waiting, which offset a second of work left
_MOST_PASSED = 3  # steps in a row that may begin with another prompt than the oldest


class PromptOrder:
    """The order of prompts, which follows from their ages, the work left, and owners' last turns.

    work: seconds that the prompts of n sequences still take, [n].
    """

    def __init__(self, work: Callable[[list[Sequence]], NDArray[np.float64]]) -> None:
        self._work = work
        self._turns: dict[str, float] = {}  # by owner: when its last prompt was completed
        self._n_passed = 0

    def first_to_last(self, prompts: list[Sequence]) -> Iterator[Sequence]:
        """Yield all prompts, those in the background last. `completes` changes what follows.

        Hundreds may wait, of which a step takes a few: keys are arrays, and owners a heap.
        """
        clients = [prompt for prompt in prompts if not prompt.is_background]
        if clients:
            yield from self._clients(clients)
        background = (prompt for prompt in prompts if prompt.is_background)
        yield from sorted(
            background, key=lambda one: (one.status is SequenceStatus.WAITING, one.queue_key)
        )

    def _clients(self, prompts: list[Sequence]) -> Iterator[Sequence]:
        times = np.array([queue_time(prompt.arrived_at, prompt.priority) for prompt in prompts])
        ids = [prompt.id for prompt in prompts]
        keys = (times + SECONDS_PER_WORK * self._work(prompts)).tolist()
        order = np.lexsort((ids, keys)).tolist()
        if self._n_passed >= _MOST_PASSED:
            oldest = min(range(len(prompts)), key=lambda n: prompts[n].queue_key)
            order.remove(oldest)
            yield prompts[oldest]
        lines: dict[str, list[int]] = defaultdict(list)
        for n in reversed(order):
            lines[prompts[n].owner].append(n)

        def place(owner: str) -> tuple[float, int, str]:
            """Return the place of an owner's next prompt, whose age counts since its last turn."""
            n = lines[owner][-1]
            turn = max(0.0, self._turns.get(owner, 0.0) - prompts[n].arrived_at)
            return keys[n] + turn, ids[n], owner

        places = [place(owner) for owner in lines]
        heapify(places)
        while places:
            *_, owner = places[0]
            if (now := place(owner)) > places[0]:  # it had a turn meanwhile
                heapreplace(places, now)
                continue
            yield prompts[lines[owner].pop()]
            if lines[owner]:
                heapreplace(places, place(owner))
            else:
                heappop(places)

    def completes(self, sequence: Sequence, now: float) -> None:
        """Note that a step completes a prompt: its owner's next one is no older than that."""
        if not sequence.is_background:
            self._turns[sequence.owner] = now

    def begins_with(self, sequence: Sequence, oldest: Sequence) -> None:
        """Note which prompt a step begins with, and which is the oldest."""
        self._n_passed = 0 if sequence is oldest else self._n_passed + 1


def tokens_done(sequence: Sequence, block_size: int) -> int:
    """Return how many tokens of a prompt need not be computed.

    What is found in the cache counts before it has been copied, too.
    """
    n_found = 0 if sequence.is_restored else sequence.n_found * block_size
    return max(sequence.n_computed, n_found)


def seconds_left(
    sequences: list[Sequence], cache: BlockCache[Any], cost: PromptCost
) -> NDArray[np.float64]:
    """Estimate the seconds that prompts still take, [n].

    The queue may be long, so only what was cached or dropped since the last time is counted.
    """
    done: list[int] = []
    for sequence in sequences:
        names, n = sequence.block_names, sequence.n_found
        if sequence.status is SequenceStatus.WAITING:
            if n and names[n - 1] not in cache.blocks:
                n = 0
            if n < sequence.n_reusable and names[n] in cache.blocks:
                n += cache.count(sequence.reusable_names[n:])
            sequence.n_found = n
        done.append(tokens_done(sequence, cache.block_size))
    past = np.array(done)
    n_prompt = np.array([len(sequence.prompt_ids) for sequence in sequences])
    return cost.prompt(n_prompt - past, past)

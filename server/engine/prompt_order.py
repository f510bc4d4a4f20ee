"""Whose prompt is computed first; docs/adr/0008-whose-tokens-first.md has the reasons.

Prompts with little work left come first, and every prompt's age counts. Each owner has one prompt
at a time in the race with those of others. One step in four begins with the oldest prompt of all,
so none waits for more than a bounded amount of work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from kvasir.server.engine.sequence import Sequence, SequenceStatus

SECONDS_PER_WORK = 32.0  # of waiting, which offset a second of work left
_MOST_PASSED = 3  # steps in a row that may begin with another prompt than the oldest


class PromptOrder:
    """The order of prompts, which follows from their ages, the work left, and owners' last turns.

    work: seconds that a sequence's prompt still takes.
    """

    def __init__(self, work: Callable[[Sequence], float]) -> None:
        self._work = work
        self._turns: dict[str, float] = {}  # by owner: when its last prompt was completed
        self._n_passed = 0

    def first_to_last(self, prompts: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield all prompts, those in the background last. `completes` changes what follows."""
        clients: dict[Sequence, float] = {}
        background: list[Sequence] = []
        for prompt in prompts:
            if prompt.is_background:
                background.append(prompt)
            else:
                clients[prompt] = prompt.queue_key[0] + SECONDS_PER_WORK * self._work(prompt)
        if clients and self._n_passed >= _MOST_PASSED:
            oldest = min(clients, key=lambda prompt: prompt.queue_key)
            del clients[oldest]
            yield oldest
        lines: dict[str, list[Sequence]] = defaultdict(list)
        for prompt in sorted(clients, key=lambda prompt: (clients[prompt], prompt.id))[::-1]:
            lines[prompt.owner].append(prompt)

        def place(owner: str) -> tuple[float, int]:
            """Return the place of an owner's next prompt, whose age counts since its last turn."""
            prompt = lines[owner][-1]
            turn = max(0.0, self._turns.get(owner, 0.0) - prompt.arrived_at)
            return clients[prompt] + turn, prompt.id

        while lines:
            owner = min(lines, key=place)
            yield lines[owner].pop()
            if not lines[owner]:
                del lines[owner]
        yield from sorted(
            background, key=lambda one: (one.status is SequenceStatus.WAITING, one.queue_key)
        )

    def completes(self, sequence: Sequence, now: float) -> None:
        """Note that a step completes a prompt: its owner's next one is no older than that."""
        if not sequence.is_background:
            self._turns[sequence.owner] = now

    def begins_with(self, sequence: Sequence, prompts: Iterable[Sequence]) -> None:
        """Note which of the prompts a step begins with."""
        oldest = min(prompts, key=lambda prompt: (prompt.is_background, prompt.queue_key))
        self._n_passed = 0 if sequence is oldest else self._n_passed + 1

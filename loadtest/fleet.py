"""A fleet on paper: the real scheduler and prefix cache of each replica, with given step times.

Conversations begin at once, so many for each replica; a turn follows the end of the last answer.
Times of a network, a router and tokenizing are left out.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from kvasir.server.engine.batch import StepBatch
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.scheduler import Scheduler
from kvasir.server.engine.sequence import Sequence
from kvasir.server.engine.step_capacity import StepCapacity

# Each chooses one of n replicas for a turn of a conversation. The first binds a conversation to
# the replica that has the fewest when it begins.
ROUTERS: dict[str, Callable[[int, int, int], int]] = {
    "bound": lambda n, conversation, _: conversation % n,
    "hashed": lambda n, conversation, _: crc32(b"%d" % conversation) % n,
    "round robin": lambda n, conversation, turn: (conversation + turn) % n,
}


class StepCosts(NamedTuple):
    """Seconds of a step, and in addition of each of its streams and of its prompts' tokens."""

    step: float
    stream: float
    prompt_token: float


class Mix(NamedTuple):
    """Conversations: turns of new tokens and an answer, after one of `n_beginnings` beginnings."""

    n_turns: int = 4
    asked: int = 100
    answered: int = 32
    beginning: int = 0
    n_beginnings: int = 1

    def prompt(self, conversation: int, turn: int) -> list[int]:
        """Return the tokens of a turn, with all before it."""
        n_own, draw = self.asked + turn * (self.asked + self.answered), np.random.default_rng
        shared = draw([0, conversation % self.n_beginnings]).integers(400, size=self.beginning)
        return [*shared.tolist(), *draw([1, conversation]).integers(400, size=n_own).tolist()]


def simulate(
    mix: Mix, router: str, costs: StepCosts, n_replicas: int, per_replica: int, n_blocks: int
) -> tuple[float, float, list[float]]:
    """Run `per_replica` conversations for each replica; n_blocks: of its cache, of 64 tokens.

    Returns the share of prompt tokens that was cached, new tokens a second, and the seconds from
    each arrival to the first token.
    """
    shape: dict[str, Any] = {"n_blocks": n_blocks, "block_size": 64, "max_num_seqs": 16}
    shape["max_model_len"] = len(mix.prompt(0, mix.n_turns - 1)) + mix.answered
    replicas = [
        Scheduler(KVBlocks(**shape), StepCapacity(256, None), scoring_chunk_size=2)
        for _ in range(n_replicas)
    ]
    params, order, waits, cached = SamplingParams(max_tokens=mix.answered), count(), [], []
    under_way: dict[int, tuple[StepBatch, float]] = {}  # by replica: its step, and the seconds
    turns = [0] * (per_replica * n_replicas)
    # When, in which order, and a conversation that has a turn or a replica whose step ends.
    events = [(0.0, next(order), True, conversation) for conversation in range(len(turns))]
    while events:
        now, _, is_turn, place = heappop(events)
        if is_turn:
            conversation, turn = place, turns[place]
            prompt, place = mix.prompt(conversation, turn), ROUTERS[router](n_replicas, place, turn)
            replicas[place].add(Sequence(conversation, prompt, params, frozenset(), now))
            if place in under_way:
                continue
        else:
            batch, seconds = under_way.pop(place)
            for chunk in batch.chunks:
                replicas[place].record(chunk, chunk.count)
                sequence = chunk.sequence
                if chunk.end < len(sequence.prompt_ids):
                    continue
                if not sequence.output_ids:
                    waits.append(now - sequence.arrived_at)
                    cached.append((sequence.n_cached, len(sequence.prompt_ids)))
                sequence.output_ids.append(0)
                if len(sequence.output_ids) == mix.answered:
                    replicas[place].finish(sequence)
                    turns[sequence.id] += 1
                    if turns[sequence.id] < mix.n_turns:
                        heappush(events, (now, next(order), True, sequence.id))
            replicas[place].record_step(batch, seconds, 0.0 if batch.prefills else seconds)
        if (batch := replicas[place].schedule(now)).chunks:
            n_tokens = sum(chunk.count for chunk in batch.prefills)
            seconds = costs.step + costs.stream * len(batch.decodes) + costs.prompt_token * n_tokens
            under_way[place] = batch, seconds
            heappush(events, (now + seconds, next(order), False, place))
    hits, asked = np.sum(cached, axis=0)
    return hits / asked, len(turns) * mix.n_turns * mix.answered / now, waits

"""Drive an engine by hand: add, step, collect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvasir.server.engine.batch import StepStats
from kvasir.server.engine.engine import BeamOutput, Engine, TokenOutput
from kvasir.server.engine.sampling.beams import Hypothesis
from kvasir.server.engine.sampling.params import SamplingParams, TokenLogprobs
from kvasir.server.engine.sequence import FinishReason, Sequence


def make_sequence(
    sequence_id: int, prompt_ids: list[int], params: SamplingParams, eos: Iterable[int] = ()
) -> Sequence:
    ending = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | frozenset(eos)
    return Sequence(sequence_id, prompt_ids, params, ending, 0.0)


def sampled_sequence(
    params: SamplingParams, output_ids: Iterable[int] = (), ending_ids: Iterable[int] = ()
) -> Sequence:
    """Return a sequence with so much output, for a sampler without an engine."""
    sequence = Sequence(0, [1, 2, 3], params, frozenset(ending_ids), 0.0)
    sequence.output_ids = list(output_ids)
    return sequence


@dataclass
class Result:
    """Everything that came out for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    hypotheses: list[Hypothesis] = field(default_factory=list)  # of a beam search
    finish_reasons: list[FinishReason] = field(default_factory=list)


class Collector:
    """Results by sequence id."""

    def __init__(self) -> None:
        self.results: dict[int, Result] = defaultdict(Result)

    def take(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            result = self.results[output.sequence_id]
            assert not result.finish_reasons, "an output after the terminal one"
            if output.token_id is not None:
                result.token_ids.append(output.token_id)
                result.logprobs.append(output.logprobs)
            if output.prompt_logprobs is not None:
                assert result.prompt_logprobs is None, "prompt log-probabilities come once"
                result.prompt_logprobs = output.prompt_logprobs
            if isinstance(output, BeamOutput):
                result.hypotheses = output.hypotheses
            if output.finish_reason is not None:
                result.finish_reasons.append(output.finish_reason)


class CountingEngine(Engine):
    """An engine that counts draft tokens and those that were right."""

    n_drafted = n_accepted = 0

    def step(self) -> tuple[list[TokenOutput], StepStats]:
        outputs, stats = super().step()
        self.n_drafted += stats.n_drafted
        self.n_accepted += stats.n_accepted
        return outputs, stats


def run_to_end(engine: Engine, sequences: Iterable[Sequence]) -> dict[int, Result]:
    """Add all at once, step until nothing is left."""
    collector = Collector()
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        collector.take(engine.step()[0])
    return collector.results


def run_at_random(
    engine: Engine,
    sequences: list[Sequence],
    generator: np.random.Generator,
    *,
    n_aborted: int = 0,
    longest_wait: int = 12,
) -> dict[int, Result]:
    """Add all in any order, each some steps after the one before it.

    Some are aborted, up to 30 steps after they were added, if they have not ended.
    """
    collector, steps_left = Collector(), dict[int, int]()
    pending = [sequences[i] for i in generator.permutation(len(sequences))]
    lives = {
        sequences[i].id: int(generator.integers(30))
        for i in generator.permutation(len(sequences))[:n_aborted]
    }
    wait = 0
    while engine.has_work or pending:
        while pending and (wait <= 0 or not engine.has_work):
            sequence = pending.pop()
            engine.add(sequence)
            if sequence.id in lives:
                steps_left[sequence.id] = lives[sequence.id]
            wait = int(generator.integers(longest_wait))
        wait -= 1
        collector.take(engine.step()[0])
        for sequence_id in list(steps_left):
            steps_left[sequence_id] -= 1
            if steps_left[sequence_id] <= 0:
                del steps_left[sequence_id]
                if output := engine.abort(sequence_id):
                    collector.take([output])
    return collector.results


def assert_same(results: dict[int, Result], alone: list[Result]) -> None:
    """Compare with the results of sequences that ran alone; those of aborted ones begin alike."""
    for i, expected in enumerate(alone):
        found = results[i]
        assert len(found.finish_reasons) == 1
        if found.finish_reasons == [FinishReason.ABORT]:
            n_tokens = len(found.token_ids)
            assert found.token_ids == expected.token_ids[:n_tokens]
            assert found.logprobs == expected.logprobs[:n_tokens]
        else:
            assert found == expected

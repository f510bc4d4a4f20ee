"""Drive an engine by hand: add, step, collect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvasir.server.engine.engine import Engine, TokenOutput
from kvasir.server.engine.sampling import SamplingParams, TokenLogprobs
from kvasir.server.engine.sequence import FinishReason, Sequence


def make_sequence(
    sequence_id: int, prompt_ids: list[int], params: SamplingParams, eos: Iterable[int] = ()
) -> Sequence:
    ending = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | frozenset(eos)
    return Sequence(sequence_id, prompt_ids, params, ending, 0.0)


@dataclass
class Result:
    """Everything that came out for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
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
            if output.finish_reason is not None:
                result.finish_reasons.append(output.finish_reason)


def run_to_end(engine: Engine, sequences: Iterable[Sequence]) -> dict[int, Result]:
    """Add all at once, step until nothing is left."""
    collector = Collector()
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        collector.take(engine.step()[0])
    return collector.results

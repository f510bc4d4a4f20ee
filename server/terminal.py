"""One completion in this process, streamed to a terminal: `kvasir generate`."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from model.bundle import ModelBundle
from server.admission import check_length
from server.detokenizer import Detokenizer
from server.engine.engine import Engine
from server.engine.sampling import SamplingParams
from server.engine.sequence import FinishReason, Sequence, SequenceTimes


def generate(engine: Engine, bundle: ModelBundle, prompt: str, params: SamplingParams) -> Iterator[str]:
    """Pieces of the completion as they come. Raises the errors of the door for a prompt that cannot fit."""
    prompt_ids = bundle.tokenizer.encode(prompt).ids
    check_length(len(prompt_ids), params.max_tokens, engine)
    ending_ids = frozenset(bundle.config.eos_token_ids)
    engine.add(Sequence(0, prompt_ids, params, ending_ids, SequenceTimes(perf_counter())))
    text = Detokenizer(bundle.tokenizer, prompt_ids)
    while engine.has_work:
        for output in engine.step()[0]:
            if output.token_id is not None and output.finish_reason is not FinishReason.STOP:
                yield text.push(output.token_id)
    yield text.flush()

"""One completion in this process, token by token, for `kvasir generate`."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

from model.bundle import ModelBundle
from server.engine.engine import Engine
from server.engine.sampling import SamplingParams
from server.engine.sequence import FinishReason, Sequence
from server.text.detokenizer import Detokenizer


class Piece(NamedTuple):
    """The text that a token adds, if any yet. The last piece has a finish reason and no token."""

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None


def complete(
    engine: Engine, bundle: ModelBundle, prompt_ids: list[int], params: SamplingParams
) -> Iterator[Piece]:
    """Yield the pieces of a completion; `check_length` must have accepted the prompt."""
    ending_ids = frozenset(bundle.config.eos_token_ids)
    prefix = list(bundle.config.target_prefix)
    sequence = Sequence(0, prompt_ids, params, ending_ids, perf_counter(), target_prefix=prefix)
    text, reason = Detokenizer(bundle.tokenizer, () if prefix else prompt_ids), None
    engine.add(sequence)
    while engine.has_work:
        for output in engine.step()[0]:
            reason = output.finish_reason
            if output.token_id is not None and reason is not FinishReason.STOP:
                yield Piece(text.push(output.token_id), output.token_id)
    yield Piece(text.flush(), None, reason)

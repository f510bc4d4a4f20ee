"""Beam search without a cache, the oracle of the server's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch

from kvasir.model.network.cross_attention import Source
from kvasir.model.network.transformer import Transformer
from kvasir.model.reference import next_logits


class Hypothesis(NamedTuple):
    """A text that beam search has finished; score: log-probability / length^length_penalty."""

    score: float
    token_ids: list[int]


def beam_search(
    decoder: Transformer,
    source: Source,
    *,
    n_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: Literal[True, False, "never"] = False,
    ending_ids: Collection[int] = (),
) -> list[Hypothesis]:
    """Return the `n_beams` best texts of a source, best first (Sutskever et al. 2014).

    As in transformers 5: each step keeps the best unfinished texts of twice as many candidates,
    and those of the best `n_beams` candidates that end are finished. A text's length counts the
    tokens after the one that starts it. early_stopping: True stops at `n_beams` finished texts;
    False when no unfinished one would be better if it ended now; "never" when none would be better
    at its longest, where that raises scores.
    """
    decoder.eval()
    prefix = list(decoder.config.target_prefix)
    running, finished = [Hypothesis(0.0, [])], list[Hypothesis]()
    for n_tokens in range(1, max_tokens + 1):
        candidates: list[Hypothesis] = []
        for text in running:
            logits = torch.from_numpy(next_logits(decoder, prefix + text.token_ids, source))
            scores, ids = logits.log_softmax(dim=0).topk(n_beams * max(2, 1 + len(ending_ids)))
            candidates += (
                Hypothesis(text.score + score, [*text.token_ids, token_id])
                for score, token_id in zip(scores.tolist(), ids.tolist(), strict=True)
            )
        candidates.sort(key=lambda text: -text.score)
        ended = [n_tokens == max_tokens or text.token_ids[-1] in ending_ids for text in candidates]
        length = n_tokens + len(prefix) - 1
        finished += (
            Hypothesis(text.score / length**length_penalty, text.token_ids)
            for text, ends in zip(candidates[:n_beams], ended, strict=False)
            if ends
        )
        finished = sorted(finished, key=lambda text: -text.score)[:n_beams]
        running = [text for text, ends in zip(candidates, ended, strict=True) if not ends][:n_beams]
        if len(finished) == n_beams and running:
            if early_stopping == "never" and length_penalty > 0.0:
                length = max_tokens + len(prefix) - 1
            best = running[0].score / length**length_penalty
            if early_stopping is True or best <= finished[-1].score:
                break
    return finished

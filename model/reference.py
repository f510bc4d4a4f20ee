"""Plain generation: no cache, no batch, the whole sequence again for every token.

Every faster path is tested against this oracle, so it shares no code with them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.model.network.cross_attention import Source
from kvasir.model.network.transformer import Transformer


class Hypothesis(NamedTuple):
    """A text that beam search has finished; score: log-probability / length^length_penalty."""

    score: float
    token_ids: list[int]


@torch.inference_mode()
def next_logits(
    decoder: Transformer, token_ids: list[int], source: Source | None = None
) -> NDArray[np.float32]:
    """Return the logits [vocab] of the token that follows `token_ids`."""
    input_ids = torch.tensor([token_ids], device=decoder.embedding.weight.device)
    logits: NDArray[np.float32] = decoder(input_ids, source=source)[0, -1].float().cpu().numpy()
    return logits


def generate(
    decoder: Transformer,
    prompt_ids: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    sample_index: int = 0,
    ending_ids: Collection[int] = (),
    source: Source | None = None,
) -> list[int]:
    """Return the new token ids, the ending one included; temperature 0 takes the likeliest.

    A decoder with an encoder needs the source, and its target_prefix as the prompt.
    """
    decoder.eval()
    key = np.array([seed, sample_index], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    output_ids: list[int] = []
    while len(output_ids) < max_tokens:
        logits = next_logits(decoder, prompt_ids + output_ids, source)
        if temperature == 0.0:
            token_id = int(logits.argmax())
        else:
            token_id = draw(logits, temperature, top_k, top_p, uniform=generator.random())
        output_ids.append(token_id)
        if token_id in ending_ids:
            break
    return output_ids


def draw(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, uniform: float
) -> int:
    """Return the token at which the cumulative probability, in order of ids, exceeds `uniform`."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[:top_k] if top_k else order
    probabilities = np.exp(scaled[kept] - scaled.max())
    probabilities /= probabilities.sum()
    if top_p < 1.0:
        n_nucleus = int((np.cumsum(probabilities) < top_p).sum()) + 1
        kept, probabilities = kept[:n_nucleus], probabilities[:n_nucleus]
        probabilities /= probabilities.sum()
    by_id = np.argsort(kept)
    place = int(np.searchsorted(probabilities[by_id].cumsum(), uniform, side="right"))
    return int(kept[by_id][min(place, len(kept) - 1)])


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

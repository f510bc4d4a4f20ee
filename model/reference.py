"""Plain generation: no cache, no batch, the whole sequence again for every token.

Every faster path is tested against this oracle, so it shares no code with them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.model.network.cross_attention import Source
from kvasir.model.network.transformer import Transformer


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

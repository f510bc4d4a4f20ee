"""Queries and keys of whole texts, of which neither has channels many times the others.

Our own operators round each head of both with one scale (kernels). Scores stay what they are if
what is divided by a factor in queries is multiplied by it in keys. Keys that are cached have scales
of their own instead (export.rounding.kv_cache).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kvasir.export.rounding.activations import Activations
from kvasir.export.rounding.formulas import SMALLEST_SCALE
from kvasir.export.rounding.kv_cache import lengths_of_pairs
from kvasir.export.rounding.places import Factors
from kvasir.model.config import TransformerConfig


def balance_keys(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    activations: Activations,
    prefix: str = "",
) -> Iterator[tuple[str, Factors]]:
    """Yield what parameters are multiplied by, so that queries and keys are equally large.

    prefix: begins the names of the network's blocks.
    """
    if config.latents is not None or config.qkv_clip is not None:
        return
    heads = [config.n_head, config.n_kv_head]
    for layer in config.attention_layers:
        attention = f"{prefix}blocks.{layer}.attention"
        qkv = f"{attention}.qkv"
        if config.norms_heads(layer):
            norms = [f"{attention}.{kind}_norm" for kind in ("query", "key")]
            sizes = [weights[f"{norm}.weight"].float().abs() for norm in norms]
        else:
            x, _ = activations.tokens(f"{qkv}.weight")
            made = x @ weights[f"{qkv}.weight"].float().t()
            if config.qkv_bias:
                made = made + weights[f"{qkv}.bias"].float()
            of_heads = made.square().mean(dim=0).sqrt().view(-1, config.head_dim)
            sizes = list(of_heads[: sum(heads)].split(heads))
        query, key = (lengths_of_pairs(config, layer, size) for size in sizes)
        query = query.unflatten(0, (config.n_kv_head, -1)).amax(dim=1)
        logs = [size.clamp(min=SMALLEST_SCALE).log2() for size in (query, key)]
        of_keys = ((logs[0] - logs[1]) / 2.0).round().exp2()  # [n_kv_head, head_dim]
        of_queries = of_keys.reciprocal().repeat_interleave(config.n_groups, dim=0)
        if config.norms_heads(layer):
            kinds = ("weight", "bias")[: 1 + config.has_head_norm_bias]
            for norm, factors in zip(norms, (of_queries, of_keys), strict=True):
                yield from ((f"{norm}.{kind}", factors.numpy()) for kind in kinds)
            continue
        rows = torch.cat((of_queries, of_keys, torch.ones_like(of_keys))).ravel().numpy()
        yield f"{qkv}.weight", rows[:, None]
        if config.qkv_bias:
            yield f"{qkv}.bias", rows

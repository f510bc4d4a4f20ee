"""The order of heads and of their channels in published checkpoints, made ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.importing.tensors import Source
from kvasir.model.tensor_files import Shape


def interleaved_by_head(module: str) -> Source:
    """Return the source of rows in which a key and value head follow the queries that share them.

    Without sharing they are each head's query, key and value.
    """

    def join(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        groups = tensors[0].unflatten(0, (config.n_kv_head, config.n_groups + 2, config.head_dim))
        parts = groups.split([config.n_groups, 1, 1], dim=1)
        return torch.cat([part.flatten(0, 2) for part in parts])

    return Source((module,), join=join)


def in_blocks(module: str, count: int, order: str) -> Source:
    """Return the source of rows in blocks, each with as many heads of q, k and v in some order."""

    def join(tensors: list[Tensor], _: TransformerConfig) -> Tensor:
        parts = tensors[0].unflatten(0, (count, 3, -1)).unbind(1)
        return torch.cat([parts[order.index(part)].flatten(0, 1) for part in "qkv"])

    return Source((module,), join=join)


def _reordered(source: Source, order: Callable[[TransformerConfig], Tensor]) -> Source:
    """Return the source of queries, keys and values, of which the first two's channels move.

    order: returns the channel of the file for each of ours, [head_dim].
    """

    def join(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        qkv = source.join(tensors, config)
        heads, values = qkv.tensor_split([(config.n_head + config.n_kv_head) * config.head_dim])
        heads = heads.unflatten(0, (-1, config.head_dim))[:, order(config)]
        return torch.cat((heads.flatten(0, 1), values))

    return replace(source, join=join)


def _pairs_first(config: TransformerConfig) -> Tensor:
    rotary_dim = config.rotary_dim or config.head_dim
    channels = torch.arange(config.head_dim)
    channels[:rotary_dim] = channels[:rotary_dim].view(-1, 2).t().flatten()
    return channels


def pairs_apart(source: Source) -> Source:
    """Return the source of queries, keys and values that rotate pairs of channels (2i, 2i + 1).

    The pairs become (i, i + rotary_dim / 2), as other published decoders have them.
    """
    return _reordered(source, _pairs_first)


def last_pairs_apart(source: Source, n_heads: str) -> Source:
    """Return the source of rows whose last rotary_dim channels of each head are pairs (2i, 2i + 1).

    n_heads: the field of the configuration with the number of heads.
    """

    def join(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        heads = source.join(tensors, config).unflatten(0, (getattr(config, n_heads), -1))
        n_turned = config.rotary_dim or 0
        channels = torch.arange(heads.shape[1])
        channels[-n_turned:] = channels[-n_turned:].view(-1, 2).t().flatten()
        rows: Tensor = heads[:, channels].flatten(0, 1)
        return rows

    return replace(source, join=join)


def of_latents(module: str, *, values: bool) -> Source:
    """Return the source of what makes keys, or values, of latents: rows [key, value] by head."""

    def widths(config: TransformerConfig) -> tuple[int, int]:
        assert config.latents is not None
        return config.latents.key_dim, config.latents.value_dim

    def shapes(_: Shape, config: TransformerConfig) -> list[Shape]:
        assert config.latents is not None
        return [(config.n_head * sum(widths(config)), config.latents.rank)]

    def join(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        heads = tensors[0].unflatten(0, (config.n_head, -1))
        parts: tuple[Tensor, ...] = heads.split(widths(config), dim=1)
        return parts[1].transpose(1, 2) if values else parts[0]

    return Source((module,), shapes, join)


def pairs_of_norm(module: str) -> Source:
    """Return the source of a norm over each head, of queries or keys that `pairs_apart` moves."""

    def join(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        return tensors[0][..., _pairs_first(config)]

    return Source((module,), join=join)


def turned_back(source: Source) -> Source:
    """Return the source of queries, keys and values that turn the other way: in swapped halves."""
    return _reordered(source, lambda c: torch.arange(c.head_dim).roll(c.head_dim // 2))


def repeated_for_heads(place: str | Source) -> Source:
    """Return the source of a norm over head_dim whose weight all heads share."""
    source = Source((place,)) if isinstance(place, str) else place
    return replace(source, shapes=lambda shape, _: [shape[1:]])


def split_by_head(module: str) -> Source:
    """Return the source of a norm over all heads together."""
    return Source(
        (module,),
        lambda shape, _: [(shape[0] * shape[1],)],
        lambda tensors, config: tensors[0].unflatten(0, (-1, config.head_dim)),
    )


def reorder_rotary_pairs(made: Tensor, config: TransformerConfig, *, of_norm: bool) -> Tensor:
    """Return queries and keys of qkv [(n_head + 2 n_kv_head) · head_dim, …] in our rotary order.

    Or, of_norm, what norms of their heads have [..., head_dim]. We pair channels (i, i + head_dim /
    2), and rotate the first rotary_dim / 2 pairs. Published decoders that rotate a part of a head
    pair (i, i + rotary_dim / 2) and leave the rest as it is.
    """
    if config.rotary_dim is None or made.dim() == 0:
        return made
    channels = torch.arange(config.head_dim)
    rotated, rest = (part.chunk(2) for part in channels.tensor_split([config.rotary_dim]))
    order = torch.cat((rotated[0], rest[0], rotated[1], rest[1]))
    if of_norm:
        return made[..., order]
    n_heads = config.n_head + config.n_kv_head
    rows = torch.arange(n_heads)[:, None] * config.head_dim + order
    values = torch.arange(n_heads * config.head_dim, made.shape[0])
    return made[torch.cat((rows.flatten(), values))]

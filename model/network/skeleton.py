"""Decoders whose weights have shapes and no values: they take address space, and no memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.configuration.recurrences import least_weights_of
from kvasir.model.network.block import Block
from kvasir.model.network.recurrent.lstm import LstmMixer
from kvasir.model.network.transformer import Transformer


class _Uninitialised(TorchFunctionMode):
    """A mode without random initialisation: memory of weights is reserved and never touched.

    The meta device reserves nothing, but loads 80 MB of torch with its first random number.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in {"normal_", "uniform_", "kaiming_uniform_"}:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def make_skeleton(config: TransformerConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """Make a decoder in evaluation mode, whose matrices are to be filled or only to be traced."""
    with _Uninitialised():
        decoder = Transformer(config).eval()
    if dtype != torch.float32:
        for parameter in decoder.parameters():  # conversion would read and write their memory
            parameter.data = torch.empty(parameter.shape, dtype=dtype)
    return decoder.to(dtype)  # tables of positions


def make_block(config: TransformerConfig, layer: int) -> Block:
    """Make one block of such a decoder."""
    with _Uninitialised():
        return Block(config, layer).eval()


def make_target_skeleton(config: TransformerConfig) -> Transformer:
    """Make a decoder without its encoder, and without what makes keys and values of sources."""
    decoder = make_skeleton(config)
    decoder.encoder = None
    for block in decoder.blocks:
        assert isinstance(block, Block)
        if block.cross_attention is not None:
            del block.cross_attention.key_value
        if isinstance(block.recurrence, LstmMixer):
            block.recurrence.start = None
    return decoder


def check_size(config: TransformerConfig, n_numbers: int) -> None:
    """Raise ConfigError if `n_numbers` are too few for the weights, before memory is taken."""
    if (least := _least_weights(config)) > n_numbers:
        raise ConfigError(
            f"a model of this shape has at least {least:,} weights, and there are {n_numbers:,}; "
            "copy the files again"
        )


def _least_weights(config: TransformerConfig) -> int:
    without = {*config.layers_without_feed_forward}
    n_fed = config.n_layer - len(without)
    n_dense = n_fed if config.n_experts is None else len({*config.dense_layers} - without)
    n_mixtures = n_fed - n_dense
    widths = config.d_ff * n_dense
    of_experts = (config.n_experts or 0) * (config.d_expert or 0) + (config.d_shared_expert or 0)
    widths += of_experts * n_mixtures
    latents = config.latents
    per_head = 2 * config.head_dim if latents is None else latents.value_dim
    matrices = 2 * widths + config.n_head * per_head * config.n_attention_layer
    rows = config.vocab_size + config.max_model_len * config.has_learned_positions
    least = (matrices + rows) * config.d_model
    if config.recurrence is not None:
        each = least_weights_of(config.recurrence, config.d_model)
        least += each * len(config.recurrent_layers)
    if config.has_relative_bias:
        least += config.relative_buckets * config.n_head
    if config.encoder is None:
        return least
    shared = config.vocab_size * config.d_model * config.shared_embedding
    return least + _least_weights(config.encoder) - shared


def count_parameters(config: TransformerConfig) -> int:
    """Return the number of a decoder's parameters, tied ones counted once."""
    return sum(map(math.prod, parameter_shapes(config).values()))


def build_decoder(config: TransformerConfig, weights: Mapping[str, Tensor]) -> Transformer:
    """Return the decoder of these weights, by the names of its parameters, in float32."""
    decoder = make_skeleton(config)
    for name, tensor in decoder.state_dict().items():
        tensor.copy_(weights[name])
    return decoder


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a decoder by name."""
    if not config.has_learned_positions:  # only learned positions are parameters
        config = replace(config, max_model_len=2)
    skeleton = make_skeleton(config)
    return {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}

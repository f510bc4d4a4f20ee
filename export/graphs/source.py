"""The encoder of an encoder-decoder → ONNX for the CPU: one graph over packed sources.

Inputs are PACKED_INPUTS. Outputs are what the decoder may read of each token: source_key_values, of
its cross-attention, float [tokens, 2 · n_layer, n_kv_head, head_dim], where block 2 i is keys of
layer i, 2 i + 1 its values; and start_states, with which its LSTM layers begin after a source's
first token, float [tokens, n_layer · 2 · width].
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from kvasir.export.graphs.decoder import load_weights
from kvasir.export.graphs.encoder import PackedGraph, export_packed
from kvasir.export.rounding.weights import Weights
from kvasir.model.adapters.layout import Layer, Layout, Part
from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import Lstm
from kvasir.model.directory import ENCODER_GRAPH_FILE
from kvasir.model.network.skeleton import make_skeleton
from kvasir.model.network.transformer import Transformer
from kvasir.model.packing import SOURCE_OUTPUT, START_OUTPUT
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.tensor_files import LazyWeights

# The modules that make an output for all layers, and their parts, as the decoder has them.
_OF_LAYER = {
    SOURCE_OUTPUT: "blocks.{}.cross_attention.key_value.{}",
    START_OUTPUT: "blocks.{}.recurrence.start.{}",
}


class SourceGraph(PackedGraph):
    """An encoder, and what makes the outputs of these shapes [tokens, …]."""

    def __init__(self, network: Transformer, outputs: dict[str, list[int | str]]) -> None:
        super().__init__(network)
        self.outputs = outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        hidden = self.hidden(*tensors)
        return tuple(
            self.network.get_submodule(name)(hidden).view(-1, *map(int, sizes))
            for name, (_, *sizes) in self.outputs.items()
        )


def export_source_graph(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    path: Path,
    precision: str = "fp32",
    progress: Progress = no_progress,
) -> None:
    """Write the graph as `export_encoder_graph` does; weights: of the whole network."""
    assert config.encoder is not None
    network, read = make_skeleton(config.encoder), Weights(encoder_weights(config, weights))
    outputs: dict[str, list[int | str]] = {}
    if n_layer := config.n_source_layer:
        outputs[SOURCE_OUTPUT] = ["tokens", 2 * n_layer, config.n_kv_head, config.head_dim]
    if isinstance(config.recurrence, Lstm):
        outputs[START_OUTPUT] = ["tokens", config.n_layer * 2 * config.recurrence.width]
    for name, (_, *sizes) in outputs.items():
        bias, width = name == START_OUTPUT or config.qkv_bias, math.prod(map(int, sizes))
        made = nn.utils.skip_init(nn.Linear, config.encoder.d_model, width, bias=bias)
        network.add_module(name, made)
    export_packed(SourceGraph(network, outputs), read, outputs, path, precision, progress)


def encoder_weights(
    config: TransformerConfig, weights: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the encoder's parameters by its own names, and of its outputs', read lazily."""

    def stack(name: str) -> Tensor:
        return torch.cat([weights[name.format(i)] for i in range(config.n_layer)])

    own = {name: name.removeprefix("encoder.") for name in weights if name.startswith("encoder.")}
    if config.shared_embedding:
        own["embedding.weight"] = "embedding.weight"
    makers = {name: partial(weights.__getitem__, stored) for stored, name in own.items()}
    for output, part in _OF_LAYER.items():
        for kind in ("weight", "bias"):
            name = part.format("{}", kind)
            if name.format(0) in weights:
                makers[f"{output}.{kind}"] = partial(stack, name)
    return LazyWeights(makers)


def join_layers(layout: Layout) -> Layout:
    """Return a layout of an encoder-decoder, with what makes an output for all layers as one."""
    layers = dict(layout.layers)
    for output, part in _OF_LAYER.items():
        of_layer = re.compile(re.escape(part.format("N", "weight")).replace("N", r"\d+"))
        made = [layers.pop(name) for name in layout.layers if of_layer.fullmatch(name)]
        if not made:
            continue
        first, parts = 0, list[Part]()
        for layer in made:
            parts += [replace(one, first=first + one.first) for one in layer.parts]
            first += len(layer.outputs)
        outputs = np.concatenate([layer.outputs for layer in made])
        # What smooths sources is the same for all.
        layers[f"encoder.{output}.weight"] = Layer(tuple(parts), outputs, made[0].inputs)
    return replace(layout, layers=layers)


def load_both_weights(config: TransformerConfig, path: Path) -> Mapping[str, Tensor]:
    """Return the parameters of an fp32 decoder's graph and the encoder's beside it, read lazily."""
    assert config.encoder is not None
    decoder = load_weights(config, path)
    encoder = load_weights(config.encoder, path.with_name(ENCODER_GRAPH_FILE))

    def part(name: str, layer: int) -> Tensor:
        return encoder[name].chunk(config.n_layer)[layer]

    makers = {name: partial(decoder.__getitem__, name) for name in decoder}
    for name in encoder:
        module, _, kind = name.rpartition(".")
        if module in _OF_LAYER:
            for layer in range(config.n_layer):
                makers[_OF_LAYER[module].format(layer, kind)] = partial(part, name, layer)
        elif not config.shared_embedding or module != "embedding":
            makers[f"encoder.{name}"] = partial(encoder.__getitem__, name)
    return LazyWeights(makers)

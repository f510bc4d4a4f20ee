"""The encoder of an encoder-decoder → ONNX for the CPU: one graph over packed sources.

Inputs are PACKED_INPUTS. The output is what the decoder's cross-attention reads of each token,
float [tokens, 2 · n_layer, n_kv_head, head_dim]: block 2 i is keys of layer i, 2 i + 1 its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from kvasir.export.graphs.decoder import load_weights
from kvasir.export.graphs.encoder import PackedGraph, export_packed
from kvasir.export.rounding.weights import Weights
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import ENCODER_GRAPH_FILE
from kvasir.model.network.skeleton import make_skeleton
from kvasir.model.network.transformer import Transformer
from kvasir.model.packing import SOURCE_OUTPUT
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.tensor_files import LazyWeights

_MADE = "source_key_values"  # the module that makes keys and values of all layers
_OF_LAYER = "blocks.{}.cross_attention.key_value.{}"  # its part, as the decoder has it


class SourceGraph(PackedGraph):
    """An encoder, and what makes keys and values."""

    def __init__(self, network: Transformer, decoder: TransformerConfig) -> None:
        super().__init__(network)
        self.shape = (2 * decoder.n_layer, decoder.n_kv_head, decoder.head_dim)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return keys and values of all layers."""
        made: Tensor = self.network.get_submodule(_MADE)(self.hidden(*tensors))
        return made.view(-1, *self.shape)


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
    width = 2 * config.n_layer * config.n_kv_head * config.head_dim
    made = nn.utils.skip_init(nn.Linear, config.encoder.d_model, width, bias=config.qkv_bias)
    network.add_module(_MADE, made)
    graph = SourceGraph(network, config)
    outputs: dict[str, list[int | str]] = {SOURCE_OUTPUT: ["tokens", *graph.shape]}
    export_packed(graph, read, outputs, path, precision, progress)


def encoder_weights(
    config: TransformerConfig, weights: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the encoder's parameters by its own names, and of `source_key_values`, read lazily."""

    def stack(kind: str) -> Tensor:
        return torch.cat([weights[_OF_LAYER.format(i, kind)] for i in range(config.n_layer)])

    own = {name: name.removeprefix("encoder.") for name in weights if name.startswith("encoder.")}
    if config.shared_embedding:
        own["embedding.weight"] = "embedding.weight"
    makers = {name: partial(weights.__getitem__, stored) for stored, name in own.items()}
    kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
    return LazyWeights(makers | {f"{_MADE}.{kind}": partial(stack, kind) for kind in kinds})


def load_both_weights(config: TransformerConfig, path: Path) -> Mapping[str, Tensor]:
    """Return the parameters of an fp32 decoder's graph and the encoder's beside it, read lazily."""
    assert config.encoder is not None
    decoder = load_weights(config, path)
    encoder = load_weights(config.encoder, path.with_name(ENCODER_GRAPH_FILE))

    def part(kind: str, layer: int) -> Tensor:
        return encoder[f"{_MADE}.{kind}"].chunk(config.n_layer)[layer]

    makers = {name: partial(decoder.__getitem__, name) for name in decoder}
    for name in encoder:
        module, _, kind = name.rpartition(".")
        if module == _MADE:
            for layer in range(config.n_layer):
                makers[_OF_LAYER.format(layer, kind)] = partial(part, kind, layer)
        elif not config.shared_embedding or module != "embedding":
            makers[f"encoder.{name}"] = partial(encoder.__getitem__, name)
    return LazyWeights(makers)

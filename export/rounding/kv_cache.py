"""int8 keys and values for running sequences, as a pass over the exported graph.

Decoding reads every key and value of every sequence for each token: a quarter of the bytes is a
shorter step. A prompt, computed many tokens at a time and read little, stays on rows of floats. So
each attention becomes If(decode): attention over int8 rows; else: over rows of floats; both kinds
are aliased as before. Where prompts of int4 have int8 weights, branches hold whole layers.

The int8 scale is 1, because each channel's scale is folded into the weights: those that make keys
and values are divided by a 127th of the channel's largest magnitude in a sample of tokens, and
those of queries and of attention's output are multiplied by as much. Magnitudes beyond the
sample's are clipped. A pair of a key's channels that turns after it is divided counts as a whole:
they trade places as positions grow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.export.rewrite import PROMPT, constant, copy_node
from kvasir.export.rounding.quantize import products
from kvasir.export.rounding.weights import Weights
from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.parts import Latents
from kvasir.model.directory import DECODE_INPUT
from kvasir.model.network.attention import LayerCache

_SMALLEST_SCALE = 1e-8  # for a channel of zeros
_LAYER = re.compile(r"blocks\.\d+\.")  # begins the names of its parameters
_ATTENTION = "GroupQueryAttention"
_N_INPUTS = 14  # of GroupQueryAttention; the last two are the scales of keys and values

Floats = NDArray[np.float32]


class KVScales:
    """The worth of an int8 step of each channel's keys and values, from all that are observed."""

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config
        # Channels before those of which pairs are turned.
        self._n_still = 0 if config.latents is None else config.latents.rank
        self._largest = torch.zeros(config.n_layer, 2, config.n_kv_head, config.head_dim)

    def observe(self, layer: int, _: int, cache: LayerCache) -> None:
        """Take a row's keys and values [n_kv_head, tokens, head_dim] into account."""
        keys, values = cache
        still, rest = keys.tensor_split([self._n_still], dim=-1)
        keys = torch.cat((still, lengths_of_pairs(self._config, layer, rest)), dim=-1)
        if self._n_still:  # the cache has one of both
            values = keys
        # A NaN or an infinity is for verification to find.
        magnitudes = [rows.abs().nan_to_num(0.0, 0.0).amax(dim=1) for rows in (keys, values)]
        largest = torch.maximum(self._largest[layer], torch.stack(magnitudes).cpu())
        self._largest[layer] = largest

    def steps(self) -> Floats:
        """Return float [2 * n_layer, n_kv_head, head_dim], each layer's keys, then values."""
        steps = (self._largest.flatten(0, 1) / 127.0).clamp(min=_SMALLEST_SCALE)
        return steps.numpy().astype(np.float32)


def lengths_of_pairs(config: TransformerConfig, layer: int, heads: Tensor) -> Tensor:
    """Return sizes [..., head_dim] of a layer's queries or keys, which turning does not change.

    Both channels of a pair that turns after factors apply have sqrt(x_c² + x_c'²).
    """
    if not config.rotates(layer) or config.qk_norm_after_rotary:
        return heads.abs()
    halves = heads.abs().chunk(2, dim=-1)
    lengths, n_pairs = torch.hypot(*halves), (config.rotary_dim or config.head_dim) // 2
    turns = torch.arange(lengths.shape[-1], device=heads.device) < n_pairs
    return torch.cat([torch.where(turns, lengths, half) for half in halves], dim=-1)


def scale_kv_channels(weights: Weights, config: TransformerConfig, scales: Floats) -> None:
    """Divide keys and values by their scales, and multiply what meets them: logits stay equal."""
    for layer in config.attention_layers:
        keys, values = scales[2 * layer : 2 * layer + 2]  # [n_kv_head, head_dim]
        by_query, by_output = (steps.repeat(config.n_groups, axis=0) for steps in (keys, values))
        prefix = f"blocks.{layer}.attention"
        if config.latents is not None:
            _scale_latents(weights, config, config.latents, keys[0], prefix)
            continue
        if config.norms_heads(layer) and config.qkv_clip is None:
            for kind in ("weight", "bias")[: 2 if config.has_head_norm_bias else 1]:
                weights.scale(f"{prefix}.query_norm.{kind}", by_query)
                weights.scale(f"{prefix}.key_norm.{kind}", 1 / keys)
            keys, by_query = np.ones_like(keys), np.ones_like(by_query)
        factors = np.concatenate([by_query.ravel(), 1 / keys.ravel(), 1 / values.ravel()])
        if config.qkv_clip is not None:
            weights.scale(f"{prefix}.clip.weight", factors)
        else:
            weights.scale(f"{prefix}.qkv.weight", factors[:, None])
            if config.qkv_bias:
                weights.scale(f"{prefix}.qkv.bias", factors)
        weights.scale(f"{prefix}.output.weight", by_output.reshape(1, -1))


def _scale_latents(
    weights: Weights, config: TransformerConfig, latents: Latents, steps: Floats, prefix: str
) -> None:
    """Divide a layer's latents and turned channels by steps [head_dim], as `scale_kv_channels`."""
    of_latent, of_turned = steps[: latents.rank], steps[latents.rank :]
    weights.scale(f"{prefix}.latent_norm.weight", np.reciprocal(of_latent))
    weights.scale(f"{prefix}.key_up.weight", of_latent[None, None])
    weights.scale(f"{prefix}.value_up.weight", of_latent[None, :, None])
    rows = np.concatenate([np.ones_like(of_latent), 1 / of_turned])
    weights.scale(f"{prefix}.latent.weight", rows[:, None])
    of_head = np.concatenate([np.ones(latents.key_dim, dtype=np.float32), of_turned])
    weights.scale(f"{prefix}.query.weight", np.tile(of_head, config.n_head)[:, None])


def quantize_kv_cache(model: ir.Model, config: TransformerConfig, *, whole_layers: bool) -> None:
    """Give every attention int8 rows beside its rows of floats, in place.

    whole_layers: each `If` holds a layer, so that its products can differ too, and not attention
    alone; recurrent layers get one then.
    """
    graph = model.graph
    decode = ir.val(DECODE_INPUT, ir.DataType.BOOL, [])
    graph.inputs.append(decode)
    scale = constant(graph, "kv_cache.step", np.ones(1, dtype=np.float32))
    layers: Sequence[int] = config.attention_layers
    parts = [[node] for node in graph if node.op_type == _ATTENTION]
    if whole_layers:
        layers, parts = range(config.n_layer), _layers(graph)
    for layer, part in zip(layers, parts, strict=True):
        attention = next((node for node in part if node.op_type == _ATTENTION), None)
        inputs, in_floats = list[ir.Value | None](), list[ir.Value | None]()
        if attention is not None:
            inputs += attention.inputs
            inputs += [None] * (_N_INPUTS - len(inputs))
            in_floats += inputs
            for position, kind in ((3, "key"), (4, "value")):
                running, name = inputs[position], f"prompt_key_values.{layer}.{kind}"
                assert running is not None
                in_floats[position] = floats = ir.val(name, ir.DataType.FLOAT, running.shape)
                graph.inputs.append(floats)
                running.type = ir.TensorType(ir.DataType.INT8)
            inputs[-2:] = [scale, scale]
        rows = [] if attention is None else attention.outputs[1:]
        made = [value for inner in part for value in inner.outputs if value not in rows]
        read = [
            value
            for value in made
            if value.is_graph_output() or any(user not in part for user, _ in value.uses())
        ]
        branches = {
            "then_branch": _branch(part, attention, inputs, read, config, f"decode.{layer}"),
            "else_branch": _branch(part, attention, in_floats, read, config, f"{PROMPT}{layer}"),
        }
        old = [*read, *rows]
        choice = ir.node("If", [decode], attributes=branches, num_outputs=len(old) + len(rows))
        graph.insert_before(part[0], choice)
        new, in_prompts = choice.outputs[: len(old)], choice.outputs[len(old) :]
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        for before, after in zip(old, new, strict=True):
            after.name, after.shape, after.type = before.name, before.shape, before.type
        for before, after in zip(rows, in_prompts, strict=True):
            after.name, after.shape, after.type = f"prompt_{before.name}", before.shape, before.type
            graph.outputs.append(after)
        for running in new[len(read) :]:
            running.type = ir.TensorType(ir.DataType.INT8)
        graph.remove(part, safe=True)


def _layers(graph: ir.Graph) -> list[list[ir.Node]]:
    """Return each layer's nodes from its first product to its last one.

    Mixtures of experts follow it: they are outside, so that prompts and decoding share them.
    """
    nodes, layers = list(graph), dict[str, list[int]]()
    places = {node: i for i, node in enumerate(nodes)}
    for node in products(graph):
        if (weight := node.inputs[1]) and (match := _LAYER.match(str(weight.name))):
            layers.setdefault(match[0], []).append(places[node])
    return [nodes[min(found) : max(found) + 1] for found in layers.values()]


def _branch(
    part: Sequence[ir.Node],
    attention: ir.Node | None,
    inputs: Sequence[ir.Value | None],
    read: Sequence[ir.Value],
    config: TransformerConfig,
    name: str,
) -> ir.Graph:
    """Return nodes of which attention has other inputs.

    Outputs are the values that are read elsewhere, int8 rows, and float rows; others empty.
    """
    decodes = not name.startswith(PROMPT)
    nodes: list[ir.Node] = []
    copies: dict[ir.Value | None, ir.Value] = {}
    for node in part:
        given = inputs if node is attention else node.inputs
        nodes.append(copy_node(node, [copies.get(value, value) for value in given]))
        copies |= zip(node.outputs, nodes[-1].outputs, strict=True)
        if node is attention and decodes:
            nodes[-1].attributes.add(ir.AttrString("k_quant_type", "PER_TENSOR"))
            nodes[-1].attributes.add(ir.AttrString("v_quant_type", "PER_TENSOR"))
            nodes[-1].attributes.add(ir.AttrInt64("kv_cache_bit_width", 8))
    rows = [] if attention is None else [copies[value] for value in attention.outputs[1:]]
    shape, dtype = (1, config.n_kv_head, 0, config.head_dim), np.float32 if decodes else np.int8
    nothing = ir.tensor(np.zeros(shape, dtype=dtype))
    constants = [ir.node("Constant", [], attributes={"value": nothing}) for _ in rows]
    empty = [constant.outputs[0] for constant in constants]
    outputs = [copies[value] for value in read] + (rows + empty if decodes else empty + rows)
    kinds = [ir.DataType.INT8] * len(rows) + [ir.DataType.FLOAT] * len(rows)
    types = [value.type for value in read] + [ir.TensorType(kind) for kind in kinds]
    for output, kind in zip(outputs, types, strict=True):
        output.type = kind
    return ir.Graph([], outputs, nodes=[*nodes, *constants], name=name)

"""PyTorch → ONNX: `Transformer.step` as a graph, with our own names of tensors and dimensions.

Of layers that are alike one is traced, and its nodes are repeated: `Block.step` marks where a layer
begins and ends.
"""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from kvasir.export.rewrite import copy_node, lazy_constant, remove_unused_constants
from kvasir.export.rounding.weights import TRANSPOSED, Weights
from kvasir.model.directory import cache_names, present_name
from kvasir.model.network.attention import LayerCache
from kvasir.model.network.block import LAYER_MARK, Block, Cache
from kvasir.model.network.cross_attention import SourceRows
from kvasir.model.network.run_inputs import CachedInputs
from kvasir.model.network.transformer import Transformer

OPSET = 23  # the first with RMSNormalization
# Sizes of free dimensions in the example that is traced; a size of 1 would become a constant.
_EXAMPLE = {"batch": 2, "sequence": 3, "n_positions": 4, "rows": 2}
_EXAMPLE |= {
    "n_source_positions": 6,
    "tokens": 5,
    "texts": 2,
    "batch + 1": 3,
    "blocks": 3,
    "num_blocks": 3,
}

# Of the name of a parameter, or of an input or output of the graph: its layer.
_LAYER = re.compile(
    r"((?:^|\.)blocks\.|^(?:past|source)_key_values\.|^present\.|^(?:past|present)_states\.)"
    r"(\d+)(?=\.)"
)

# A tensor's type and dimensions; those with names are free.
TensorSpec = tuple[torch.dtype, Sequence[int | str]]

# The inputs of a decoder with an encoder beside keys and values of sources, as `SourceRows` has
# them.
SOURCE_INPUTS: dict[str, TensorSpec] = {
    "source_seqlens_k": (torch.int32, ["batch"]),
    "source_total_length": (torch.int32, []),
}


class StepGraph(nn.Module):
    """`Transformer.step` with tensors as arguments: the inputs by name, then what layers keep.

    Keys and values of sources come last.
    """

    def __init__(
        self, decoder: Transformer, make_inputs: Callable[..., CachedInputs], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.decoder, self.make_inputs, self.names = decoder, make_inputs, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return float32 logits and what each layer keeps."""
        inputs = dict(zip(self.names, tensors, strict=False))
        rest, caches = iter(tensors[len(self.names) :]), list[Cache]()
        for block in self.decoder.blocks:
            assert isinstance(block, Block)
            if block.recurrence is None:
                caches.append(LayerCache(next(rest), next(rest)))
            else:
                caches.append(tuple(next(rest) for _ in block.recurrence.shapes))
        lengths = [inputs.pop(name) for name in SOURCE_INPUTS if name in inputs]
        sources = [SourceRows(*pair, *lengths) for pair in zip(rest, rest, strict=True)]
        input_ids, indices = inputs.pop("input_ids"), inputs.pop("logits_indices")
        logits, presents = self.decoder.step(
            input_ids, self.make_inputs(**inputs), indices, caches, sources
        )
        return logits.float(), *itertools.chain.from_iterable(presents)


def trace(
    decoder: Transformer,
    weights: Weights,
    make_inputs: Callable[..., CachedInputs],
    inputs: Mapping[str, TensorSpec],
    cache: TensorSpec,
) -> onnx_ir.Model:
    """Return the graph of `Transformer.step`; cache: the keys, or the values, of a layer.

    decoder: a skeleton, whose weights are not looked at. weights: those that the graph gets, which
    are read when it is saved. make_inputs: takes the tensors of `inputs` by name, except input_ids
    and logits_indices. A linear layer's weight may be transposed; its name then ends in TRANSPOSED.
    """
    config, past = decoder.config, dict[str, TensorSpec]()
    for layer in range(config.n_layer):
        if layer in config.recurrent_layers:
            for part, shape in config.states.items():
                past[f"past_states.{layer}.{part}"] = torch.float32, ["batch", *shape]
        else:
            past |= {f"past_key_values.{layer}.{kind}": cache for kind in ("key", "value")}
    tensors = {**inputs, **past}
    if config.n_source_layer:
        batch, heads, _, head_dim = cache[1]
        of_source = (cache[0], [batch, heads, "n_source_positions", head_dim])
        tensors |= dict.fromkeys(cache_names("source_key_values", config.n_layer), of_source)
    outputs: dict[str, Sequence[int | str]] = {"logits": ["rows", config.vocab_size]}
    outputs |= {present_name(name): shape for name, (_, shape) in past.items()}
    return trace_module(StepGraph(decoder, make_inputs, list(inputs)), weights, tensors, outputs)


def trace_module(
    module: nn.Module,
    weights: Weights,
    tensors: Mapping[str, TensorSpec],
    outputs: Mapping[str, Sequence[int | str]],
) -> onnx_ir.Model:
    """Return the graph of a module with one attribute, a network, and with `tensors` as arguments.

    outputs: the shape of each by name. The other arguments are as `trace` has them. Of layers that
    are alike one is traced.
    """
    (network,) = module.children()
    assert isinstance(network, Transformer)
    blocks = network.blocks
    kinds = [_kind_of(block) for block in blocks]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    network.blocks = nn.ModuleList(blocks[layer] for layer in firsts)
    # A traced layer has the names of its place among these.
    places = {layer: str(place) for place, layer in enumerate(firsts)} | {None: ""}

    def traced(names: Iterable[str]) -> dict[str, str]:
        return {
            name: _LAYER.sub(rf"\g<1>{places[layer]}", name)
            for name in names
            if (layer := _layer_of(name)) in places
        }

    arguments = {name: tensors[of_all] for of_all, name in traced(tensors).items()}
    model, parameters = _export(module, arguments, list(traced(outputs).values()))
    network.blocks = blocks
    graph = model.graph
    _share_batch(graph, arguments)
    likes = [firsts.index(kinds.index(kind)) for kind in kinds]
    for value in _repeat_layers(model, parameters, likes):
        _place(graph, value, str(value.name).partition(".")[2], weights)
    remove_unused_constants(graph)
    ClearMetadataAndDocStringPass()(model)  # of stack traces, with this machine's paths
    # Replace the exporter's symbols (s72, …), one for each dimension it saw, by the contract's.
    shapes = {name: shape for name, (_, shape) in tensors.items()} | dict(outputs)
    for value in (*graph.inputs, *graph.outputs):
        value.metadata_props.clear()
        value.shape = onnx_ir.Shape(shapes[str(value.name)])
    for node in graph:
        for output in node.outputs:
            if output not in graph.outputs:
                output.shape = None
    return model


def _export(
    module: nn.Module, tensors: Mapping[str, TensorSpec], outputs: Sequence[str]
) -> tuple[onnx_ir.Model, list[onnx_ir.Value]]:
    """Return PyTorch's graph of a module, optimized, and its parameters, which have no values."""
    arguments = tuple(
        torch.zeros([_EXAMPLE[n] if isinstance(n, str) else n for n in shape], dtype=dtype)
        for dtype, shape in tensors.values()
    )
    free = tuple(
        {i: torch.export.Dim.DYNAMIC for i, n in enumerate(shape) if isinstance(n, str)}
        for _, shape in tensors.values()
    )
    # The exporter warns of torchvision, which is not used.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # torch uses names of its own that it has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.onnx.export(
            module.eval(),
            arguments,
            dynamo=True,
            dynamic_shapes=(free,),
            opset_version=OPSET,
            input_names=list(tensors),
            output_names=outputs,
            verbose=False,
            optimize=False,
        )
    assert program is not None
    # As inputs of the graph, parameters keep their names, and the optimizer neither reads them nor
    # merges equal ones.
    graph = program.model.graph
    parameters = [graph.initializers.pop(name) for name in module.state_dict()]
    for value in parameters:
        value.const_value = None
    n_inputs = len(graph.inputs)
    graph.inputs.extend(parameters)
    program.optimize()
    del program.model.graph.inputs[n_inputs:]
    return program.model, parameters


def _share_batch(graph: onnx_ir.Graph, tensors: Mapping[str, TensorSpec]) -> None:
    """Read the size of the batch from no layer's cache, or other layers would depend on it."""
    inputs = {str(value.name): value for value in graph.inputs}
    for name, (_, shape) in tensors.items():
        if _layer_of(name) is None or shape[0] != "batch":
            continue
        for node, _ in tuple(inputs[name].uses()):
            end = node.attributes.get("end")
            if node.op_type == "Shape" and end is not None and end.as_int() == 1:
                node.replace_input_with(0, inputs["seqlens_k"])


def _kind_of(block: nn.Module) -> str:
    """Return what the nodes of a block depend on: equal for blocks that become equal graphs."""
    modules = [
        (name, type(part), {key: value for key, value in vars(part).items() if key[0] != "_"})
        for name, part in block.named_modules()
    ]
    return repr(
        (modules, [(name, parameter.shape) for name, parameter in block.named_parameters()])
    )


def _layer_of(name: str) -> int | None:
    """Return the layer that a parameter, or an input or output of the graph, belongs to."""
    match = _LAYER.search(name)
    return int(match[2]) if match else None


def _repeat_layers(
    model: onnx_ir.Model, parameters: Sequence[onnx_ir.Value], traced: Sequence[int]
) -> list[onnx_ir.Value]:
    """Make a graph of some layers one of all, in place, and return the parameters of all.

    traced: for each layer, the place of its like among those that the graph has.
    """
    graph, domain = model.graph, LAYER_MARK.partition("::")[0]
    marks = [node for node in graph if node.domain == domain]
    begins, ends = marks[::2], marks[1::2]
    given = [*parameters, *graph.inputs]
    owners = {value: layer for value in given if (layer := _layer_of(str(value.name))) is not None}
    owners |= {node.outputs[0]: layer for layer, node in enumerate(begins)}
    nodes: list[list[onnx_ir.Node]] = [[] for _ in begins]
    for node in graph:  # those that read no layer's input, parameters or cache are shared
        layers = {owners[value] for value in node.inputs if value in owners}
        if layers and node not in marks:
            (layer,) = layers
            nodes[layer].append(node)
            owners |= dict.fromkeys(node.outputs, layer)
    x, copies = cast("onnx_ir.Value", begins[0].inputs[0]), list[onnx_ir.Node]()
    inputs, of_all, outputs = (
        [value for value in values if value not in owners]
        for values in (graph.inputs, parameters, graph.outputs)
    )
    for layer, like in enumerate(traced):
        own: dict[onnx_ir.Value | None, onnx_ir.Value]
        own = {value: _of(value, layer) for value in given if owners.get(value) == like}
        inputs += [own[value] for value in graph.inputs if value in own]
        of_all += [own[value] for value in parameters if value in own]
        own[begins[like].outputs[0]] = x
        for node in nodes[like]:
            copies.append(copy_node(node, [own.get(value, value) for value in node.inputs]))
            for old, new in zip(node.outputs, copies[-1].outputs, strict=True):
                new.name, new.type = f"{layer}.{old.name}", old.type
                own[old] = new
        for value in (value for value in graph.outputs if owners.get(value) == like):
            own[value].name = _of(value, layer).name
            outputs.append(own[value])
        x = own[ends[like].inputs[0]]
    graph.insert_before(ends[-1], copies)
    graph.inputs[:], graph.outputs[:] = inputs, outputs
    last = ends[-1].outputs[0]  # of a network without a last norm it is an output
    onnx_ir.convenience.replace_all_uses_with(last, x, replace_graph_outputs=True)
    x.name = last.name
    graph.remove([*marks, *(node for part in nodes for node in part)], safe=True)
    del model.opset_imports[domain]
    return of_all


def _of(value: onnx_ir.Value, layer: int) -> onnx_ir.Value:
    """Return a parameter, an input or an output as another layer has it."""
    name = _LAYER.sub(rf"\g<1>{layer}", str(value.name))
    return onnx_ir.val(name, type=value.type, shape=value.shape)


def _place(graph: onnx_ir.Graph, value: onnx_ir.Value, name: str, weights: Weights) -> None:
    """Make a parameter an initializer, and its transpose or a row in place of nodes' outputs."""
    assert value.shape is not None
    shape = value.shape.numpy()
    for node, _ in tuple(value.uses()):
        if node.op_type == "Transpose":
            make = partial(weights.read, name, transposed=True)
            made = lazy_constant(graph, name + TRANSPOSED, make, weights.dtype, shape[::-1])
        elif node.op_type == "Gather" and (chosen := node.inputs[1]) and chosen.const_value:
            row = int(chosen.const_value.numpy())  # of head norms that are all alike
            make = partial(_read_row, weights, name, row)
            made = lazy_constant(graph, f"{name}.{row}", make, weights.dtype, shape[1:])
        else:
            continue
        onnx_ir.convenience.replace_all_uses_with(node.outputs[0], made)
        graph.remove(node, safe=True)
    if value.uses():
        whole = lazy_constant(graph, name, partial(weights.read, name), weights.dtype, shape)
        onnx_ir.convenience.replace_all_uses_with(value, whole)


def _read_row(weights: Weights, name: str, row: int) -> Tensor:
    return weights.read(name)[row]

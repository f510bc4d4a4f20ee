"""PyTorch → ONNX: `Transformer.step` as a graph, with our own names of tensors and dimensions.

Of layers that are alike one is traced, and its nodes are repeated (`layers.py`).
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from kvasir.export.graphs.layers import LAYER, kind_of, layer_of, repeat_layers
from kvasir.export.rewrite import lazy_constant, remove_unused_constants
from kvasir.export.rounding.weights import TRANSPOSED, Weights
from kvasir.model.directory import cache_names, present_name
from kvasir.model.network.block import Block, Cache
from kvasir.model.network.cross_attention import SourceRows
from kvasir.model.network.run_inputs import CachedInputs
from kvasir.model.network.transformer import Transformer

OPSET = 23  # the first with RMSNormalization
# Sizes of free dimensions in the example that is traced; a size of 1 would become a constant.
_EXAMPLE = {"batch": 2, "sequence": 3, "n_positions": 4, "rows": 2, "n_source_positions": 6}
_EXAMPLE |= {"tokens": 5, "texts": 2, "batch + 1": 3, "blocks": 3, "num_blocks": 3}

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
            n_kept = 2 if block.attends else 0
            n_kept += 0 if block.recurrence is None else len(block.recurrence.shapes)
            caches.append(tuple(itertools.islice(rest, n_kept)))
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
        if config.attends(layer):
            past |= {f"past_key_values.{layer}.{kind}": cache for kind in ("key", "value")}
        if layer in config.recurrent_layers:
            for part, shape in config.states.items():
                past[f"past_states.{layer}.{part}"] = torch.float32, ["batch", *shape]
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
    kinds = [kind_of(block) for block in blocks]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    network.blocks = nn.ModuleList(blocks[layer] for layer in firsts)
    # A traced layer has the names of its place among these.
    places = {layer: str(place) for place, layer in enumerate(firsts)} | {None: ""}

    def traced(names: Iterable[str]) -> dict[str, str]:
        return {
            name: LAYER.sub(rf"\g<1>{places[layer]}", name)
            for name in names
            if (layer := layer_of(name)) in places
        }

    arguments = {name: tensors[of_all] for of_all, name in traced(tensors).items()}
    model, parameters = _export(module, arguments, list(traced(outputs).values()))
    network.blocks = blocks
    graph = model.graph
    _share_batch(graph, arguments)
    likes = [firsts.index(kinds.index(kind)) for kind in kinds]
    for value in repeat_layers(model, parameters, likes):
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
        if layer_of(name) is None or shape[0] != "batch":
            continue
        for node, _ in tuple(inputs[name].uses()):
            end = node.attributes.get("end")
            if node.op_type == "Shape" and end is not None and end.as_int() == 1:
                node.replace_input_with(0, inputs["seqlens_k"])


def _place(graph: onnx_ir.Graph, value: onnx_ir.Value, name: str, weights: Weights) -> None:
    """Make a parameter an initializer, and its transpose or a row in place of nodes' outputs."""
    assert value.shape is not None
    shape = value.shape.numpy()

    def read_row(row: int) -> Tensor:
        return weights.read(name)[row]

    for node, _ in tuple(value.uses()):
        if node.op_type == "Transpose":
            make = partial(weights.read, name, transposed=True)
            made = lazy_constant(graph, name + TRANSPOSED, make, weights.dtype, shape[::-1])
        elif node.op_type == "Gather" and (chosen := node.inputs[1]) and chosen.const_value:
            row = int(chosen.const_value.numpy())  # of head norms that are all alike
            make = partial(read_row, row)
            made = lazy_constant(graph, f"{name}.{row}", make, weights.dtype, shape[1:])
        else:
            continue
        onnx_ir.convenience.replace_all_uses_with(node.outputs[0], made)
        graph.remove(node, safe=True)
    if value.uses():
        whole = lazy_constant(graph, name, partial(weights.read, name), weights.dtype, shape)
        onnx_ir.convenience.replace_all_uses_with(value, whole)

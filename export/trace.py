"""PyTorch → ONNX: `Transformer.step` as a graph, with our own names of tensors and dimensions."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn

from export.rewrite import lazy_constant, remove_unused_constants
from export.weights import Weights
from model.bundle import cache_names
from model.network.attention import CachedInputs, LayerCache
from model.network.transformer import Transformer

OPSET = 23  # the first with RMSNormalization
TRANSPOSED = ".T"  # ends the name of a weight that the graph has transposed
# Sizes of free dimensions in the example that is traced; a size of 1 would become a constant.
_EXAMPLE = {"batch": 2, "sequence": 3, "n_positions": 4, "rows": 2}
_EXAMPLE |= {"tokens": 5, "texts": 2, "batch + 1": 3, "blocks": 3, "num_blocks": 3}

# A tensor's type and dimensions; those with names are free.
TensorSpec = tuple[torch.dtype, Sequence[int | str]]


class StepGraph(nn.Module):
    """`Transformer.step` with tensors as arguments: the inputs by name, then keys and values."""

    def __init__(
        self, decoder: Transformer, make_inputs: Callable[..., CachedInputs], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.decoder, self.make_inputs, self.names = decoder, make_inputs, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return float32 logits and each layer's keys and values."""
        inputs = dict(zip(self.names, tensors, strict=False))
        past = tensors[len(self.names) :]
        caches = [LayerCache(*pair) for pair in zip(past[::2], past[1::2], strict=True)]
        input_ids, indices = inputs.pop("input_ids"), inputs.pop("logits_indices")
        logits, presents = self.decoder.step(input_ids, self.make_inputs(**inputs), indices, caches)
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
    n_layer = decoder.config.n_layer
    past, present = cache_names("past_key_values", n_layer), cache_names("present", n_layer)
    tensors = {**inputs, **dict.fromkeys(past, cache)}
    outputs: dict[str, Sequence[int | str]] = {
        "logits": ["rows", decoder.config.vocab_size],
        **dict.fromkeys(present, cache[1]),
    }
    return trace_module(StepGraph(decoder, make_inputs, list(inputs)), weights, tensors, outputs)


def trace_module(
    module: nn.Module,
    weights: Weights,
    tensors: Mapping[str, TensorSpec],
    outputs: Mapping[str, Sequence[int | str]],
) -> onnx_ir.Model:
    """Return the graph of a module with one attribute, a network, and with `tensors` as arguments.

    outputs: the shape of each by name. The other arguments are as `trace` has them.
    """
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
            output_names=list(outputs),
            verbose=False,
            optimize=False,
        )
    assert program is not None
    # As inputs of the graph, parameters keep their names, and the optimizer neither reads them nor
    # merges equal ones.
    graph = program.model.graph
    parameters = {name: name.partition(".")[2] for name in module.state_dict()}
    values = [graph.initializers.pop(name) for name in parameters]
    for value in values:
        value.const_value = None
    n_inputs = len(graph.inputs)
    graph.inputs.extend(values)
    program.optimize()
    graph = program.model.graph
    del graph.inputs[n_inputs:]
    for value in values:
        _place(graph, value, parameters[str(value.name)], weights)
    remove_unused_constants(graph)
    ClearMetadataAndDocStringPass()(program.model)  # of stack traces, with this machine's paths
    # Replace the exporter's symbols (s72, …), one for each dimension it saw, by the contract's.
    shapes = {name: shape for name, (_, shape) in tensors.items()} | dict(outputs)
    for value in (*graph.inputs, *graph.outputs):
        value.metadata_props.clear()
        value.shape = onnx_ir.Shape(shapes[str(value.name)])
    for node in graph:
        for output in node.outputs:
            if output not in graph.outputs:
                output.shape = None
    return program.model


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

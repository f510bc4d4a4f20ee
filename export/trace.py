"""PyTorch → ONNX: `Decoder.step` as a graph, with names of our own for tensors and dimensions."""

from __future__ import annotations

import hashlib
import itertools
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn

from export.rewrite import contents
from model.bundle import cache_names
from model.network.attention import LayerCache, RunInputs
from model.network.decoder import Decoder

OPSET = 23  # the first with RMSNormalization
TRANSPOSED = ".T"  # ends the name of a weight that the graph has transposed
# Sizes of free dimensions in the example that is traced; a size of 1 would become a constant.
_EXAMPLE = {"batch": 2, "sequence": 3, "n_positions": 4, "rows": 2}
_EXAMPLE |= {"tokens": 5, "batch + 1": 3, "blocks": 3, "num_blocks": 3}

# A tensor's type and dimensions; those with names are free.
TensorSpec = tuple[torch.dtype, Sequence[int | str]]


class StepGraph(nn.Module):
    """`Decoder.step` with tensors as arguments: the inputs by name, then keys and values."""

    def __init__(
        self, decoder: Decoder, make_inputs: Callable[..., RunInputs], names: Sequence[str]
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
    decoder: Decoder,
    make_inputs: Callable[..., RunInputs],
    inputs: Mapping[str, TensorSpec],
    cache: TensorSpec,
) -> onnx_ir.Model:
    """Return the graph of `Decoder.step`; cache: the keys, or the values, of a layer.

    make_inputs: takes the tensors of `inputs` by name, except input_ids and logits_indices.
    """
    n_layer = decoder.config.n_layer
    past, present = cache_names("past_key_values", n_layer), cache_names("present", n_layer)
    tensors = {**inputs, **dict.fromkeys(past, cache)}
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
            StepGraph(decoder, make_inputs, list(inputs)).eval(),
            arguments,
            dynamo=True,
            dynamic_shapes=(free,),
            opset_version=OPSET,
            input_names=list(tensors),
            output_names=["logits", *present],
            verbose=False,
        )
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # of stack traces, with this machine's paths
    graph = program.model.graph
    # Replace the exporter's symbols (s72, …), one for each dimension it saw, by the contract's.
    shapes = {name: shape for name, (_, shape) in tensors.items()}
    shapes["logits"] = ["rows", decoder.config.vocab_size]
    for value in (*graph.inputs, *graph.outputs):
        value.metadata_props.clear()
        value.shape = onnx_ir.Shape(shapes.get(str(value.name), cache[1]))
    for node in graph:
        for output in node.outputs:
            if output not in graph.outputs:
                output.shape = None
    return program.model


def name_weights(graph: onnx_ir.Graph, module: nn.Module) -> dict[str, str]:
    """Name initializers after their parameters, with TRANSPOSED if so; return names by parameter.

    The exporter transposes linear layers' weights, numbers them, and keeps one copy of equal ones.
    """
    by_content = defaultdict[bytes, list[str]](list)
    for name, parameter in module.named_parameters():
        by_content[_fingerprint(TorchTensor(parameter.detach()).numpy())].append(name)
    names: dict[str, str] = {}
    for value in list(graph.initializers.values()):
        array = contents(value)
        for layout, suffix in ((array, ""), (array.T, TRANSPOSED)):
            if held := by_content.get(_fingerprint(layout)):
                value.name = held[0] + suffix
                names |= dict.fromkeys(held, value.name)
                break
    return names


def _fingerprint(array: NDArray[np.generic]) -> bytes:
    content = str(array.shape).encode() + np.ascontiguousarray(array).tobytes()
    return hashlib.sha256(content).digest()

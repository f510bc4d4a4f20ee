"""PyTorch → ONNX: one call of torch.onnx.export, and what has to be tidied after it."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

OPSET = 23  # the first with RMSNormalization
TRANSPOSED = ".T"  # ends the name of a weight that the graph has transposed

Shapes = Mapping[str, Sequence[int | str]]


def trace(
    module: nn.Module,
    arguments: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> onnx_ir.Model:
    """The graph of a module. arguments: examples, whose free dimensions are 2 at least, or they become constants."""
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch's own use of its own deprecated names
        program = torch.onnx.export(
            module,
            arguments,
            dynamo=True,
            dynamic_shapes=dynamic_shapes,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=list(outputs),
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with paths of this machine
        node.doc_string = None
    return program.model


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of torchvision, which is not used."""
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        exporter_log.setLevel(level)


def name_dimensions(graph: onnx_ir.Graph, shapes: Shapes, cache: Sequence[int | str]) -> None:
    """Replace the exporter's symbols (s72, …), one for each dimension it saw, by the contract's names.

    shapes: of inputs and outputs by name; whatever they do not name is keys or values, shaped as `cache`.
    """
    for value in (*graph.inputs, *graph.outputs):
        assert value.name is not None
        value.shape = onnx_ir.Shape(shapes.get(value.name, cache))
    for node in graph:
        for output in node.outputs:
            if output not in graph.outputs:
                output.shape = None


def name_weights(graph: onnx_ir.Graph, module: nn.Module) -> dict[str, str]:
    """Call each initializer after the parameter it holds, perhaps transposed; which parameter is where.

    The exporter transposes linear layers' weights, numbers them, and keeps one copy of equal ones.
    """
    by_content: dict[bytes, list[str]] = {}
    for name, parameter in module.named_parameters():
        by_content.setdefault(_fingerprint(TorchTensor(parameter.detach()).numpy()), []).append(
            name
        )
    names: dict[str, str] = {}
    for value in list(graph.initializers.values()):
        assert value.const_value is not None
        array = value.const_value.numpy()
        for content, suffix in ((array, ""), (array.T, TRANSPOSED)):
            if held := by_content.get(_fingerprint(content)):
                value.name = held[0] + suffix
                names |= dict.fromkeys(held, value.name)
                break
    return names


def _fingerprint(array: NDArray[np.generic]) -> bytes:
    return hashlib.sha256(
        str(array.shape).encode() + np.ascontiguousarray(array).tobytes()
    ).digest()

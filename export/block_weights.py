"""Weights as integers in blocks of 32, each with its own scale: MatMulNBits, and all that is rounded on CUDA."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

BLOCK = 32
_SMALLEST_SCALE = np.float32(1e-12)  # for a block of zeros
_MICROSOFT = "com.microsoft"


def quantize_blocks(
    matrix: NDArray[np.float32], bits: int = 4
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Symmetric integers of blocks of BLOCK rows of each column, as MatMulNBits stores them. bits: 4 or 8.

    matrix [in, out] → uint8 [out, blocks, BLOCK · bits / 8], of two halves the lower first, each 2^(bits - 1) more than
    its integer; and scales [out · blocks]. A block's value of largest magnitude becomes -2^(bits - 1): the side that
    reaches further.
    """
    n_in, n_out = matrix.shape
    reach = 2 ** (bits - 1)
    padded = np.pad(matrix, ((0, -n_in % BLOCK), (0, 0)))
    blocks = padded.T.reshape(n_out, -1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    scales = np.where(largest == 0.0, _SMALLEST_SCALE, largest / -reach).astype(np.float32)
    integers = (np.clip(np.rint(blocks / scales), -reach, reach - 1) + reach).astype(np.uint8)
    packed = integers if bits == 8 else integers[..., ::2] | integers[..., 1::2] << 4
    return packed, scales.reshape(-1)


def quantize_weights(model: ir.Model, bits: int) -> None:
    """Replace every product with a constant matrix, in place; activations and the embedding stay as they are."""
    graph = model.graph
    for node in list(graph):
        if (
            node.op_type in ("MatMul", "Gemm")
            and node.inputs[1] is not None
            and node.inputs[1].const_value is not None
        ):
            _replace(graph, node, bits)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    model.opset_imports[_MICROSOFT] = 1


def _replace(graph: ir.Graph, node: ir.Node, bits: int) -> None:
    """x W, or x Wᵀ + b where torch made it a Gemm."""
    x, weight, *bias = node.inputs
    assert weight is not None
    assert weight.const_value is not None
    values = weight.const_value.numpy()
    matrix = (values.T if node.op_type == "Gemm" else values).astype(np.float32)
    packed, scales = quantize_blocks(matrix, bits)
    scales_by_column = scales.reshape(len(packed), -1).astype(values.dtype)
    inputs = [x, _constant(graph, f"{weight.name}.int{bits}", packed)]
    inputs.append(_constant(graph, f"{weight.name}.scales", scales_by_column))
    sizes = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": bits, "block_size": BLOCK}
    nodes = [ir.node("MatMulNBits", inputs, attributes=dict(sizes), domain=_MICROSOFT)]
    if bias:
        nodes.append(ir.node("Add", [nodes[0].outputs[0], *bias]))
    graph.insert_before(node, nodes)
    old, new = node.outputs[0], nodes[-1].outputs[0]
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.name, new.shape, new.type = old.name, old.shape, old.type
    graph.remove(node, safe=True)


def _constant(graph: ir.Graph, name: str, array: NDArray[np.generic]) -> ir.Value:
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value

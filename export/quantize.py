"""Weights rounded to int8 and int4, as a pass over the exported graph.

int8 on the CPU: a linear layer y = x W becomes, for each token x on its own,

    s = max|x| / 127,   q = round(x / s) + 128 as uint8,   y = s · ((q - 128) W₈ · c)

with W₈ = round(W / c) in [-127, 127] and c a scale for each column of W. The product is ONNX
Runtime's MatMulIntegerToFloat, which runs on VNNI and AMX units. A scale for each token, not for
the tensor, is what keeps a row's bits independent of its neighbours. A token of zeros has s = 0:
whatever its q becomes, y is 0.

int4, and both on CUDA: weights in blocks of 32 rows of a column, each with its own scale
(MatMulNBits). On the CPU the operator itself rounds activations to int8 in blocks of a token. It
reads half the bytes, for a single stream, and multiplies many tokens more slowly.

On the CPU the head and the embedding are int8 in both. The embedding has a scale for each token of
the vocabulary; where it is also the head, both read one stored copy, which ONNX Runtime transposes
once for the head when it loads the graph.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from export.rewrite import MICROSOFT, constant, contents, remove_unused_constants, replace_node

BLOCK = 32
_EMBEDDING = "embedding.weight"  # the decoder's name, which the graph keeps
_SMALLEST_SCALE = np.float32(1e-12)  # for zeros


def quantize(model: ir.Model, precision: str) -> None:
    """Round products with constant matrices, and the embedding, for the CPU, to int8 or int4."""
    graph, quantizer = model.graph, _Int8(model.graph)
    gathers = [node for node in graph if node.op_type == "Gather"]
    for node in _products(graph):
        if precision == "int4" and node.op_type == "MatMul":  # the head is a Gemm
            _round_in_blocks(graph, node, bits=4, accuracy_level=4)  # activations in int8
        else:
            quantizer.replace_product(node)
    for node in gathers:
        if node.inputs[0] is not None and node.inputs[0].name == _EMBEDDING:
            quantizer.replace_lookup(node)
    remove_unused_constants(graph)
    model.opset_imports[MICROSOFT] = 1


def quantize_in_blocks(model: ir.Model, bits: int) -> None:
    """Round products with constant matrices, for CUDA; the embedding stays as it is."""
    for node in _products(model.graph):
        _round_in_blocks(model.graph, node, bits)
    remove_unused_constants(model.graph)
    model.opset_imports[MICROSOFT] = 1


def quantize_columns(matrix: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round columns of a matrix [in, out], which is nearly int8 [in, out] · scales [out]."""
    scales = np.maximum(np.abs(matrix).max(axis=0) / 127.0, _SMALLEST_SCALE).astype(np.float32)
    return np.rint(matrix / scales).astype(np.int8), scales


def quantize_blocks(
    matrix: NDArray[np.float32], bits: int = 4
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round blocks of BLOCK rows of each column to symmetric integers, as MatMulNBits stores them.

    matrix [in, out] → uint8 [out, blocks, BLOCK · bits / 8], of two halves the lower first, each
    2^(bits - 1) more than its integer; and scales [out, blocks]. bits: 4 or 8. A block's value of
    largest magnitude becomes -2^(bits - 1): the side that reaches further. A block that was rounded
    to 4 bits before gets its integers and its scale again (`_earlier_scales`).
    """
    n_in, n_out = matrix.shape
    reach = 2 ** (bits - 1)
    padded = np.pad(matrix, ((0, -n_in % BLOCK), (0, 0)))
    blocks = padded.T.reshape(n_out, -1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    scales = np.where(largest == 0.0, _SMALLEST_SCALE, largest / -reach).astype(np.float32)
    if bits == 4:
        sizes, some = np.abs(largest), slice(None, None, -(-n_out // 16))
        found = _earlier_scales(blocks[some], sizes[some], scales[some])
        if (found != scales[some]).any():  # a matrix was rounded as a whole, or not at all
            scales = _earlier_scales(blocks, sizes, scales)
    integers = (np.clip(np.rint(blocks / scales), -reach, reach - 1) + reach).astype(np.uint8)
    packed = integers if bits == 8 else integers[..., ::2] | integers[..., 1::2] << 4
    return packed, scales[..., 0]


def _earlier_scales(
    blocks: NDArray[np.float32], largest: NDArray[np.float32], scales: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return scales [out, blocks, 1] of which a block's values are multiples, where there are any.

    Such a block was rounded before, to symmetric integers of which the largest need not be -8: GPTQ
    often has 7. The scale is then largest / n for that n from 8 to 1. In float32 a product of four
    bits and a scale of at most 20 is exact, and so is the quotient.
    """
    found, scales = np.zeros(scales.shape, dtype=bool), scales.copy()
    for n in range(8, 0, -1):
        scale = scales if n == 8 else np.maximum(largest / np.float32(n), _SMALLEST_SCALE)
        exact = ~found
        for part in (slice(0, 4), slice(4, None)):  # few blocks get past the first
            rows = np.flatnonzero(exact)
            values, of = blocks.reshape(-1, BLOCK)[rows, part], scale.reshape(-1, 1)[rows]
            integers = np.clip(np.rint(values / of), -8, 7)
            exact.flat[rows] = (integers * of == values).all(axis=-1)
        scales[exact] = scale[exact]
        found |= exact
    return scales


def _products(graph: ir.Graph) -> list[ir.Node]:
    """Return the products x W with constant matrices, and x Wᵀ + b, which torch makes a Gemm."""
    products = (node for node in graph if node.op_type in ("MatMul", "Gemm"))
    return [node for node in products if node.inputs[1] and node.inputs[1].const_value is not None]


def _round_in_blocks(graph: ir.Graph, node: ir.Node, bits: int, **attributes: int) -> None:
    """Replace a product by MatMulNBits."""
    x, weight, *bias = cast("tuple[ir.Value, ...]", node.inputs)
    values = contents(weight)
    matrix = (values.T if node.op_type == "Gemm" else values).astype(np.float32)
    packed, scales = quantize_blocks(matrix, bits)
    integers = constant(graph, f"{weight.name}.int{bits}", packed)
    inputs = [x, integers, constant(graph, f"{weight.name}.scales", scales.astype(values.dtype))]
    sizes = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": bits, "block_size": BLOCK}
    tape = Tape()
    product = tape.op("MatMulNBits", inputs, sizes | attributes, domain=MICROSOFT)
    result = tape.op("Add", [product, *bias]) if bias else product
    replace_node(graph, node, tape.nodes, result)


class _Int8:
    """Products and lookups in int8; what layers share is made once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        # By the float activations: uint8, and the scale of each token.
        self._activations: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._deferred: dict[ir.Value, ir.Value] = {}  # factors of tokens still to be applied
        self._zero_points: dict[int, ir.Value] = {}  # by rank of the activations

    def replace_product(self, node: ir.Node) -> None:
        """Replace a product without a bias. A Gemm is the head, with activations of rank 2."""
        x, weight = cast("tuple[ir.Value, ...]", node.inputs)
        tape, is_head = Tape(), node.op_type == "Gemm"
        matrix, scales = self._matrix(weight, rows_are_outputs=is_head)
        if is_head:
            matrix = tape.op("Transpose", [matrix], {"perm": [1, 0]})
        width = contents(weight).shape[int(is_head)]
        quantized, scale = self._quantized(tape, x, width, rank=2 if is_head else 3)
        one = constant(self._graph, "quantize.one", np.array(1.0, dtype=np.float32))
        zero_point = constant(self._graph, "quantize.zero_point", np.array(128, dtype=np.uint8))
        inputs = [quantized, matrix, one, scales, zero_point]
        product = tape.op("MatMulIntegerToFloat", inputs, domain=MICROSOFT)
        splits = [user for user, _ in node.outputs[0].uses() if user.op_type == "Split"]
        if not splits or len(splits[0].outputs) != 2:
            scaled = tape.op("Mul", [product, scale])
            replace_node(self._graph, node, tape.nodes, scaled)
            return
        # Scale the gate only. act(s · gate) · up then lacks a factor s, to which the next layer's
        # quantisation is blind: it is applied afterwards.
        gate, up = splits[0].outputs
        multiply = ir.node("Mul", [gate, scale])
        ir.convenience.replace_all_uses_with(gate, multiply.outputs[0])
        multiply.replace_input_with(0, gate)
        self._graph.insert_after(splits[0], multiply)
        ((gated, _),) = up.uses()
        self._deferred[gated.outputs[0]] = scale
        replace_node(self._graph, node, tape.nodes, product)

    def replace_lookup(self, node: ir.Node) -> None:
        """Replace the embedding's Gather."""
        table, ids = cast("tuple[ir.Value, ...]", node.inputs)
        tape = Tape()
        matrix, scales = self._matrix(table, rows_are_outputs=True)
        integers = tape.op("Gather", [matrix, ids], {"axis": 0})
        rows = tape.op("Cast", [integers], {"to": ir.DataType.FLOAT})
        scale = tape.op("Unsqueeze", [tape.op("Gather", [scales, ids], {"axis": 0}), self._axis(2)])
        embedded = tape.op("Mul", [rows, scale])
        replace_node(self._graph, node, tape.nodes, embedded)

    def _quantized(
        self, tape: Tape, x: ir.Value, width: int, rank: int
    ) -> tuple[ir.Value, ir.Value]:
        """Return x as uint8, and the scale that is to multiply each token's product.

        x: [batch, sequence, width] or [rows, width]. Axes are counted from the front: a reduction
        over axis -1 of no rows keeps the axis, in ONNX Runtime 1.31.
        """
        if x not in self._activations:
            axes = [tape.op("Abs", [x]), self._axis(rank - 1)]
            largest = tape.op("ReduceMax", axes, {"keepdims": 1})
            step = constant(self._graph, "quantize.step", np.array(1 / 127, dtype=np.float32))
            scale = tape.op("Mul", [largest, step])
            if rank not in self._zero_points:
                # 128 for each token: QuantizeLinear wants as many as there are scales.
                shape = [tape.op("Shape", [x], {"end": -1}), self._axis(1)]
                fill = {"value": ir.tensor(np.array([128], dtype=np.uint8))}
                tokens = tape.op("Concat", shape, {"axis": 0})
                self._zero_points[rank] = tape.op("ConstantOfShape", [tokens], fill)
            inputs = [x, scale, self._zero_points[rank]]
            sizes = {"axis": rank - 1, "block_size": width}
            quantized = tape.op("QuantizeLinear", inputs, sizes)
            if x in self._deferred:
                scale = tape.op("Mul", [scale, self._deferred[x]])
            self._activations[x] = quantized, scale
        return self._activations[x]

    def _axis(self, n: int) -> ir.Value:
        return constant(self._graph, f"quantize.axis_{n}", np.array([n], dtype=np.int64))

    def _matrix(self, weight: ir.Value, rows_are_outputs: bool) -> tuple[ir.Value, ir.Value]:
        """Return int8 of a weight in its own layout, and a scale for each output; made once."""
        names = f"{weight.name}.int8", f"{weight.name}.scales"
        made = self._graph.initializers
        if names[0] not in made:
            values = contents(weight)
            rounded, scales = quantize_columns(values.T if rows_are_outputs else values)
            constant(self._graph, names[0], rounded.T if rows_are_outputs else rounded)
            constant(self._graph, names[1], scales)
        return made[names[0]], made[names[1]]

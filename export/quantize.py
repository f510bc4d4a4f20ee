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

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.rewrite import (
    MICROSOFT,
    constant,
    contents,
    is_constant,
    remove_unused_constants,
    replace_node,
)

BLOCK = 32
EMBEDDING, HEAD = "embedding.weight", "head.weight"  # the decoder's names, which the graph keeps
_SMALLEST_SCALE = np.float32(1e-12)  # for zeros


def quantize(model: ir.Model, precision: str) -> None:
    """Round products with constant matrices, and the embedding, for the CPU, to int8 or int4."""
    graph, quantizer = model.graph, _Int8(model.graph)
    gathers = [node for node in graph if node.op_type == "Gather"]
    lookups = [node for node in gathers if node.inputs[0] and node.inputs[0].name == EMBEDDING]
    for node in _products(graph):
        if precision == "int4" and not _is_head(node):
            _round_in_blocks(graph, node, bits=4, accuracy_level=4)  # activations in int8
        else:
            quantizer.replace_product(node)
    for node in lookups:
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
    largest magnitude becomes -2^(bits - 1): the side that reaches further.
    """
    n_in, n_out = matrix.shape
    reach = 2 ** (bits - 1)
    padded = np.pad(matrix, ((0, -n_in % BLOCK), (0, 0)))
    blocks = padded.T.reshape(n_out, -1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    scales = np.where(largest == 0.0, _SMALLEST_SCALE, largest / -reach).astype(np.float32)
    integers = (np.clip(np.rint(blocks / scales), -reach, reach - 1) + reach).astype(np.uint8)
    packed = integers if bits == 8 else integers[..., ::2] | integers[..., 1::2] << 4
    return packed, scales[..., 0]


def _round_in_blocks(graph: ir.Graph, node: ir.Node, bits: int, **attributes: int) -> None:
    """Replace x W, or x Wᵀ + b where torch made it a Gemm, by MatMulNBits."""
    x, weight, *bias = node.inputs
    assert weight is not None
    values = contents(weight)
    matrix = (values.T if node.op_type == "Gemm" else values).astype(np.float32)
    packed, scales = quantize_blocks(matrix, bits)
    integers = constant(graph, f"{weight.name}.int{bits}", packed)
    inputs = [x, integers, constant(graph, f"{weight.name}.scales", scales.astype(values.dtype))]
    sizes = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": bits, "block_size": BLOCK}
    nodes = [ir.node("MatMulNBits", inputs, attributes=sizes | attributes, domain=MICROSOFT)]
    if bias:
        nodes.append(ir.node("Add", [nodes[0].outputs[0], *bias]))
    graph.insert_before(node, nodes)
    replace_node(graph, node, nodes[-1].outputs[0])


class _Int8:
    """Products and lookups in int8; what layers share is made once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        # By the float activations: uint8, and the scale of each token.
        self._activations: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._deferred: dict[ir.Value, ir.Value] = {}  # factors of tokens still to be applied
        self._zero_points: dict[int, ir.Value] = {}  # by rank of the activations
        self._step = constant(self._graph, "quantize.step", np.array(1.0 / 127.0, dtype=np.float32))
        self._one = constant(self._graph, "quantize.one", np.array(1.0, dtype=np.float32))
        self._zero_point = constant(
            self._graph, "quantize.zero_point", np.array(128, dtype=np.uint8)
        )

    def replace_product(self, node: ir.Node) -> None:
        """Replace x W, or x Wᵀ where torch made it a Gemm, which is the head."""
        x, weight = node.inputs  # the head has no bias
        assert x is not None
        assert weight is not None
        is_gemm = node.op_type == "Gemm"
        matrix, scales = self._matrix(weight, rows_are_outputs=is_gemm)
        if is_gemm:
            matrix = self._before(node, "Transpose", [matrix], perm=[1, 0])
        width = contents(weight).shape[int(is_gemm)]
        quantized, scale = self._quantized(node, x, width, rank=2 if _is_head(node) else 3)
        inputs = [quantized, matrix, self._one, scales, self._zero_point]
        product = self._before(node, "MatMulIntegerToFloat", inputs, domain=MICROSOFT)
        split = _gate_split(node)
        if split is None:
            replace_node(self._graph, node, self._before(node, "Mul", [product, scale]))
            return
        # Scale the gate only. act(s · gate) · up then lacks a factor s, to which the next layer's
        # quantisation is blind: it is applied afterwards.
        split.replace_input_with(0, product)
        gate, up = split.outputs
        uses = gate.uses()
        scaled = ir.node("Mul", [gate, scale])
        self._graph.insert_after(split, scaled)
        for user, position in uses:
            user.replace_input_with(position, scaled.outputs[0])
        ((gated, _),) = up.uses()
        self._deferred[gated.outputs[0]] = scale
        self._graph.remove(node, safe=True)

    def replace_lookup(self, node: ir.Node) -> None:
        """Replace the embedding's Gather."""
        table, ids = node.inputs
        assert table is not None
        assert ids is not None
        matrix, scales = self._matrix(table, rows_are_outputs=True)
        integers = self._before(node, "Gather", [matrix, ids], axis=0)
        rows = self._before(node, "Cast", [integers], to=ir.DataType.FLOAT)
        last = constant(self._graph, "quantize.axis_2", np.array([2], dtype=np.int64))
        scale = self._before(node, "Gather", [scales, ids], axis=0)
        scale = self._before(node, "Unsqueeze", [scale, last])
        replace_node(self._graph, node, self._before(node, "Mul", [rows, scale]))

    def _quantized(
        self, node: ir.Node, x: ir.Value, width: int, rank: int
    ) -> tuple[ir.Value, ir.Value]:
        """Return x as uint8, and the scale that is to multiply each token's product.

        x: [batch, sequence, width] or [rows, width]. Axes are counted from the front: a reduction
        over axis -1 of no rows keeps the axis, in ONNX Runtime 1.31.
        """
        if x not in self._activations:
            axis = constant(
                self._graph, f"quantize.axis_{rank - 1}", np.array([rank - 1], dtype=np.int64)
            )
            magnitude = self._before(node, "Abs", [x])
            largest = self._before(node, "ReduceMax", [magnitude, axis], keepdims=1)
            scale = self._before(node, "Mul", [largest, self._step])
            if rank not in self._zero_points:
                # 128 for each token: QuantizeLinear wants as many as there are scales.
                tokens = self._before(node, "Shape", [x], end=-1)
                one = constant(self._graph, "quantize.width", np.array([1], dtype=np.int64))
                shape = self._before(node, "Concat", [tokens, one], axis=0)
                fill = ir.tensor(np.array([128], dtype=np.uint8))
                self._zero_points[rank] = self._before(node, "ConstantOfShape", [shape], value=fill)
            inputs = [x, scale, self._zero_points[rank]]
            quantized = self._before(
                node, "QuantizeLinear", inputs, axis=rank - 1, block_size=width
            )
            if x in self._deferred:
                scale = self._before(node, "Mul", [scale, self._deferred[x]])
            self._activations[x] = quantized, scale
        return self._activations[x]

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

    def _before(
        self,
        node: ir.Node,
        op_type: str,
        inputs: list[ir.Value],
        domain: str = "",
        **attributes: int | ir.TensorProtocol | list[int],
    ) -> ir.Value:
        """Insert a node before another and return its output."""
        added = ir.node(op_type, inputs, attributes=dict(attributes), domain=domain)
        self._graph.insert_before(node, added)
        return added.outputs[0]


def _products(graph: ir.Graph) -> list[ir.Node]:
    """Return the products with constant matrices; a Gemm's is transposed."""
    return [
        node for node in graph if node.op_type in ("MatMul", "Gemm") and is_constant(node.inputs[1])
    ]


def _gate_split(node: ir.Node) -> ir.Node | None:
    """Return the Split of a gate and what it multiplies, if only products with constants follow."""
    split = _only_user(node.outputs[0], "Split")
    gated = _only_user(split.outputs[1], "Mul") if split and len(split.outputs) == 2 else None
    users = [user for user, _ in gated.outputs[0].uses()] if gated else []
    into_products = [of.op_type == "MatMul" and is_constant(of.inputs[1]) for of in users]
    return split if users and all(into_products) else None


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    users = [user for user, _ in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == op_type else None


def _is_head(node: ir.Node) -> bool:
    weight = node.inputs[1]
    return weight is not None and weight.name in (EMBEDDING, HEAD)

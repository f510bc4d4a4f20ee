"""int8 and int4 for the CPU, as a pass over the exported graph.

int8: a linear layer y = x W becomes, for each token x on its own,

    s = max|x| / 127,   q = round(x / s) + 128 as uint8,   y = s · ((q - 128) W₈ · c)

with W₈ = round(W / c) in [-127, 127] and c a scale for each column of W. The product is ONNX Runtime's
MatMulIntegerToFloat, which runs on VNNI and AMX units. A scale for each token, not for the tensor, is what keeps a
row's bits independent of its neighbours. A token of zeros has s = 0: whatever its q becomes, y is 0.

int4: weights in blocks of 32 rows of a column, each with its own scale (MatMulNBits), which itself rounds activations
to int8 in blocks of a token. It reads half the bytes, for a single stream, and multiplies many tokens more slowly.

The head and the embedding are int8 in both. The embedding has a scale for each token of the vocabulary; where it is
also the head, both read one stored copy, which ONNX Runtime transposes once for the head when it loads the graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.block_weights import BLOCK, quantize_blocks

EMBEDDING, HEAD = (
    "embedding.weight",
    "head.weight",
)  # the decoder's names, which the exported graph keeps
_SMALLEST_SCALE = np.float32(1e-12)  # for a column of zeros
_MICROSOFT = "com.microsoft"

_Attribute = int | list[int] | ir.TensorProtocol


def quantize(model: ir.Model, precision: str) -> None:
    """Replace every product with a constant matrix, and the embedding's lookup, in place. precision: int8 or int4."""
    _Quantizer(model.graph, precision).run()
    model.opset_imports[_MICROSOFT] = 1


class _Quantizer:
    def __init__(self, graph: ir.Graph, precision: str) -> None:
        self._graph = graph
        self._precision = precision
        self._matrices: dict[
            str, tuple[ir.Value, ir.Value]
        ] = {}  # by name: int8 and a scale for each output
        self._activations: dict[
            ir.Value, tuple[ir.Value, ir.Value]
        ] = {}  # by float: uint8 and a scale for each token
        self._owed: dict[
            ir.Value, ir.Value
        ] = {}  # by value: the factor of each token that it still lacks
        self._zero_points: dict[int, ir.Value] = {}  # by rank of the activations
        self._step = self._constant("quantize.step", np.array(1.0 / 127.0, dtype=np.float32))
        self._one = self._constant("quantize.one", np.array(1.0, dtype=np.float32))
        self._zero_point = self._constant("quantize.zero_point", np.array(128, dtype=np.uint8))

    def run(self) -> None:
        products = [
            node
            for node in self._graph
            if node.op_type in ("MatMul", "Gemm") and _is_constant(node.inputs[1])
        ]
        lookups = [
            node
            for node in self._graph
            if node.op_type == "Gather" and _is_embedding(node.inputs[0])
        ]
        for node in products:
            if self._precision == "int4" and not _is_head(node):
                self._replace_by_int4(node)
            else:
                self._replace_by_int8(node)
        for node in lookups:
            self._replace_lookup(node)
        for value in list(self._graph.initializers.values()):
            if not value.uses():
                assert value.name is not None
                del self._graph.initializers[value.name]

    def _replace_by_int8(self, node: ir.Node) -> None:
        x, weight = _operands(node)
        matrix, scales = self._matrix(weight, rows_are_outputs=node.op_type == "Gemm")
        if node.op_type == "Gemm":
            matrix = self._before(node, "Transpose", [matrix], perm=[1, 0])
        quantized, scale = self._activation(node, x, rank=2 if _is_head(node) else 3)
        inputs = [quantized, matrix, self._one, scales, self._zero_point]
        product = self._before(node, "MatMulIntegerToFloat", inputs, domain=_MICROSOFT)
        if split := _gate_and_up(node):
            self._scale_gate_only(split, product, scale)
            self._graph.remove(node, safe=True)
        else:
            self._replace(node, self._before(node, "Mul", [product, scale]))

    def _scale_gate_only(self, split: ir.Node, product: ir.Value, scale: ir.Value) -> None:
        """act(s · gate) · up lacks a factor s, which the next layer's quantisation does not see: pay it afterwards."""
        split.replace_input_with(0, product)
        gate, up = split.outputs
        uses = list(gate.uses())
        scaled = ir.node("Mul", [gate, scale])
        self._graph.insert_after(split, scaled)
        for user, position in uses:
            user.replace_input_with(position, scaled.outputs[0])
        ((gated, _),) = up.uses()
        self._owed[gated.outputs[0]] = scale

    def _activation(self, node: ir.Node, x: ir.Value, rank: int) -> tuple[ir.Value, ir.Value]:
        """x as uint8, and the scale that is to multiply each token's product; made once for layers that share x.

        Axes are counted from the front: a reduction over axis -1 of no rows keeps the axis, in ONNX Runtime 1.31.
        """
        if x not in self._activations:
            axis = self._constant(f"quantize.axis_{rank - 1}", np.array([rank - 1], dtype=np.int64))
            magnitude = self._before(node, "Abs", [x])
            largest = self._before(node, "ReduceMax", [magnitude, axis], keepdims=1)
            scale = self._before(node, "Mul", [largest, self._step])
            inputs = [x, scale, self._zero_points_of(node, x, rank)]
            quantized = self._before(
                node, "QuantizeLinear", inputs, axis=rank - 1, block_size=_width(node)
            )
            if x in self._owed:
                scale = self._before(node, "Mul", [scale, self._owed[x]])
            self._activations[x] = quantized, scale
        return self._activations[x]

    def _zero_points_of(self, node: ir.Node, x: ir.Value, rank: int) -> ir.Value:
        """128 for each token, [batch, sequence, 1] or [rows, 1]: QuantizeLinear wants as many as there are scales."""
        if rank not in self._zero_points:
            tokens = self._before(node, "Shape", [x], end=-1)
            one = self._constant("quantize.width", np.array([1], dtype=np.int64))
            shape = self._before(node, "Concat", [tokens, one], axis=0)
            fill = ir.tensor(np.array([128], dtype=np.uint8))
            self._zero_points[rank] = self._before(node, "ConstantOfShape", [shape], value=fill)
        return self._zero_points[rank]

    def _replace_by_int4(self, node: ir.Node) -> None:
        x, weight = _operands(node)
        assert weight.name is not None
        assert weight.const_value is not None
        packed, scales = quantize_blocks(weight.const_value.numpy())
        name = weight.name
        inputs = [
            x,
            self._constant(f"{name}.int4", packed),
            self._constant(f"{name}.scales", scales),
        ]
        attributes = {"K": _width(node), "N": len(packed), "bits": 4, "block_size": BLOCK}
        attributes["accuracy_level"] = 4  # activations in int8
        self._replace(
            node, self._before(node, "MatMulNBits", inputs, domain=_MICROSOFT, **attributes)
        )

    def _replace_lookup(self, node: ir.Node) -> None:
        table, ids = node.inputs
        assert table is not None
        assert ids is not None
        matrix, scales = self._matrix(table, rows_are_outputs=True)
        rows = self._before(
            node,
            "Cast",
            [self._before(node, "Gather", [matrix, ids], axis=0)],
            to=ir.DataType.FLOAT,
        )
        last = self._constant("quantize.axis_2", np.array([2], dtype=np.int64))
        scale = self._before(
            node, "Unsqueeze", [self._before(node, "Gather", [scales, ids], axis=0), last]
        )
        self._replace(node, self._before(node, "Mul", [rows, scale]))

    def _matrix(
        self, weight: ir.Value, rows_are_outputs: bool = False
    ) -> tuple[ir.Value, ir.Value]:
        """int8 of a weight in its own layout, and a scale for each output; made once."""
        assert weight.name is not None
        assert weight.const_value is not None
        if weight.name not in self._matrices:
            values = weight.const_value.numpy()
            quantized, scales = quantize_columns(values.T if rows_are_outputs else values)
            self._matrices[weight.name] = (
                self._constant(
                    f"{weight.name}.int8", quantized.T if rows_are_outputs else quantized
                ),
                self._constant(f"{weight.name}.scales", scales),
            )
        return self._matrices[weight.name]

    def _constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        if name in self._graph.initializers:
            return self._graph.initializers[name]
        tensor = ir.tensor(np.ascontiguousarray(array), name=name)
        value = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return value

    def _before(
        self,
        node: ir.Node,
        op_type: str,
        inputs: list[ir.Value],
        domain: str = "",
        **attributes: _Attribute,
    ) -> ir.Value:
        added = ir.node(op_type, inputs, attributes=dict(attributes), domain=domain)
        self._graph.insert_before(node, added)
        return added.outputs[0]

    def _replace(self, node: ir.Node, value: ir.Value) -> None:
        old = node.outputs[0]
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        value.name, value.shape, value.type = old.name, old.shape, old.type
        self._graph.remove(node, safe=True)


def quantize_columns(matrix: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric int8 of each column: matrix [in, out] is nearly int8 [in, out] · scales [out]."""
    scales = np.maximum(np.abs(matrix).max(axis=0) / 127.0, _SMALLEST_SCALE).astype(np.float32)
    return np.rint(matrix / scales).astype(np.int8), scales


def _operands(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """What a product multiplies: activations, and a matrix [in, out], or [out, in] in a Gemm."""
    x, weight = node.inputs[:2]
    assert x is not None
    assert weight is not None
    if node.op_type == "Gemm":
        assert node.attributes["transB"].as_int() == 1
        assert len(node.inputs) == 2, "the head has no bias"
    return x, weight


def _width(node: ir.Node) -> int:
    """How many inputs a product has for each token."""
    matrix = _operands(node)[1].const_value
    assert matrix is not None
    return matrix.shape.numpy()[1 if node.op_type == "Gemm" else 0]


def _gate_and_up(node: ir.Node) -> ir.Node | None:
    """The Split of a product into a gate and what it gates, where that goes to another product and nowhere else."""
    splits = [user for user, _ in node.outputs[0].uses()]
    if len(splits) != 1 or splits[0].op_type != "Split" or len(splits[0].outputs) != 2:
        return None
    gated = [user for user, _ in splits[0].outputs[1].uses()]
    if len(gated) != 1 or gated[0].op_type != "Mul":
        return None
    products = [
        user.op_type == "MatMul" and _is_constant(user.inputs[1])
        for user, _ in gated[0].outputs[0].uses()
    ]
    return splits[0] if products and all(products) else None


def _is_head(node: ir.Node) -> bool:
    return _operands(node)[1].name in (EMBEDDING, HEAD)


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _is_embedding(value: ir.Value | None) -> bool:
    return value is not None and value.name == EMBEDDING

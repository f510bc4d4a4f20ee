"""int8 for the CPU, as a pass over the exported graph: weights per output channel, activations per token.

A linear layer y = x W becomes, for each token x on its own,

    s = max|x|,   q = round(127 x / s) + 128 as uint8,   y = s · ((q - 128) W₈ · c / 127)

with W₈ = round(W / c) in [-127, 127] and c a scale for each column of W. The product is ONNX Runtime's
MatMulIntegerToFloat, which runs on VNNI and AMX units. A scale for each token, not for the tensor, is what keeps a
row's bits independent of its neighbours. The embedding is int8 with a scale for each token of the vocabulary; where it
is also the head, both read one copy.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

EMBEDDING = "embedding.weight"  # the decoder's name for it, which the exported graph keeps
_SMALLEST_SCALE = np.float32(1e-12)  # for a token of zeros
_MICROSOFT = "com.microsoft"


def quantize_int8(model: ir.Model) -> None:
    """Replace every product with a constant matrix, and the embedding's lookup, in place."""
    _Quantizer(model.graph).run()
    model.opset_imports[_MICROSOFT] = 1


class _Quantizer:
    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._matrices: dict[str, tuple[ir.Value, ir.Value]] = {}  # by name: int8 [in, out] and its scales [out]
        self._zero_point = self._constant("quantize.zero_point", np.array(128, dtype=np.uint8))
        self._step = self._constant("quantize.step", np.array(1.0 / 127.0, dtype=np.float32))
        self._smallest = self._constant("quantize.smallest", np.array(_SMALLEST_SCALE))
        # Axes counted from the front: a reduction over axis -1 of no rows at all keeps the axis, in ONNX Runtime 1.31.
        self._axis_1 = self._constant("quantize.axis_1", np.array([1], dtype=np.int64))
        self._axis_2 = self._constant("quantize.axis_2", np.array([2], dtype=np.int64))

    def run(self) -> None:
        products = [node for node in self._graph if node.op_type in ("MatMul", "Gemm") and _is_constant(node.inputs[1])]
        lookups = [node for node in self._graph if node.op_type == "Gather" and _is_embedding(node.inputs[0])]
        for node in products:
            self._replace_product(node)
        for node in lookups:
            self._replace_lookup(node)
        for value in list(self._graph.initializers.values()):
            if not value.uses():
                assert value.name is not None
                del self._graph.initializers[value.name]

    def _replace_product(self, node: ir.Node) -> None:
        x = node.inputs[0]
        weight = node.inputs[1]
        assert x is not None
        assert weight is not None
        transposed = node.op_type == "Gemm"
        if transposed:
            assert node.attributes["transB"].as_int() == 1
            assert len(node.inputs) == 2, "the head has no bias"
        matrix, scales = self._matrix(weight, transposed)
        magnitude = self._before(node, "Abs", [x])
        axis = self._axis_1 if node.outputs[0].name == "logits" else self._axis_2  # [rows, d] or [batch, sequence, d]
        largest = self._before(node, "ReduceMax", [magnitude, axis], keepdims=1)
        scale = self._before(node, "Max", [largest, self._smallest])
        scaled = self._before(node, "Div", [x, scale])
        quantized = self._before(node, "QuantizeLinear", [scaled, self._step, self._zero_point])
        inputs = [quantized, matrix, self._step, scales, self._zero_point]
        product = self._before(node, "MatMulIntegerToFloat", inputs, domain=_MICROSOFT)
        self._replace(node, self._before(node, "Mul", [product, scale]))

    def _replace_lookup(self, node: ir.Node) -> None:
        """Gather from the int8 table: by column where it is the head's matrix too."""
        table, ids = node.inputs
        assert table is not None
        assert table.name is not None
        assert ids is not None
        matrix, scales = self._matrix(table, transposed=True)
        columns = self._before(node, "Gather", [matrix, ids], axis=1)  # [d_model, batch, sequence]
        rows = self._before(node, "Transpose", [columns], perm=[1, 2, 0])
        scale = self._before(node, "Unsqueeze", [self._before(node, "Gather", [scales, ids], axis=0), self._axis_2])
        floats = self._before(node, "Cast", [rows], to=ir.DataType.FLOAT)
        self._replace(node, self._before(node, "Mul", [floats, scale]))

    def _matrix(self, weight: ir.Value, transposed: bool) -> tuple[ir.Value, ir.Value]:
        """int8 [in, out] and scales [out] of a weight [in, out], or [out, in] if transposed; made once."""
        assert weight.name is not None
        assert weight.const_value is not None
        if weight.name not in self._matrices:
            values = weight.const_value.numpy()
            quantized, scales = quantize_columns(values.T if transposed else values)
            name = weight.name
            self._matrices[name] = (
                self._constant(f"{name}.int8", quantized),
                self._constant(f"{name}.scales", scales),
            )
        return self._matrices[weight.name]

    def _constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        tensor = ir.tensor(np.ascontiguousarray(array), name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _before(
        self, node: ir.Node, op_type: str, inputs: list[ir.Value], domain: str = "", **attributes: int | list[int]
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


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _is_embedding(value: ir.Value | None) -> bool:
    return value is not None and value.name == EMBEDDING

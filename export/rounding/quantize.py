"""Weights rounded to int8 and int4, as a pass over the exported graph.

int8 on the CPU: a linear layer y = x W becomes, for each token x on its own,

    s = max|x| / 127,   q = round(x / s) + 128 as uint8,   y = s · ((q - 128) W₈ · c)

with W₈ = round(W / c) in [-127, 127] and c a scale for each column of W. The product is ONNX
Runtime's MatMulIntegerToFloat, which runs on VNNI and AMX units. A scale for each token, not for
the tensor, is what keeps a row's bits independent of its neighbours. A token of zeros has s = 0:
whatever its q becomes, y is 0. The second product of a feed-forward has H x for x and W H / 8 for W
(`export.rounding.mixing`).

int4, and both on CUDA: weights in blocks of 32 rows of a column, each with its own scale
(MatMulNBits). On the CPU the operator itself rounds activations to int8 in blocks of a token, and
scales of int4 are float16 in the file, which ONNX Runtime casts once, when it loads the graph. int4
reads half the bytes, for a single stream, and multiplies many tokens more slowly. So int4 on the
CPU decodes with int4 weights, and computes prompts with int8 ones, unless they are left out: layers
are then in the branches that choose the rows of keys and values (export.rounding.kv_cache). Those
int8 weights are rounded in pairs, since sessions cannot ask for exact products in branches.

On the CPU the head and the embedding are int8 in both. The embedding has a scale for each token of
the vocabulary; where it is also the head, both read one stored copy, which ONNX Runtime transposes
once for the head when it loads the graph.
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import partial
from typing import cast

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from kvasir.export.rewrite import (
    MICROSOFT,
    PROMPT,
    branches,
    constant,
    owner_of,
    remove_unused_constants,
    replace_node,
)
from kvasir.export.rounding.formulas import BLOCK, quantize_pairs, quantize_rows
from kvasir.export.rounding.initializers import Rounder, block_rounder, rounded_weight
from kvasir.export.rounding.mixing import HADAMARD, N_PARTS, is_mixed, mix_weights
from kvasir.export.rounding.weights import TRANSPOSED, Weights

_EMBEDDING = "embedding.weight"  # the decoder's name, which the graph keeps
NOT_ROUNDED = re.compile(r"\.router\.|\.shared_gate\.|^pooler\.")  # names of weights


def quantize(
    model: ir.Model,
    weights: Weights,
    precision: str,
    rank: int = 3,
    rounder: Rounder | None = None,
    kept: Container[str] = (),
) -> None:
    """Round products with constant matrices, and the embedding, for the CPU, to int8 or int4.

    rank: of activations, [batch, sequence, width] or, packed, [tokens, width]. rounder: of
    products' weights to int8; None is `quantize_rows`. kept: the weights that are int8 in int4.
    """
    graph, quantizer = model.graph, _Int8(model.graph, weights, rank, rounder or quantize_rows)
    gathers = [node for node in graph if node.op_type == "Gather"]
    for part in (graph, *branches(graph)):
        in_blocks = precision == "int4" and not str(part.name).startswith(PROMPT)
        for node in products(part):
            name = str(node.inputs[1].name if node.inputs[1] else "").removesuffix(TRANSPOSED)
            if in_blocks and node.op_type == "MatMul" and name not in kept:
                # Activations in int8.
                _round_in_blocks(graph, weights, node, bits=4, accuracy_level=4)
            else:  # the head is a Gemm
                quantizer.replace_product(node, defers=not in_blocks)
    for node in gathers:
        if node.inputs[0] is not None and node.inputs[0].name == _EMBEDDING:
            quantizer.replace_lookup(node)
    remove_unused_constants(graph)
    for branch in branches(graph):  # which see the values of the whole graph
        for i, value in enumerate(output for node in branch for output in node.outputs):
            value.name = f"{branch.name}.{i}"
    model.opset_imports[MICROSOFT] = 1


def quantize_in_blocks(model: ir.Model, weights: Weights, bits: int) -> None:
    """Round products with constant matrices, for CUDA; the embedding stays as it is."""
    for node in products(model.graph):
        _round_in_blocks(model.graph, weights, node, bits)
    remove_unused_constants(model.graph)
    model.opset_imports[MICROSOFT] = 1


def products(graph: ir.Graph) -> list[ir.Node]:
    """Return the products x W with constant matrices, and x Wᵀ + b, which torch makes a Gemm.

    The routers of mixtures are left out: a rounded one would choose other experts. So are gates of
    shared experts and the projections of poolers, which are small.
    """
    products = (node for node in graph if node.op_type in ("MatMul", "Gemm"))
    by_weight = ((node, node.inputs[1]) for node in products)
    return [
        node
        for node, weight in by_weight
        if weight and weight.const_value is not None and not NOT_ROUNDED.search(str(weight.name))
    ]


def _round_in_blocks(
    graph: ir.Graph, weights: Weights, node: ir.Node, bits: int, **attributes: int
) -> None:
    """Replace a product by MatMulNBits."""
    x, weight, *bias = cast("tuple[ir.Value, ...]", node.inputs)
    name = str(weight.name).removesuffix(TRANSPOSED)
    make_rounder = partial(block_rounder, weights, name, bits)
    n_in, n_out = _sizes(weight)
    n_blocks = -(-n_in // BLOCK)
    shapes = (n_out, n_blocks, BLOCK * bits // 8), (n_out, n_blocks)
    tape = Tape()
    integers, scales = rounded_weight(graph, tape, weights, weight, bits, make_rounder, shapes)
    sizes = {"K": n_in, "N": n_out, "bits": bits, "block_size": BLOCK}
    product = tape.op("MatMulNBits", [x, integers, scales], sizes | attributes, domain=MICROSOFT)
    result = tape.op("Add", [product, *bias]) if bias else product
    replace_node(node, tape.nodes, result)


def _sizes(weight: ir.Value) -> tuple[int, int]:
    """Return a linear layer's inputs and outputs."""
    assert weight.shape is not None
    rows, columns = weight.shape.numpy()  # [outputs, inputs] unless transposed
    return (rows, columns) if str(weight.name).endswith(TRANSPOSED) else (columns, rows)


def _mixing(rounder: Rounder) -> Rounder:
    return lambda matrix: rounder(mix_weights(matrix))


class _Int8:
    """Products and lookups in int8; what layers share is made once."""

    def __init__(self, graph: ir.Graph, weights: Weights, rank: int, rounder: Rounder) -> None:
        self._graph, self._weights, self._rank, self._rounder = graph, weights, rank, rounder
        # By the float activations, and the graph or branch: uint8, and the scale of each token.
        self._activations: dict[tuple[ir.Value, ir.Graph], tuple[ir.Value, ir.Value]] = {}
        self._deferred: dict[ir.Value, ir.Value] = {}  # factors of tokens still to be applied
        # By the graph or branch, and the rank of the activations.
        self._zero_points: dict[tuple[ir.Graph, int], ir.Value] = {}

    def replace_product(self, node: ir.Node, *, defers: bool) -> None:
        """Replace a product without a bias. A Gemm is the head, with activations of rank 2.

        defers: what reads the product's halves, if it is a gate and what it gates, has int8 too.
        """
        x, weight = cast("tuple[ir.Value, ...]", node.inputs)
        tape, is_head = Tape(), node.op_type == "Gemm"
        # The session option for exact products leaves branches alone (`open_cpu_session`).
        is_inner = owner_of(node) is not self._graph
        rounder, width = quantize_pairs if is_inner else self._rounder, _sizes(weight)[0]
        rank = 2 if is_head else self._rank
        if is_mixed(str(weight.name).removesuffix(TRANSPOSED), width):
            x, rounder = self._mixed(tape, x, width, rank), _mixing(rounder)
        matrix, scales = self._matrix(tape, weight, rounder)
        if is_head:
            matrix = tape.op("Transpose", [matrix], {"perm": [1, 0]})
        quantized, scale = self._quantized(tape, x, width, (owner_of(node), rank))
        one = constant(self._graph, "quantize.one", np.array(1.0, dtype=np.float32))
        zero_point = constant(self._graph, "quantize.zero_point", np.array(128, dtype=np.uint8))
        inputs = [quantized, matrix, one, scales, zero_point]
        product = tape.op("MatMulIntegerToFloat", inputs, domain=MICROSOFT)
        users = [user for user, _ in node.outputs[0].uses()]
        splits = [user for user in users if user.op_type == "Split" and len(user.inputs) == 1]
        if not defers or not splits or len(splits[0].outputs) != 2:  # of given sizes: no gate
            scaled = tape.op("Mul", [product, scale])
            replace_node(node, tape.nodes, scaled)
            return
        # Scale the gate only. act(s · gate) · up then lacks a factor s, to which the next layer's
        # quantisation is blind: it is applied afterwards.
        gate, up = splits[0].outputs
        multiply = ir.node("Mul", [gate, scale])
        ir.convenience.replace_all_uses_with(gate, multiply.outputs[0])
        multiply.replace_input_with(0, gate)
        owner_of(node).insert_after(splits[0], multiply)
        ((gated, _),) = up.uses()
        self._deferred[gated.outputs[0]] = scale
        replace_node(node, tape.nodes, product)

    def replace_lookup(self, node: ir.Node) -> None:
        """Replace the embedding's Gather."""
        table, ids = cast("tuple[ir.Value, ...]", node.inputs)
        tape = Tape()
        matrix, scales = self._matrix(tape, table, quantize_rows)
        integers = tape.op("Gather", [matrix, ids], {"axis": 0})
        rows = tape.op("Cast", [integers], {"to": ir.DataType.FLOAT})
        of_ids = tape.op("Gather", [scales, ids], {"axis": 0})
        scale = tape.op("Unsqueeze", [of_ids, self._axis(self._rank - 1)])
        embedded = tape.op("Mul", [rows, scale])
        replace_node(node, tape.nodes, embedded)

    def _mixed(self, tape: Tape, x: ir.Value, width: int, rank: int) -> ir.Value:
        """Return x mixed. A factor that x's tokens still lack, the mixed ones lack too."""
        tokens, size = [0] * (rank - 1), width // N_PARTS  # 0: as in what is reshaped
        apart, joined = (
            constant(self._graph, f"mixing.{name}_{rank}_{width}", np.array([*tokens, *sizes]))
            for name, sizes in (("apart", [N_PARTS, size]), ("joined", [width]))
        )
        hadamard = constant(self._graph, "mixing.hadamard", HADAMARD)
        mixed = tape.op("MatMul", [hadamard, tape.op("Reshape", [x, apart])])
        result = tape.op("Reshape", [mixed, joined])
        if x in self._deferred:
            self._deferred[result] = self._deferred[x]
        return result

    def _quantized(
        self, tape: Tape, x: ir.Value, width: int, place: tuple[ir.Graph, int]
    ) -> tuple[ir.Value, ir.Value]:
        """Return x as uint8, and the scale that is to multiply each token's product.

        x: [batch, sequence, width] or [rows, width]. place: the graph or branch that multiplies it,
        and its rank. Axes are counted from the front: a reduction over axis -1 of no rows keeps the
        axis, in ONNX Runtime 1.31.
        """
        (graph, rank) = place
        if (x, graph) not in self._activations:
            axes = [tape.op("Abs", [x]), self._axis(rank - 1)]
            largest = tape.op("ReduceMax", axes, {"keepdims": 1})
            step = constant(self._graph, "quantize.step", np.array(1 / 127, dtype=np.float32))
            scale = tape.op("Mul", [largest, step])
            if place not in self._zero_points:
                # 128 for each token: QuantizeLinear wants as many as there are scales.
                shape = [tape.op("Shape", [x], {"end": -1}), self._axis(1)]
                fill = {"value": ir.tensor(np.array([128], dtype=np.uint8))}
                tokens = tape.op("Concat", shape, {"axis": 0})
                self._zero_points[place] = tape.op("ConstantOfShape", [tokens], fill)
            inputs = [x, scale, self._zero_points[place]]
            sizes = {"axis": rank - 1, "block_size": width}
            quantized = tape.op("QuantizeLinear", inputs, sizes)
            if x in self._deferred:
                scale = tape.op("Mul", [scale, self._deferred[x]])
            self._activations[x, graph] = quantized, scale
        return self._activations[x, graph]

    def _axis(self, n: int) -> ir.Value:
        return constant(self._graph, f"quantize.axis_{n}", np.array([n], dtype=np.int64))

    def _matrix(self, tape: Tape, weight: ir.Value, rounder: Rounder) -> tuple[ir.Value, ir.Value]:
        """Return integers of a weight in its own layout, and a scale for each output, made once."""
        assert weight.shape is not None
        shapes = weight.shape.numpy(), [_sizes(weight)[1]]
        if weight.name == _EMBEDDING:
            rounder = quantize_rows
        given = self._graph, tape, self._weights, weight
        return rounded_weight(*given, 8, lambda: rounder, shapes)

"""Mixtures of experts for the CPU: ONNX Runtime's MoE in fp32, and QMoE in int8 and int4.

The decoder emits MoE over rows that each go through one expert. For int8 and int4 the experts'
weights are rounded in blocks of 32, each with its own scale, and the operator rounds activations to
int8 in blocks of a row. Only experts that a row was sent to are read. The router stays in floats.

A row must get the same bits however many others go to its expert. Two rows and more always do;
the kernels for a single row add in another order, in fp32 and, on CPUs without AVX-512, in int4. So
these two precisions compute every row twice, and no expert gets a single one.
"""

from __future__ import annotations

from typing import cast

import onnx_ir as ir
from onnx_ir.tape import Tape
from torch import Tensor

from kvasir.export.rewrite import MICROSOFT, remove_unused_constants, replace_node
from kvasir.export.rounding.formulas import BITS, BLOCK
from kvasir.export.rounding.initializers import Rounder, block_rounder, rounded_weight
from kvasir.export.rounding.weights import Weights


def place_experts(model: ir.Model, weights: Weights, precision: str) -> None:
    """Make every MoE independent of its other rows; replace it by QMoE in int8 and int4."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "MoE"]:
        given = (*node.inputs, None)[:6]  # the last bias may be left out
        rows, routes, *parts = cast("tuple[ir.Value, ...]", given)
        tape = Tape()
        if precision != "int8":
            rows, routes = (tape.op("Concat", [x, x], {"axis": 0}) for x in (rows, routes))
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        if precision == "fp32":
            inputs = [rows, routes, *parts]
        else:
            bits, inputs = BITS[precision], [rows, routes]
            for weight, bias in zip(parts[::2], parts[1::2], strict=True):
                inputs += [*_round(graph, tape, weights, weight, bits), bias]
            attributes |= {"expert_weight_bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        operator = "MoE" if precision == "fp32" else "QMoE"
        result = tape.op(operator, inputs, attributes, domain=MICROSOFT)
        if precision != "int8":
            result, _ = tape.op_multi_out("Split", [result], {"num_outputs": 2}, num_outputs=2)
        replace_node(node, tape.nodes, result)
    remove_unused_constants(graph)


def _round(
    graph: ir.Graph, tape: Tape, weights: Weights, weight: ir.Value, bits: int
) -> tuple[ir.Value, ir.Value]:
    """Return the integers and scales of weights [n_experts, n_out, n_in]."""
    assert weight.shape is not None
    n_experts, n_out, n_in = weight.shape.numpy()

    def make_rounder() -> Rounder:
        in_blocks = block_rounder(weights, str(weight.name), bits)

        def rounder(experts: Tensor) -> tuple[Tensor, Tensor]:
            packed, scales = in_blocks(experts.flatten(0, 1))
            return packed.view(len(experts), n_out, -1), scales.view(len(experts), n_out, -1)

        return rounder

    shapes = (n_experts, n_out, n_in * bits // 8), (n_experts, n_out, n_in // BLOCK)
    return rounded_weight(graph, tape, weights, weight, bits, make_rounder, shapes)

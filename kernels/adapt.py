"""Adapters in a graph whose products are ours: each product learns which parts of them are its own.

The inputs `adapters`, int64 [entries], and `adapter_table`, int64 [adapters, parts, TABLE_NUMBERS],
are those of `Linear` and `Linear4` (kernels/OPERATORS.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, NodeProto, TensorProto
from onnx.helper import make_tensor_value_info

from kvasir.kernels.adapter_table import ADAPTERS, TABLE, TABLE_NUMBERS
from kvasir.kernels.graph import LINEARS, N_INPUTS, Mismatch, Values, attribute, set_attributes


def weight_of(node: NodeProto) -> str:
    """Return the network's name of the weight that a product multiplies, if it is one."""
    name = node.input[1] if len(node.input) > 1 else ""
    return name.removesuffix(".int8").removesuffix(".int4").removesuffix(".T")


def add_adapters(
    model: ModelProto,
    parts: Mapping[str, tuple[int, int]],
    sizes: Mapping[str, tuple[int, int]],
) -> dict[str, bool]:
    """Let products read adapters, in place; return whether each layer's inputs are mixed.

    parts: the first in the table and their number, of each layer, by the network's name of its
    weight. sizes: their inputs and outputs. Raises Mismatch for a layer whose product is not one of
    ours, is there twice, or has other sizes.
    """
    if TABLE.encode() in model.SerializeToString():  # a branch would read its own, of any addresses
        raise Mismatch(f"a value of its own is named {TABLE}")
    values, mixed = Values(model.graph), dict[str, bool]()
    for node in values.nodes:
        if node.op_type not in LINEARS:
            continue
        name = weight_of(node)
        if name not in parts:
            continue
        if name in mixed:
            raise Mismatch(f"{name} is multiplied in two places")
        if (found := values.sizes(node)) != sizes[name]:
            raise Mismatch(f"{name} has {found} inputs and outputs, not {sizes[name]}")
        mixed[name] = bool(attribute(node, "mixed", 0))
        node.input.extend([""] * (N_INPUTS - len(node.input)))
        node.input.extend([ADAPTERS, TABLE])
        first, n_parts = parts[name]
        set_attributes(node, part=first, parts=n_parts)
    if missing := parts.keys() - mixed.keys():
        raise Mismatch(f"{min(missing)} is multiplied by ONNX Runtime's operators")
    shape: list[str | int] = ["adapters", "parts", TABLE_NUMBERS]
    model.graph.input.extend(
        [
            make_tensor_value_info(ADAPTERS, TensorProto.INT64, ["entries"]),
            make_tensor_value_info(TABLE, TensorProto.INT64, shape),
        ]
    )
    return mixed

"""Adapters in a graph whose products are ours: each product learns which parts of them are its own.

The inputs `adapters`, int64 [entries], and `adapter_table`, int64 [adapters, parts, TABLE_NUMBERS],
are those of `Linear` and `Linear4` (kernels/README.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, TensorProto
from onnx.helper import make_tensor_value_info

from kvasir.kernels.adapter_table import ADAPTERS, TABLE, TABLE_NUMBERS, Place
from kvasir.kernels.graph import LINEARS, N_INPUTS, Mismatch, Values, attribute, set_attributes


def add_adapters(model: ModelProto, n_parts: Mapping[str, int]) -> dict[str, Place]:
    """Let products read adapters, in place; return where each layer's parts are.

    n_parts: of each layer, by the decoder's name of its weight. Raises Mismatch for a layer whose
    product is not one of ours, or is there twice.
    """
    values, places, first = Values(model.graph), dict[str, Place](), 0
    for node in values.nodes:
        if node.op_type not in LINEARS:
            continue
        name = node.input[1].removesuffix(".int8").removesuffix(".int4").removesuffix(".T")
        if name not in n_parts:
            continue
        if name in places:
            raise Mismatch(f"{name} is multiplied in two places")
        places[name] = Place(first, bool(attribute(node, "mixed", 0)))
        node.input.extend([""] * (N_INPUTS - len(node.input)))
        node.input.extend([ADAPTERS, TABLE])
        set_attributes(node, part=first, parts=n_parts[name])
        first += n_parts[name]
    if missing := n_parts.keys() - places.keys():
        raise Mismatch(f"{min(missing)} is multiplied by ONNX Runtime's operators")
    shape: list[str | int] = ["adapters", first, TABLE_NUMBERS]
    model.graph.input.extend(
        [
            make_tensor_value_info(ADAPTERS, TensorProto.INT64, ["entries"]),
            make_tensor_value_info(TABLE, TensorProto.INT64, shape),
        ]
    )
    return places

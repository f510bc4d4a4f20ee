"""Adapters by ONNX Runtime's own operators, where products are not ours: slower, and as invariant.

Inputs are `adapters`, int64 [rows], of each row or packed text, and for each layer NAME.a, float
[slots, 1, 2, n_in, h], and NAME.b, [slots, 1, 2, h, n_out]: what an adapter adds, even and odd
ranks apart. Slot 0 is of no adapter.

A token alone has the same kernel as one beside others, since each is a product of one row: the axis
of halves keeps ONNX Runtime from joining a row's tokens into one product. Two numbers are added in
one order.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import chain

from onnx import ModelProto, NodeProto, TensorProto
from onnx.helper import make_node, make_opsetid, make_tensor, make_tensor_value_info
from onnx.parser import parse_function

from kvasir.kernels.adapt import weight_of
from kvasir.kernels.adapter_table import ADAPTERS
from kvasir.kernels.graph import DOMAIN, Mismatch, Values, parts, replace_all, require
from kvasir.kernels.products import before_mixing, rounded

_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", "MatMulIntegerToFloat")
_ROWS, _PLACES, _ONE = "rows", "places", "adapters.one"
# What is added is divided by the product's scale, which is applied later, and 0 only of zeros.
_FUNCTION = """<domain: "kvasir", opset_import: ["" : VERSION]>
Adapt (product, x, scale, adapters, a, b, rows, places) => (y) {
  in_rows = GATHER
  inner = Constant <value_ints = [2, 3]> ()
  apart = Unsqueeze (in_rows, inner)
  a_of_rows = Gather (a, adapters)
  b_of_rows = Gather (b, adapters)
  h = MatMul (apart, a_of_rows)
  halves = MatMul (h, b_of_rows)
  sum = ReduceSum <keepdims = 0> (halves, inner)
  flat = Flatten <axis = 2> (sum)
  added = PACK
  least = Constant <value_float = 1e-30> ()
  divisor = Max (scale, least)
  quotient = Div (added, divisor)
  y = Add (product, quotient)
}"""


def add_stock_adapters(
    model: ModelProto, names: Mapping[str, str], sizes: Mapping[str, tuple[int, int]]
) -> None:
    """Add adapters to products, in place.

    names: of the graph's layers among all, by the network's names of their weights. sizes: inputs
    and outputs of all layers, which are inputs of the graph. Raises Mismatch for one that lacks a
    product.
    """
    graph, missing = model.graph, set(names)
    is_packed = any(value.name == _ROWS for value in graph.input)
    values, added = Values(graph), dict[str, NodeProto]()
    adds = (set(node.input) for node in values.nodes if node.op_type == "Add")
    biased = set[str]().union(*(given for given in adds if given & values.constants.keys()))
    for node in values.nodes:
        name = weight_of(node)
        if name not in names or node.op_type not in _PRODUCTS:
            continue
        missing.discard(name)
        x, scale = node.input[0], _ONE
        if node.op_type == "MatMulNBits":
            # ONNX Runtime joins it with a bias, unless an adapter is between: another rounding.
            require(node.output[0] not in biased, f"{name} of 4 bits has a bias")
        if node.op_type == "MatMulIntegerToFloat":
            x, scale, _ = rounded(values, x)
            with suppress(Mismatch):
                x = before_mixing(values, x)
        result, own = node.output[0], names[name]
        node.output[0] = f"{result}.product"  # before a bias, which other nodes are joined with
        given = [node.output[0], x, scale, ADAPTERS, f"{own}.a", f"{own}.b"]
        given += [_ROWS, _PLACES] if is_packed else ["", ""]
        added[node.output[0]] = make_node("Adapt", given, [result], domain=DOMAIN)
    if missing:
        raise Mismatch(f"{min(missing)} is multiplied by operators that are not known")
    for part in parts(graph):
        pairs = ([node, *filter(None, [added.get((*node.output, "")[0])])] for node in part.node)
        replace_all(part.node, chain.from_iterable(pairs))
    graph.initializer.append(make_tensor(_ONE, TensorProto.FLOAT, [], [1.0]))
    rows = "texts" if is_packed else "batch"  # the graph's own name: sums then have known sizes
    graph.input.append(make_tensor_value_info(ADAPTERS, TensorProto.INT64, [rows]))
    for name, (n_in, n_out) in sizes.items():
        half = f"{name}.half_rank"
        shapes: dict[str, list[str | int]] = {"a": [n_in, half], "b": [half, n_out]}
        for matrix, shape in shapes.items():
            own, of_slots = f"{name}.{matrix}", ["slots", 1, 2, *shape]
            graph.input.append(make_tensor_value_info(own, TensorProto.FLOAT, of_slots))
    version = next(opset.version for opset in model.opset_import if not opset.domain)
    gather, pack = "Identity (x)", "Identity (sum)"
    if is_packed:
        gather, pack = "Gather (x, rows)", "Gather (flat, places)"
    text = _FUNCTION.replace("VERSION", str(version)).replace("GATHER", gather)
    model.functions.append(parse_function(text.replace("PACK", pack)))
    model.opset_import.append(make_opsetid(DOMAIN, 1))

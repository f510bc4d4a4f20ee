"""Rules of `kernels.fuse`: mixtures of experts as `Experts`, `Experts4` or `Experts32`.

The exporter sends each row to one expert and adds the experts of a token itself. ONNX Runtime's
operators get some rows twice, so that no expert has a single one (`export.rounding.experts`); ours
do not need it.
"""

from __future__ import annotations

from typing import Any

from onnx import NodeProto, TensorProto

from kvasir.kernels.graph import DOMAIN, Mismatch, Values, attribute, require, set_attributes

# Attributes of both operators, and of the one with rounded weights.
_OPTIONS = {"k": 1, "normalize_routing_weights": 1, "activation_type": b"swiglu"}
_OPTIONS |= {"swiglu_fusion": 1}
_IN_BLOCKS = {"block_size": 32, "accuracy_level": 4}
_ALPHA = 1.702  # of gates that have a limit


def experts(values: Values, node: NodeProto) -> None:
    """Make MoE or QMoE, with one expert for each row, one of ours."""
    is_rounded = node.op_type == "QMoE"
    wanted = _OPTIONS | (_IN_BLOCKS if is_rounded else {})
    found: dict[str, Any] = {name: attribute(node, name) for name in wanted}
    require(found == wanted, f"the mixture is another one: {found}")
    given = [*node.input, *[""] * 8]
    x, routes, up, *rest = given
    if is_rounded:
        up_scales, up_bias, down, down_scales, down_bias, *others = rest
        bits = attribute(node, "expert_weight_bits")
        require(bits in (4, 8), f"weights have {bits} bits")
        operator = "Experts4" if bits == 4 else "Experts"
    else:
        up_bias, down, down_bias, *others = rest
        up_scales, down_scales, operator = "", "", "Experts32"
    require(not any(others), "the mixture has further inputs")
    for name in filter(None, (up, up_bias, down, down_bias)):
        require(name in values.constants, f"{name} is no constant")
    scales = [_scales(values, name) if name else "" for name in (up_scales, down_scales)]
    limit = _limit(node)
    target, (x, routes) = _once(values, node, (x, routes))
    output = target.output[0]
    inputs = [x, routes, up, scales[0], up_bias, down, scales[1], down_bias]
    while not inputs[-1]:
        inputs.pop()
    target.Clear()
    target.op_type, target.domain = operator, DOMAIN
    target.input[:], target.output[:] = inputs, [output]
    set_attributes(target, limit=limit)


def _limit(node: NodeProto) -> float:
    """Return the limit of gates, 0 for none."""
    limit = attribute(node, "swiglu_limit")
    alpha, beta = attribute(node, "activation_alpha", 1.0), attribute(node, "activation_beta", 0.0)
    known = (1.0, 0.0) if limit is None else (_ALPHA, 1.0)
    require((round(alpha, 6), beta) == known, f"gates have the factors {alpha} and {beta}")
    require(limit is None or limit > 0, f"gates have the limit {limit}")
    return limit or 0.0


def _scales(values: Values, name: str) -> str:
    """Return a constant of scales, float or float16, that a cast may follow."""
    if values.operator(name) == "Cast":
        cast = values.maker(name, "Cast")
        require(attribute(cast, "to") == TensorProto.FLOAT, "scales are cast to another type")
        (name,) = cast.input
    require(name in values.constants, f"{name} is no constant")
    return name


def _once(
    values: Values, node: NodeProto, given: tuple[str, str]
) -> tuple[NodeProto, tuple[str, ...]]:
    """Return the node that makes what is read, and its rows and routes, which may come twice."""
    try:
        joins = [values.maker(name, "Concat") for name in given]
        split = values.reader(node.output[0], "Split")
    except Mismatch:
        return node, given
    is_half = len(split.output) == 2 and attribute(split, "num_outputs") == 2
    unread = is_half and split.output[1] and not values.readers(split.output[1])
    of_rows = not any(attribute(part, "axis", 0) for part in (*joins, split))
    if not unread or not of_rows or any(list(join.input) != 2 * [join.input[0]] for join in joins):
        return node, given
    return split, tuple(join.input[0] for join in joins)

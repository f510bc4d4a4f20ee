"""Small graphs that no export makes, rewritten or left: ONNX Runtime computes the same of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from kvasir.export.rewrite import MICROSOFT
from kvasir.kernels.fuse import fuse
from kvasir.kernels.graph import Mismatch
from kvasir.kernels.library import FILE, Library
from kvasir.kernels.page import page
from kvasir.model.onnx.runtime import open_cpu_session
from tests.kernels.graphs import needs_library

pytestmark = needs_library
Arrays = dict[str, NDArray[Any]]


def floats(*shape: int) -> NDArray[np.float32]:
    random = np.random.default_rng(sum(shape))
    return np.asarray(random.standard_normal(shape), dtype=np.float32)


def make(nodes: list[NodeProto], given: Arrays, constants: Arrays, *made: str) -> ModelProto:
    """Return a graph whose inputs have ranks and, where they are rows, sizes."""
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(array.dtype),
            array.shape if array.ndim == 4 else [None] * array.ndim,
        )
        for name, array in given.items()
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    outputs = [ValueInfoProto(name=name) for name in made]
    graph = helper.make_graph(nodes, "small", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def check(model: ModelProto, given: Arrays) -> set[str]:
    """Compare the first outputs of a graph and of the rewritten one; return its operators."""
    fused, _ = fuse(model)
    name = model.graph.output[0].name
    own = open_cpu_session(fused.SerializeToString(), library=Library(FILE).register)
    (expected,) = open_cpu_session(model.SerializeToString()).run([name], given)
    (found,) = own.run([name], given)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    return {node.op_type for node in fused.graph.node}


@pytest.mark.parametrize(
    ("attributes", "shape", "operator"),
    [
        ({}, (8, 6), "Linear32"),
        ({"transB": 2}, (6, 8), "Linear32"),
        ({"transA": 1}, (5, 6), "Gemm"),
        ({"alpha": 2.0}, (8, 6), "Gemm"),
        ({}, (8, 0), "Gemm"),
    ],
)
def test_products(attributes: dict[str, Any], shape: tuple[int, ...], operator: str) -> None:
    given: Arrays = {"x": floats(5, 8)}
    nodes = [helper.make_node("Gemm", ["x", "weight"], ["y"], **attributes)]
    assert operator in check(make(nodes, given, {"weight": floats(*shape)}, "y"), given)


@pytest.mark.parametrize(
    ("before", "power", "left"),
    [("Relu", 2, set()), ("Relu", 3, {"Relu", "Pow"}), ("Abs", 2, {"Abs", "Mul"})],
)
def test_powers(before: str, power: float, left: set[str]) -> None:
    nodes = [
        helper.make_node(before, ["x"], ["positive"]),
        helper.make_node("Pow", ["positive", "power"], ["activated"]),
        helper.make_node("MatMul", ["activated", "w"], ["y"]),
    ]
    constants = {"power": np.array(power, dtype=np.float32), "w": floats(32, 16)}
    given = {"x": floats(3, 32)}
    assert check(make(nodes, given, constants, "y"), given) == {"Linear32", *left}


def test_a_product_of_more_inputs_than_the_operator_takes() -> None:
    given: Arrays = {"x": floats(1, 131_073)}
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["y"])]
    model = make(nodes, given, {"weight": floats(131_073, 1) / 1000}, "y")
    assert check(model, given) == {"MatMul"}


def functions(nodes: list[NodeProto], constants: Arrays) -> set[str]:
    """Compare what nodes make of z, which is a product of x [5, 8] with a constant [8, 6]."""
    given: Arrays = {"x": floats(5, 8)}
    product = helper.make_node("MatMul", ["x", "weight"], ["z"])
    fixed: Arrays = {"weight": floats(8, 6)} | constants
    return check(make([product, *nodes], given, fixed, "y"), given)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "made"),
    [
        ("Sigmoid", ["z"], {}, "Activation"),
        ("Tanh", ["z"], {}, "Activation"),
        ("Exp", ["z"], {}, "Activation"),
        ("Softplus", ["z"], {}, "Activation"),
        ("Gelu", ["z"], {}, "Activation"),
        ("Gelu", ["z"], {"approximate": "tanh"}, "Activation"),
        ("Exp", ["few"], {}, "Activation"),
        ("Exp", ["many"], {}, "Exp"),
        ("Exp", ["doubles"], {}, "Exp"),
        ("Softmax", ["z"], {}, "Norm"),
        ("Softmax", ["z"], {"axis": 0}, "Softmax"),
        ("Pow", ["z", "two"], {}, "Mul"),
        ("Pow", ["z", "three"], {}, "Pow"),
        ("Pow", ["z", "z"], {}, "Pow"),
    ],
)
def test_functions(operator: str, inputs: list[str], attributes: dict[str, Any], made: str) -> None:
    nodes = [
        helper.make_node(operator, inputs, ["made"], **attributes),
        helper.make_node("Cast", ["made"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "z"], ["y"]),
    ]
    constants: Arrays = {"few": floats(6), "many": floats(300, 5, 6), "three": floats(1) * 0 + 3}
    constants |= {"two": floats(1) * 0 + 2, "doubles": floats(6).astype(float)}
    constants = {name: array for name, array in constants.items() if name in inputs}
    assert made in functions(nodes, constants)


def test_a_function_of_other_numbers() -> None:
    """Of a cast, whose type the rule reads."""
    nodes = [
        helper.make_node("Cast", ["z"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Exp", ["wide"], ["y"]),
    ]
    assert "Exp" in functions(nodes, {})


def test_functions_without_a_product_of_ours() -> None:
    given: Arrays = {"x": floats(5, 8)}
    nodes = [helper.make_node("Softmax", ["x"], ["shares"])]
    nodes += [helper.make_node("Exp", ["shares"], ["y"])]
    assert check(make(nodes, given, {}, "y"), given) == {"Softmax", "Exp"}


@pytest.mark.parametrize(
    ("changes", "is_softplus"),
    [
        ({}, True),
        ({"column": np.array([2])}, True),
        ({"column": np.array([0])}, False),
        ({"pads": np.array([0, 0, 0, 0, 0, 1])}, False),
        ({"pads": np.array([0, 0, 2, 0, 0, 0])}, False),
        ({"place": np.array(1)}, False),
        ({"place": np.array([0])}, False),
        ({"beside": np.float32(1)}, False),
        ({"axis": 1}, False),
    ],
)
def test_the_logarithm_of_a_share_beside_a_zero(changes: dict[str, Any], is_softplus: bool) -> None:
    constants: dict[str, Any] = {"column": np.array([-1]), "pads": np.array([0, 0, 1, 0, 0, 0])}
    constants |= {"place": np.array(0)} | changes
    axis = constants.pop("axis", -1)
    nodes = [
        helper.make_node("Unsqueeze", ["z", "column"], ["columns"]),
        helper.make_node(
            "Pad", ["columns", "pads", "beside" if "beside" in constants else ""], ["pairs"]
        ),
        helper.make_node("LogSoftmax", ["pairs"], ["shares"], axis=axis),
        helper.make_node("Gather", ["shares", "place"], ["y"], axis=2),
    ]
    assert ("Activation" in functions(nodes, constants)) == is_softplus


ROWS, EXPERTS, CHANNELS, HIDDEN = 6, 3, 64, 32
OF_EXPERTS: dict[str, Any] = {"k": 1, "normalize_routing_weights": 1}
OF_EXPERTS |= {"activation_type": "swiglu", "swiglu_fusion": 1}
FACTORS = {"activation_alpha": 1.0, "activation_beta": 0.0}
CLAMPED = {"activation_alpha": 1.702, "activation_beta": 1.0}


def experts(attributes: dict[str, Any], joined: int | None = None, split: int = 0) -> set[str]:
    """Compare a mixture, whose rows come twice if they are joined along an axis."""
    given: Arrays = {"x": floats(ROWS, CHANNELS)}
    given["routes"] = np.eye(EXPERTS, dtype=np.float32)[np.arange(ROWS) % EXPERTS]
    of_rows, nodes = ["x", "routes"], list[NodeProto]()
    if joined is not None:
        of_rows = ["x.twice", "routes.twice"]
        nodes = [
            helper.make_node("Concat", [name, name], [f"{name}.twice"], axis=joined)
            for name in given
        ]
    n_twice = 2 if joined == 1 else 1
    n_in = n_twice * CHANNELS
    up, down = floats(EXPERTS, 2 * HIDDEN, n_in) / 8, floats(EXPERTS, n_in, HIDDEN) / 8
    constants: Arrays = {"up": np.tile(up, (n_twice, 1, 1)), "down": np.tile(down, (n_twice, 1, 1))}
    inputs = [*of_rows, "up", "", "down", ""]
    options = OF_EXPERTS | attributes
    made = "y" if joined is None else "made"
    nodes.append(helper.make_node("MoE", inputs, [made], domain=MICROSOFT, **options))
    if joined is not None:
        halves = ["y", "unread"]
        nodes.append(helper.make_node("Split", [made], halves, axis=split, num_outputs=2))
    return check(make(nodes, given, constants, "y"), given)


@pytest.mark.parametrize(
    ("attributes", "operator"),
    [
        (FACTORS, "Experts32"),
        ({}, "Experts32"),  # of the same factors
        ({"swiglu_limit": 0.5, **CLAMPED}, "Experts32"),
        ({"swiglu_limit": 0.0, **FACTORS}, "MoE"),
        ({"swiglu_limit": 0.5, **FACTORS}, "MoE"),
        (CLAMPED, "MoE"),
        ({"k": 2}, "MoE"),
        ({"normalize_routing_weights": 0}, "MoE"),
    ],
)
def test_mixtures(attributes: dict[str, Any], operator: str) -> None:
    assert operator in experts(attributes)


def test_rows_that_come_twice() -> None:
    assert experts(FACTORS, joined=0) == {"Experts32"}
    assert "Split" in experts(FACTORS, joined=0, split=1)
    assert "Split" in experts(FACTORS, joined=1, split=0)


HEADS, KV_HEADS, SIZE, ROOM = 4, 2, 16, 320
PRESENT = ["new_keys", "new_values"]


def attention(
    attributes: dict[str, Any], n_new: int, n_past: int, more: Arrays, outputs: list[str]
) -> tuple[ModelProto, Arrays]:
    """Return a graph of a product and attention over rows, and a run of two of them."""
    shape = (2, KV_HEADS, ROOM, SIZE)
    given: Arrays = {"x": floats(2, n_new, 8), "keys": floats(*shape), "values": floats(*shape)}
    given["ends"] = np.full(2, n_past + n_new - 1, dtype=np.int32)
    given["total"] = np.array(n_past + n_new, dtype=np.int32)
    constants: Arrays = {"weight": floats(8, (HEADS + 2 * KV_HEADS) * SIZE) / 3}
    angles = np.arange(ROOM)[:, None] / 10 ** np.arange(SIZE // 2)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    constants |= {name: table.astype(np.float32) for name, table in tables.items()}
    given |= more
    options = [name if name in more else "" for name in ("positions", "biases")]
    inputs = ["qkv", "", "", "keys", "values", "ends", "total", "cos", "sin", *options]
    heads: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["qkv"]),
        helper.make_node(
            "GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **heads, **attributes
        ),
    ]
    return make(nodes, given, constants, "y"), given


@pytest.mark.parametrize(
    ("attributes", "operator"),
    [
        ({}, "RowAttention"),
        ({"local_window_size": 3, "softcap": 2.0}, "RowAttention"),
        ({"smooth_softmax": 1}, "GroupQueryAttention"),
        ({"causal": 0}, "GroupQueryAttention"),
        ({"scale": -1.0}, "GroupQueryAttention"),
    ],
)
def test_attention_over_rows(attributes: dict[str, Any], operator: str) -> None:
    assert operator in check(*attention(attributes, 5, 0, {}, ["y", *PRESENT]))


@pytest.mark.parametrize(
    ("changes", "operator"),
    [
        ({}, "RowAttention8"),
        ({"step": 2.0}, "GroupQueryAttention"),
        ({"k_quant_type": "PER_CHANNEL"}, "GroupQueryAttention"),
        ({"v_quant_type": "PER_CHANNEL"}, "GroupQueryAttention"),
        ({"kv_cache_bit_width": 4}, "GroupQueryAttention"),
    ],
)
def test_attention_over_rows_of_8_bits(changes: dict[str, Any], operator: str) -> None:
    kinds = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    attributes = kinds | {name: of for name, of in changes.items() if name != "step"}
    model, given = attention(attributes, 1, 40, {}, ["y", *PRESENT])
    graph = model.graph
    step = np.array([changes.get("step", 1.0)], dtype=np.float32)
    graph.initializer.append(numpy_helper.from_array(step, "step"))
    graph.node[1].input.extend([""] * (12 - len(graph.node[1].input)) + ["step", "step"])
    for value in graph.input[1:3]:
        value.type.tensor_type.elem_type = TensorProto.INT8
        given[value.name] = np.rint(20 * given[value.name]).astype(np.int8)
    if operator == "RowAttention8":
        assert operator in check(model, given)
    assert operator in {node.op_type for node in fuse(model)[0].graph.node}


def test_attention_whose_rows_nobody_keeps() -> None:
    assert "GroupQueryAttention" in check(*attention({}, 5, 0, {}, ["y"]))


def test_attention_whose_scores_are_an_output() -> None:
    outputs = ["y", *PRESENT, "scores"]
    assert "GroupQueryAttention" in check(*attention({"qk_output": 1}, 5, 0, {}, outputs))


def test_attention_at_other_positions() -> None:
    more: Arrays = {"positions": np.array([[9], [7]])}
    model, given = attention({"do_rotary": 1}, 1, 4, more, ["y", *PRESENT])
    assert "GroupQueryAttention" in check(model, given)


@pytest.mark.parametrize("least", [-np.inf, np.finfo(np.float32).min])
def test_biases_that_hide_a_section_of_positions(least: float) -> None:
    biases = floats(2, HEADS, 1, 300)
    biases[..., :260] = least
    more: Arrays = {"biases": biases}
    assert "RowAttention" in check(*attention({}, 1, 299, more, ["y", *PRESENT]))


@pytest.mark.parametrize(("n_more", "operator"), [(0, "RowAttention"), (1, "GroupQueryAttention")])
def test_a_source_that_may_grow(n_more: int, operator: str) -> None:
    shape = (2, KV_HEADS, 6, SIZE)
    given: Arrays = {"x": floats(2, 1, 8), "keys": floats(*shape), "values": floats(*shape)}
    given |= {"ends": np.full(2, 5, dtype=np.int32), "total": np.array(6, dtype=np.int32)}
    sizes = [np.array([size]) for size in (2, n_more, KV_HEADS * SIZE)]
    constants: Arrays = {"weight": floats(8, HEADS * SIZE) / 3, "zero": np.zeros(1, np.float32)}
    constants |= {f"size.{axis}": size for axis, size in enumerate(sizes)}
    inputs = ["q", "more", "more", "keys", "values", "ends", "total"]
    heads: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "causal": 0}
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["q"]),
        helper.make_node("Concat", [f"size.{axis}" for axis in range(3)], ["shape"], axis=0),
        helper.make_node("Expand", ["zero", "shape"], ["more"]),
        helper.make_node("GroupQueryAttention", inputs, ["y"], domain=MICROSOFT, **heads),
    ]
    fused, _ = fuse(make(nodes, given, constants, "y"))
    assert operator in {node.op_type for node in fused.graph.node}


def test_rows_of_an_unknown_rank() -> None:
    """The rule leaves them; what opens the graph tells more."""
    model, _ = attention({}, 1, 0, {}, ["y", *PRESENT])
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    fused, _ = fuse(model)
    assert "GroupQueryAttention" in {node.op_type for node in fused.graph.node}


@pytest.mark.parametrize("outputs", [["y"], ["y", "", "new_values"]])
def test_rows_that_nobody_keeps_are_no_blocks(outputs: list[str]) -> None:
    with pytest.raises(Mismatch, match="not kept"):
        page(attention({}, 1, 0, {}, outputs)[0])


def test_tokens_that_see_later_ones_are_no_blocks() -> None:
    with pytest.raises(Mismatch, match="later ones"):
        page(attention({"causal": 0}, 5, 0, {}, ["y", *PRESENT])[0])


@pytest.mark.parametrize("is_input", [True, False])
def test_rows_of_unknown_axes_are_no_blocks(is_input: bool) -> None:
    model, _ = attention({}, 1, 0, {}, ["y", *PRESENT])
    keys = model.graph.input[1]
    keys.type.tensor_type.ClearField("shape")
    if not is_input:
        model.graph.node.insert(0, helper.make_node("Identity", ["before"], ["keys"]))
        keys.name = "before"
    with pytest.raises(Mismatch, match="axes" if is_input else "no inputs"):
        page(model)

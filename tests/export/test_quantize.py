"""int8 graphs against the arithmetic that they are made of, written in numpy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from kvasir.export.graphs.decoder import export_graph
from kvasir.export.rewrite import branches
from kvasir.export.rounding.formulas import BLOCK, quantize_blocks, quantize_rows
from kvasir.export.rounding.quantize import products, quantize
from kvasir.export.rounding.weights import Weights
from kvasir.model.directory import GRAPH_FILE, WEIGHTS_FILE
from kvasir.model.onnx.runtime import onnxruntime, open_cpu_session
from tests.kit import paged_reference
from tests.kit.random_models import RandomModel, export_random, measure_scales
from tests.model.variants import VARIANTS

Floats = NDArray[np.float32]


def quantized_product(x: Floats, weight: Floats) -> Floats:
    """[..., in] x [in, out], a token at a time: the definition."""
    scales = np.maximum(np.abs(weight).max(axis=0) / 127, 1e-12)
    whole = np.rint(weight / scales)
    result = np.zeros((*x.shape[:-1], weight.shape[1]), dtype=np.float32)
    for place in np.ndindex(*x.shape[:-1]):
        scale = np.abs(x[place]).max() * np.float32(1 / 127)
        if scale:
            result[place] = np.rint(x[place] / scale) @ whole * scales * scale
    return result


def value(name: str, array: NDArray[np.generic]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    kind = ir.TensorType(tensor.dtype)
    return ir.Value(name=name, shape=ir.Shape(array.shape), type=kind, const_value=tensor)


def small_model(table: Floats, weight: Floats, folder: Path) -> onnxruntime.InferenceSession:
    """Make ids → embedding → product → hidden; chosen rows → tied head → logits."""
    d_model = table.shape[1]
    ids = ir.Value(
        name="ids", shape=ir.Shape(["batch", "sequence"]), type=ir.TensorType(ir.DataType.INT64)
    )
    rows = ir.Value(name="rows", shape=ir.Shape(["rows"]), type=ir.TensorType(ir.DataType.INT64))
    embedding, matrix = value("embedding.weight", table), value("matrix.T", weight)
    flat = value("flat", np.array([-1, d_model]))
    looked_up = ir.node("Gather", [embedding, ids])
    product = ir.node("MatMul", [looked_up.outputs[0], matrix])
    reshaped = ir.node("Reshape", [product.outputs[0], flat])
    chosen = ir.node("Gather", [reshaped.outputs[0], rows])
    head = ir.node("Gemm", [chosen.outputs[0], embedding], attributes={"transB": 1})
    for node, name in ((product, "hidden"), (head, "logits")):
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [ids, rows],
        [product.outputs[0], head.outputs[0]],
        nodes=[looked_up, product, reshaped, chosen, head],
        initializers=[embedding, matrix, flat],
        opset_imports={"": 23},
        name="small",
    )
    model = ir.Model(graph, ir_version=10)
    tensors = {"embedding.weight": table, "matrix": weight.T}
    weights = Weights({name: torch.tensor(tensor) for name, tensor in tensors.items()})
    quantize(model, weights, "int8")
    ir.save(model, folder / "small.onnx")
    return open_cpu_session(folder / "small.onnx")


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_large_products_do_not_overflow(tmp_path: Path, sign: float) -> None:
    """x86 without VNNI would add two products in 16 bits."""
    table = np.ones((8, 64), dtype=np.float32)
    weight = np.full((64, 64), sign * 0.5, dtype=np.float32)
    session, rows = small_model(table, weight, tmp_path), np.zeros(1, dtype=np.int64)
    for n_rows in (1, 4, 64):
        ids = np.zeros((n_rows, 1), dtype=np.int64)
        hidden, logits = session.run(["hidden", "logits"], {"ids": ids, "rows": rows})
        assert np.allclose(hidden, sign * 32.0, rtol=1e-5)
        assert np.allclose(logits, sign * 2048.0, rtol=1e-5)


def test_a_quantised_graph_is_its_definition(tmp_path: Path) -> None:
    """Rows of zeros and outliers too; of no row at all ONNX Runtime would reduce the wrong axis."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((40, 32), dtype=np.float32)
    table[3], table[5, 7] = 0.0, 300.0
    weight = generator.standard_normal((32, 32), dtype=np.float32)
    weight *= generator.uniform(0.01, 3, 32).astype(np.float32)
    session = small_model(table, weight, tmp_path)
    ids = np.array([[3, 5, 0, 7], [39, 5, 3, 1]])
    steps, scales = (of.numpy() for of in quantize_rows(torch.tensor(table)))
    embedded = (steps * scales[:, None])[ids].astype(np.float32)
    expected = quantized_product(embedded, weight)
    for n_rows in (0, 1, 5):
        rows = generator.integers(8, size=n_rows)
        hidden, logits = session.run(["hidden", "logits"], {"ids": ids, "rows": rows})
        assert np.allclose(hidden, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        assert logits.shape == (n_rows, 40)
        of_rows = quantized_product(hidden.reshape(8, 32)[rows], table.T)
        assert np.allclose(logits, of_rows, rtol=1e-4, atol=1e-3)


def test_the_tied_matrix_is_stored_once(
    random_model: RandomModel, random_int8_model: RandomModel
) -> None:
    model = ir.load(random_int8_model.graph)
    matrices = [
        v.const_value
        for v in model.graph.initializers.values()
        if v.const_value and len(v.const_value.shape) == 2
    ]
    assert [list(m.shape) for m in matrices if 300 in list(m.shape)] == [[300, 192]]
    kinds = {m.dtype for m in matrices if m.name and not re.search("rotary|mixing", m.name)}
    assert kinds == {ir.DataType.INT8}
    sizes = [
        (model.graph.parent / "model.onnx.data").stat().st_size
        for model in (random_int8_model, random_model)
    ]
    assert sizes[0] < 0.35 * sizes[1]


@pytest.mark.parametrize("name", ["int8", "windowed", "biased", "mamba", "gpt2"])
def test_every_kind_of_decoder_can_be_quantised(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """No product with floats is left but mixing, and the logits stay near PyTorch's."""
    if name == "gpt2":
        model = export_random(tmp_path, "int8", **VARIANTS[name])
    else:
        model = request.getfixturevalue(f"random_{name}_model")
    figures = model.verify()
    assert figures.max_logit_error < 0.5
    assert figures.greedy_agreement > 0.8
    assert not products(ir.load(model.graph).graph)


@pytest.mark.parametrize(("n_in", "n_out"), [(64, 1), (40, 7)])
def test_blocks_are_what_matmulnbits_unpacks(n_in: int, n_out: int) -> None:
    """Against ONNX Runtime on the unit matrix; with zeros, and a short last block."""
    matrix = np.random.default_rng(2).standard_normal((n_in, n_out), dtype=np.float32)
    matrix[:32, 0] = 0.0
    packed, scales = (of.numpy() for of in quantize_blocks(torch.from_numpy(matrix.T)))
    x = ir.Value(name="x", shape=ir.Shape(["rows", n_in]), type=ir.TensorType(ir.DataType.FLOAT))
    inputs = [x, value("packed", packed), value("scales", scales)]
    sizes = {"K": n_in, "N": n_out, "bits": 4, "block_size": BLOCK}
    node = ir.node("MatMulNBits", inputs, attributes=sizes, domain="com.microsoft")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    opsets = {"": 23, "com.microsoft": 1}
    parts = {"nodes": [node], "initializers": inputs[1:], "opset_imports": opsets}
    graph = ir.Graph([x], node.outputs, **parts, name="blocks")  # type: ignore[arg-type]
    model = ir.serde.serialize_model(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (unpacked,) = session.run(None, {"x": np.eye(n_in, dtype=np.float32)})
    steps = np.abs(scales).reshape(n_out, -1).repeat(BLOCK, axis=1)[:, :n_in].T
    # Half a step, or a whole one on the shorter side.
    assert (np.abs(unpacked - matrix) <= steps * 1.001).all()
    assert np.abs(unpacked - matrix).mean() < 0.3 * steps.mean()


@pytest.mark.parametrize(
    ("name", "bits"), [("qwen3 mixture", 8), ("qwen3 mixture", 4), ("gpt-oss", 4)]
)
def test_experts_are_those_of_the_rounded_weights(name: str, bits: int, tmp_path: Path) -> None:
    """Against PyTorch with the weights that the graph holds; activations differ by a rounding.

    Prompts of int4 have int8 attention, and the same experts.
    """
    model = export_random(tmp_path, f"int{bits}", **VARIANTS[name])
    graph = ir.load(model.graph).graph
    n_mixtures = sum(map(model.config.has_experts, range(2)))
    operators = [[node.op_type for node in part] for part in (graph, *branches(graph))]
    assert [of.count("QMoE") for of in operators] == [n_mixtures] + [0] * 4
    if bits == 4:
        assert ["MatMulNBits" in of for of in operators] == [False] + [True, False] * 2
        assert ["MatMulIntegerToFloat" in of for of in operators] == [True] + [False, True] * 2
    of_scales = [v for name, v in graph.initializers.items() if name.endswith(f"int{bits}.scales")]
    stored = ir.DataType.FLOAT16 if bits == 4 else ir.DataType.FLOAT
    assert {scales.dtype for scales in of_scales} == {stored}
    steps = []
    with torch.no_grad():
        for weight in model.decoder.parameters():
            if weight.dim() == 3:
                rows = weight.flatten(0, 1)
                packed, scales = (of.numpy() for of in quantize_blocks(rows, bits))
                unpacked = paged_reference.unpack(packed, scales, bits).T
                steps.append(np.abs(unpacked - rows.numpy()).max())
                weight.copy_(torch.from_numpy(unpacked.copy()).view_as(weight))
    assert min(steps) > 0
    router = graph.initializers["blocks.1.feed_forward.router.weight.T"]
    assert router.dtype == ir.DataType.FLOAT
    figures = model.verify()
    assert figures.max_logit_error < (0.5 if bits == 8 else 2.5)
    assert figures.greedy_agreement > (0.8 if bits == 8 else 0.6)


def test_int4_stays_near_and_computes_prompts_and_the_head_in_int8(
    random_int4_model: RandomModel,
) -> None:
    model = random_int4_model
    parts = {"": [graph := ir.load(model.graph).graph]}
    for branch in branches(graph):
        parts.setdefault(str(branch.name).partition(".")[0], []).append(branch)
    found = {
        name: [node.op_type for part in of for node in part if node.op_type.startswith("MatMul")]
        for name, of in parts.items()
    }
    n_layer = model.config.n_layer
    assert found == {
        "": ["MatMulIntegerToFloat"],
        "decode": ["MatMulNBits"] * 4 * n_layer,
        "prompt": [*["MatMulIntegerToFloat"] * 3, "MatMul", "MatMulIntegerToFloat"] * n_layer,
    }
    figures = model.verify()
    assert 0.01 < figures.max_logit_error < 1.5
    assert figures.greedy_agreement > 0.6


def test_int4_without_int8_prompts_has_one_copy_of_its_weights(
    random_int4_model: RandomModel, tmp_path: Path
) -> None:
    model, path = random_int4_model, tmp_path / GRAPH_FILE
    weights, scales = model.decoder.state_dict(), measure_scales(model.decoder)
    export_graph(model.config, weights, path, "int4", scales, int8_prompts=False)
    graph = ir.load(path).graph
    operators = [node.op_type for node in graph]
    assert operators.count("MatMulNBits") == 4 * model.config.n_layer
    assert operators.count("MatMulIntegerToFloat") == 1
    assert {node.op_type for of in branches(graph) for node in of} == {
        *("GroupQueryAttention", "Constant")
    }
    sizes = [(of.parent / WEIGHTS_FILE).stat().st_size for of in (path, model.graph)]
    assert sizes[0] < 0.6 * sizes[1]
    assert RandomModel(model.decoder, path).verify().greedy_agreement > 0.5

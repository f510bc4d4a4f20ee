"""Graphs of one operator of ours, and sessions that run them.

python -m tests.kernels.graphs writes the graph of the trial, kernels/self_test.onnx.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from kvasir.kernels import library, self_test
from kvasir.model.onnx.runtime import onnxruntime

FLOATS = NDArray[np.float32]
INPUTS = ("x", "weight", "scales", "bias", "norm", "norm_bias", "residual")
ADAPTER_INPUTS = ("adapters", "adapter_table")
needs_library = pytest.mark.skipif(
    not library.FILE.exists(), reason="no compiler built kernels/libkvasir.so"
)


def graph(
    operator: str,
    constants: dict[str, Any],
    attributes: dict[str, Any] | None = None,
    variables: tuple[str, ...] = ("x",),
) -> bytes:
    """Return a model of one node. Inputs that are neither constants nor variables are absent."""
    floats = TensorProto.FLOAT
    others = {"weight": TensorProto.INT8} | dict.fromkeys(ADAPTER_INPUTS, TensorProto.INT64)
    types = {name: others.get(name, floats) for name in variables}
    return _one_node(operator, INPUTS + ADAPTER_INPUTS, attributes or {}, constants, types)


ATTENTION_INPUTS = {
    "qkv": TensorProto.FLOAT,
    "keys": TensorProto.INT8,
    "key_scales": TensorProto.FLOAT,
    "values": TensorProto.INT8,
    "value_scales": TensorProto.FLOAT,
    "cumulative_sequence_length": TensorProto.INT32,
    "past_seqlens": TensorProto.INT32,
    "block_table": TensorProto.INT32,
    "cos": TensorProto.FLOAT,
    "sin": TensorProto.FLOAT,
    "slopes": TensorProto.FLOAT,
    "sinks": TensorProto.FLOAT,
}
CACHES = ("keys", "key_scales", "values", "value_scales")
FLOAT_CACHES = ("keys", "values")  # of `Attention32`


def attention_graph(
    attributes: dict[str, Any], constants: dict[str, Any], caches: Sequence[str] = CACHES
) -> bytes:
    """Return a model of one `Attention`, whose outputs are y and new_ before a cache's name.

    Of FLOAT_CACHES it is an `Attention32`.
    """
    types, operator = dict(ATTENTION_INPUTS), "Attention"
    if caches == FLOAT_CACHES:
        operator = "Attention32"
        types |= dict.fromkeys(caches, TensorProto.FLOAT)
    variables = ["qkv", *caches, *list(types)[5:8]]
    names = [name if name in (*constants, *variables) else "" for name in types]
    outputs = {"y": TensorProto.FLOAT} | {f"new_{name}": types[name] for name in caches}
    made = ["y", *(f"new_{name}" if name in caches else "" for name in CACHES)]
    while not made[-1]:
        made.pop()
    node = helper.make_node(operator, names, made, domain="kvasir", **attributes)
    inputs, results = (
        [helper.make_tensor_value_info(name, of_type, None) for name, of_type in values.items()]
        for values in ({name: types[name] for name in variables}, outputs)
    )
    initializers = [numpy_helper.from_array(of, name) for name, of in constants.items()]
    body = helper.make_graph([node], "one", inputs, results, initializers)
    return _bytes_of(body)


TEXT_INPUTS = ("qkv", "cumulative_sequence_length", "cos", "sin", "biases", "sinks")


def text_graph(
    attributes: dict[str, Any], constants: dict[str, Any], operator: str = "TextAttention"
) -> bytes:
    """Return a model of one `TextAttention`, or of the operator for floats."""
    types = {"qkv": TensorProto.FLOAT, "cumulative_sequence_length": TensorProto.INT32}
    return _one_node(operator, TEXT_INPUTS, attributes, constants, types)


ROW_INPUTS = ("qkv", "keys", "values", "seqlens_k", "cos", "sin", "biases", "sinks")


def row_graph(
    attributes: dict[str, Any],
    constants: dict[str, Any],
    variables: Collection[str],
    operator: str = "RowAttention",
) -> bytes:
    """Return a model of one `RowAttention`, which has its rows as outputs if it appends to them."""
    types = dict.fromkeys(variables, TensorProto.FLOAT) | {"seqlens_k": TensorProto.INT32}
    of_rows = TensorProto.INT8 if operator == "RowAttention8" else TensorProto.FLOAT
    types |= dict.fromkeys(("keys", "values"), of_rows)
    model = ModelProto.FromString(_one_node(operator, ROW_INPUTS, attributes, constants, types))
    if attributes.get("appends"):
        made = ["new_keys", "new_values"]
        model.graph.node[0].output.extend(made)
        rows = (helper.make_tensor_value_info(name, of_rows, None) for name in made)
        model.graph.output.extend(rows)
    return bytes(model.SerializeToString())


def norm_graph(attributes: dict[str, Any], constants: dict[str, Any]) -> bytes:
    """Return a model of one `Norm`."""
    names = ("x", "weight", "bias")
    return _one_node("Norm", names, attributes, constants, {"x": TensorProto.FLOAT})


def activation_graph(activation: str) -> bytes:
    """Return a model of one `Activation`."""
    types = {"x": TensorProto.FLOAT}
    return _one_node("Activation", ("x",), {"activation": activation}, {}, types)


def head_linear_graph(weight: FLOATS) -> bytes:
    """Return a model of one `HeadLinear`."""
    types = {"x": TensorProto.FLOAT}
    return _one_node("HeadLinear", ("x", "weight"), {}, {"weight": weight}, types)


def experts_graph(operator: str, constants: dict[str, Any], limit: float = 0.0) -> bytes:
    """Return a model of one `Experts`, `Experts4` or `Experts32`."""
    types = {"x": TensorProto.FLOAT, "routes": TensorProto.FLOAT}
    names = ("x", "routes", "up", "up_scales", "up_bias", "down", "down_scales", "down_bias")
    return _one_node(operator, names, {"limit": limit}, constants, types)


def _one_node(
    operator: str,
    names: tuple[str, ...],
    attributes: dict[str, Any],
    constants: dict[str, Any],
    types: Mapping[str, int],
) -> bytes:
    """Return a model of one node; types: of its variables. Other inputs than these are absent."""
    given = [name if name in constants or name in types else "" for name in names]
    while not given[-1]:
        given.pop()
    node = helper.make_node(operator, given, ["y"], domain="kvasir", **attributes)
    inputs = [helper.make_tensor_value_info(name, of, None) for name, of in types.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    initializers = [numpy_helper.from_array(of, name) for name, of in constants.items()]
    return _bytes_of(helper.make_graph([node], "one", inputs, [output], initializers))


def _bytes_of(body: GraphProto) -> bytes:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("kvasir", 1)]
    return bytes(helper.make_model(body, opset_imports=opsets, ir_version=10).SerializeToString())


def session(model: bytes | str, path: str = "auto", threads: int = 1) -> Any:
    """Open a session whose operators take a path."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    library.Library(library.FILE, path).register(options)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def usable_paths() -> list[str]:
    """Return the paths that this machine can run."""
    if not library.FILE.exists():
        return []
    weight, scales = np.zeros((1, 1), dtype=np.int8), np.ones(1, dtype=np.float32)
    model = graph("Linear", {"weight": weight, "scales": scales})
    found = []
    for path in ("scalar", "avx2", "avx512", "amx", "neon"):
        try:
            session(model, path)
            found.append(path)
        except Exception as error:
            if "kvasir.path" not in str(error):
                raise
    return found


def self_test_graph() -> bytes:
    """Return the graph of the trial: an input or constant is named by operator and place."""
    nodes, inputs, outputs, constants = [], [], [], []
    for trial in self_test.trials():
        operator, places = trial.operator, {*trial.inputs, *trial.constants}
        names = [f"{operator}.{i}" if i in places else "" for i in range(max(places) + 1)]
        made = [f"{operator}.made.{i}" if i in trial.outputs else "" for i in range(5)]
        made = [operator, *made[1 : trial.outputs[-1] + 1]]
        nodes.append(helper.make_node(operator, names, made, domain="kvasir", **trial.attributes))
        for place, array in trial.inputs.items():
            of_type = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(names[place], of_type, None))
        for place, array in trial.constants.items():
            constants.append(numpy_helper.from_array(array, names[place]))
        outputs.append(helper.make_tensor_value_info(operator, TensorProto.FLOAT, None))
    return _bytes_of(helper.make_graph(nodes, "trial", inputs, outputs, constants))


if __name__ == "__main__":
    self_test.GRAPH.write_bytes(self_test_graph())

"""Graphs damaged at random: an error that names the node or its input, or a run, but no crash.

python -m tests.kernels.test_damaged_graphs FIRST N tries N damages, in a process that may crash.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from kvasir.kernels.graph import LINEARS
from tests.kernels import test_experts as experts
from tests.kernels import test_row_attention as rows
from tests.kernels import test_states as states
from tests.kernels.graphs import (
    CACHES,
    FLOAT_CACHES,
    activation_graph,
    attention_graph,
    experts_graph,
    graph,
    head_linear_graph,
    needs_library,
    norm_graph,
    row_graph,
    session,
    text_graph,
)
from tests.kernels.test_attention import ints
from tests.kernels.test_attention_refusals import HEADS, fitting

TRIALS = 250
NAME = "layer.7"
TYPES = [np.float32, np.int8, np.uint8, np.int32, np.float64]
INTEGERS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 16, 100, 2**31 - 1, 2**31, 2**63 - 1]
FLOATS = [-1.0, 0.0, 1e-45, 3e38, float("inf"), float("nan")]
OPERATORS = [*LINEARS, "Attention", "TextAttention", "Attention32", "TextAttention32", "Norm"]
OPERATORS += ["Activation", "HeadLinear", "Convolution", "Memory", *experts.OPERATORS, "Other"]
OPERATORS += ["RowAttention", "RowAttention8"]
ATTRIBUTES = ["transposed", "block", "gated", "interleaved", "mixed", "looks_ahead", "silu"]
TEXTS = ["", "rms", "layer", "softmax", "silu", "exp", "x" * 1000]


def bases(generator: np.random.Generator) -> list[tuple[bytes, dict[str, Any]]]:
    """Return sound models of one node, and what they run on."""

    def ones(*shape: int) -> Any:
        return generator.random(shape, dtype=np.float32)

    x = {"x": ones(3, 64), "residual": ones(3, 20)}
    around = {"bias": ones(20), "norm": ones(64), "norm_bias": ones(64)}
    weight = generator.integers(-127, 128, (64, 20), dtype=np.int8)
    nibbles = generator.integers(0, 256, (20, 2, 16), dtype=np.uint8)
    attributes = {"norm": "layer", "epsilon": 1e-5, "activation": "silu"}
    tables = {"cos": ones(20, 8), "sin": ones(20, 8), "slopes": ones(4), "sinks": ones(4)}
    linear, linear_4, with_halves = (
        graph(operator, constants | around, attributes, tuple(x))
        for operator, constants in (
            ("Linear", {"weight": weight, "scales": ones(20)}),
            ("Linear4", {"weight": nibbles, "scales": ones(20, 2)}),
            ("Linear4", {"weight": nibbles, "scales": ones(20, 2).astype(np.float16)}),
        )
    )
    attention = attention_graph({**HEADS, "window": 9, "softcap": 3.0}, tables)
    shared = {name: of for name, of in fitting().items() if not name.startswith("value")}
    shared["qkv"] = ones(3, 6 * 32)
    of_floats = {name: of for name, of in fitting().items() if not name.endswith("scales")}
    of_floats |= {name: ones(3, 2, 16, 32) for name in FLOAT_CACHES}
    rotation = {"cos": ones(20, 8), "sin": ones(20, 8)}
    of_texts = rotation | {"biases": ones(1, 4, 17, 17), "sinks": ones(4)}
    texts = {"qkv": ones(20, 8 * 32), "cumulative_sequence_length": ints(0, 3, 3, 20)}
    rated = states.MATRICES | {"rate": ones(2, 3, 2), "decay": -ones(2, 3, 8)}
    taps = {"weight": ones(5, 1, 3), "bias": ones(5)}
    of_bytes = {
        name: of.astype(np.int8) if name in FLOAT_CACHES else of
        for name, of in rows.fitting().items()
    }
    mixtures = [
        (
            experts_graph(operator, experts.mixture(generator, operator, (3, 32, 32, 64))),
            experts.rows_of(generator, 5, 3, 32),
        )
        for operator in experts.OPERATORS
    ]
    return [
        (linear, x),
        (linear_4, x),
        (with_halves, x),
        (attention, fitting()),
        (attention_graph(HEADS, rotation, CACHES[:2]), shared),
        (text_graph({**HEADS, "window": 5, "looks_ahead": 1}, of_texts), texts),
        (graph("Linear32", {"weight": ones(64, 20)} | around, attributes, tuple(x)), x),
        (attention_graph({**HEADS, "window": 9}, tables, FLOAT_CACHES), of_floats),
        (text_graph({**HEADS, "looks_ahead": 1}, of_texts, "TextAttention32"), texts),
        (norm_graph({"norm": "layer", "epsilon": 0.1}, {"weight": ones(64), "bias": ones(64)}), x),
        (norm_graph({"norm": "softmax"}, {}), x),
        (activation_graph("softplus"), x),
        (head_linear_graph(ones(3, 64, 5)), {"x": ones(2, 3, 64)}),
        (states.graph("Convolution", states.TOKENS, taps, silu=1), dict(states.TOKENS)),
        (states.graph("Memory", states.MATRICES, {}, scale=0.5), dict(states.MATRICES)),
        (states.graph("Memory", rated, {}), rated),
        *mixtures,
        (row_graph({**HEADS, "appends": 1}, {}, rows.fitting()), rows.fitting()),
        (row_graph({**HEADS, "appends": 1}, {}, rows.fitting(), "RowAttention8"), of_bytes),
    ]


def random_shape(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Change one dimension, or take or add one."""
    place = int(generator.integers(len(shape) + 1))
    size = int(generator.choice([0, 1, 2, 15, 16, 17, 64, 300]))
    return (*shape[:place], size, *shape[place + int(generator.integers(2)) :])


def random_array(generator: np.random.Generator, like: Any) -> Any:
    """Return an array of another shape, another type or other numbers."""
    change, shape, dtype = generator.integers(3), like.shape, like.dtype
    if change == 0:
        shape = random_shape(generator, shape)
    elif change == 1:
        dtype = TYPES[generator.integers(len(TYPES))]
    found = generator.integers(-3, 20, shape) if change else generator.integers(0, 2, shape)
    if np.issubdtype(dtype, np.floating) and change == 2:
        return generator.choice(np.array(FLOATS, dtype=dtype), shape)
    return found.astype(dtype)


def damage_node(generator: np.random.Generator, node: NodeProto) -> None:
    """Change an attribute, an input or the operator."""
    kind = generator.integers(4)
    if kind == 0 and node.attribute:
        attribute = node.attribute[generator.integers(len(node.attribute))]
        values: list[list[Any]] = [INTEGERS, FLOATS, TEXTS]
        value = values[generator.integers(3)]
        made = helper.make_attribute(attribute.name, value[generator.integers(len(value))])
        node.attribute.remove(attribute)
        if generator.random() < 0.8:
            node.attribute.append(made)
    elif kind == 1:
        name = ATTRIBUTES[generator.integers(len(ATTRIBUTES))]
        if all(attribute.name != name for attribute in node.attribute):
            number = int(generator.choice([-1, 0, 1, 2, 64, 2**31]))
            node.attribute.append(helper.make_attribute(name, number))
    elif kind == 2:
        place = int(generator.integers(len(node.input)))
        other = node.input[generator.integers(len(node.input))]
        node.input[place] = other if generator.random() < 0.5 else ""
        if generator.random() < 0.3:
            del node.input[int(generator.integers(1, len(node.input) + 1)) :]
    else:
        node.op_type = OPERATORS[generator.integers(len(OPERATORS))]


def damaged(seed: int) -> tuple[bytes, dict[str, Any]]:
    """Return a damaged model, and inputs that may be damaged."""
    generator = np.random.default_rng(seed)
    models = bases(generator)
    base, inputs = models[generator.integers(len(models))]
    model = ModelProto.FromString(base)
    node, constants = model.graph.node[0], model.graph.initializer
    node.name = NAME
    for _ in range(generator.integers(1, 3)):
        what = generator.integers(4)
        if what == 0:
            damage_node(generator, node)
        elif what == 1:
            name = list(inputs)[generator.integers(len(inputs))]
            given = random_array(generator, inputs[name])
            inputs[name] = given.astype(inputs[name].dtype)  # which the runtime would refuse
        elif constants:
            tensor = constants[generator.integers(len(constants))]
            if what == 2 and generator.random() < 0.2:
                constants.remove(tensor)
            else:
                other = random_array(generator, numpy_helper.to_array(tensor))
                tensor.CopyFrom(numpy_helper.from_array(other, tensor.name))
    return model.SerializeToString(), inputs


def run(first: int, n: int) -> None:
    """Open damaged graphs and run them. Raises AssertionError for an error without a name."""
    for seed in range(first, first + n):
        sys.stdout.write(f"{seed}\n")
        sys.stdout.flush()
        model, inputs = damaged(seed)
        node = ModelProto.FromString(model).graph.node[0]
        try:
            opened = session(model, threads=2)
            named = {value.name for value in opened.get_inputs()}
            opened.run(None, {name: of for name, of in inputs.items() if name in named})
        except Exception as error:
            names = {NAME, node.op_type, *node.input, *inputs} - {"", "x"}
            if not any(name in str(error) for name in names):
                raise AssertionError(f"damage {seed}: {error}") from None


@needs_library
def test_a_damaged_graph_crashes_nothing() -> None:
    command = [sys.executable, "-m", __name__, "0", str(TRIALS)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = "none"
    with suppress(IndexError):
        last = ended.stdout.split()[-1]
    assert ended.returncode == 0, f"damage {last}: {ended.returncode} {ended.stderr[-2000:]}"


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))

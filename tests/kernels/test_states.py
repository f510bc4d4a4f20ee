"""`Convolution` and `Memory` on every path of this machine: against PyTorch, and each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.kernels.graphs import FLOATS, _bytes_of, needs_library, session, usable_paths
from tests.kernels.test_linear import floats, same_bits
from tests.kit.recurrences import run_by_token

pytestmark = needs_library
CONVOLUTION = ("x", "weight", "bias", "past", "n_new")
MEMORY = ("query", "key", "value", "past", "decay", "rate", "n_new")


def graph(
    operator: str, inputs: dict[str, Any], constants: dict[str, Any], **attributes: Any
) -> bytes:
    """Return a model of one node, whose outputs are y and present."""
    names = CONVOLUTION if operator == "Convolution" else MEMORY
    node = helper.make_node(
        operator,
        [name if name in inputs or name in constants else "" for name in names],
        ["y", "present"],
        domain="kvasir",
        **attributes,
    )
    types = {"n_new": TensorProto.INT64}
    values = [
        helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None)
        for name in (*inputs, *node.output)
    ]
    initializers = [numpy_helper.from_array(of, name) for name, of in constants.items()]
    given = values[: len(inputs)], values[len(inputs) :]
    return _bytes_of(helper.make_graph([node], "one", *given, initializers))


def check(model: bytes, inputs: dict[str, Any], expected: tuple[FLOATS, FLOATS]) -> None:
    """Compare each path with what is expected, the scalar one, rows alone, and cut rows."""
    scalar = session(model, "scalar").run(None, inputs)
    counts, n_tokens = inputs["n_new"], scalar[0].shape[1]
    for row, count in enumerate(counts):
        np.testing.assert_allclose(scalar[0][row, :count], expected[0][row, :count], 1e-4, 1e-4)
        np.testing.assert_allclose(scalar[1][row], expected[1][row], rtol=1e-4, atol=1e-4)
    timed = [name for name in inputs if name not in ("past", "n_new")]
    for path in usable_paths():
        opened = session(model, path, 2)
        assert all(map(same_bits, opened.run(None, inputs), scalar)), path
        for row, count in enumerate(counts):
            state, parts, cut = inputs["past"][row, None], [], count // 3
            for start, end in ((0, cut), (cut, count)):
                part = {
                    name: inputs[name][row, None, start : max(end, start + 1)] for name in timed
                }
                if start == n_tokens:
                    part = {name: inputs[name][row, None, :1] for name in timed}
                part |= {"past": state, "n_new": np.array([end - start])}
                y, state = opened.run(None, part)
                parts.append(y[:, : end - start])
            assert same_bits(np.concatenate(parts, 1)[0], scalar[0][row, :count]), path
            assert same_bits(state[0], scalar[1][row]), path


@given(
    seed=st.integers(0, 2**32 - 1),
    channels=st.integers(1, 70),
    kernel=st.integers(2, 7),
    tokens=st.integers(1, 9),
    silu=st.booleans(),
    has_bias=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_convolution(
    seed: int, channels: int, kernel: int, tokens: int, silu: bool, has_bias: bool
) -> None:
    random = np.random.default_rng(seed)
    weight, bias = floats(random, channels, 1, kernel), floats(random, channels)
    inputs: dict[str, Any] = {
        "x": floats(random, 3, tokens, channels),
        "past": floats(random, 3, kernel - 1, channels),
        "n_new": random.integers(0, tokens + 1, size=3),
    }
    constants = {"weight": weight} | ({"bias": bias} if has_bias else {})
    known = np.concatenate((inputs["past"], inputs["x"]), axis=1)
    y = torch.nn.functional.conv1d(
        torch.from_numpy(known).double().transpose(1, 2),
        torch.from_numpy(weight).double(),
        torch.from_numpy(bias).double() if has_bias else None,
        groups=channels,
    ).transpose(1, 2)
    y = torch.nn.functional.silu(y) if silu else y
    present = [row[n : n + kernel - 1] for row, n in zip(known, inputs["n_new"], strict=True)]
    model = graph("Convolution", inputs, constants, silu=int(silu))
    check(model, inputs, (y.numpy().astype(np.float32), np.stack(present)))


@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.integers(1, 5),
    n_keys=st.integers(1, 40),
    n_values=st.integers(1, 40),
    tokens=st.integers(1, 9),
    rated=st.booleans(),
    by_key=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_memory(
    seed: int, heads: int, n_keys: int, n_values: int, tokens: int, rated: bool, by_key: bool
) -> None:
    random = np.random.default_rng(seed)
    inputs: dict[str, Any] = {
        "query": floats(random, 3, tokens, heads * n_keys),
        "key": floats(random, 3, tokens, heads * n_keys) / np.float32(n_keys**0.5),
        "value": floats(random, 3, tokens, heads * n_values),
        "past": floats(random, 3, heads, n_keys, n_values),
        "decay": -(np.abs(floats(random, 3, tokens, heads * (n_keys if by_key else 1))) ** 3),
        "n_new": random.integers(0, tokens + 1, size=3),
    }
    if rated:
        inputs["rate"] = random.random((3, tokens, heads), dtype=np.float32)
    rows, presents = [], []
    for row, n in enumerate(inputs["n_new"]):
        parts = [
            torch.from_numpy(inputs[name][row, None, :n]).double().unflatten(-1, (heads, -1))
            for name in ("query", "key", "value")
        ]
        rates = [torch.from_numpy(inputs["rate"][row, None, :n]).double()] if rated else []
        decay = torch.from_numpy(inputs["decay"][row, None, :n]).double()
        decay = decay.unflatten(-1, (heads, -1)) if by_key else decay
        past = torch.from_numpy(inputs["past"][row, None]).double()
        read = torch.zeros(1, tokens, heads * n_values)
        if n:
            found, past = run_by_token(*parts, past, decay, *rates)
            read[:, :n] = 0.5 * found.flatten(-2)
        rows.append(read[0].numpy())
        presents.append(past[0].numpy())
    model = graph("Memory", inputs, {}, scale=0.5)
    check(model, inputs, (np.stack(rows), np.stack(presents)))


MATRICES = {
    "query": np.zeros((2, 3, 8), np.float32),
    "key": np.zeros((2, 3, 8), np.float32),
    "value": np.zeros((2, 3, 6), np.float32),
    "past": np.zeros((2, 2, 4, 3), np.float32),
    "decay": np.zeros((2, 3, 2), np.float32),
    "n_new": np.full(2, 3),
}
TOKENS = {
    "x": np.zeros((2, 3, 5), np.float32),
    "past": np.zeros((2, 2, 5), np.float32),
    "n_new": np.full(2, 3),
}


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        (
            "Memory",
            {"key": np.zeros((2, 3, 9), np.float32)},
            r"key is float\[2, 3, 9\].* \[2, 3, 8\]",
        ),
        (
            "Memory",
            {"decay": np.zeros((2, 3, 4), np.float32)},
            r"decay is float\[2, 3, 4\].* \[2, 3, 2\]",
        ),
        ("Memory", {"n_new": np.full(2, 4)}, "n_new has 4 of 3 tokens"),
        ("Memory", {"n_new": np.full(3, 1)}, r"n_new is int64\[3\]"),
        ("Memory", {"past": np.zeros((2, 2, 513, 3), np.float32)}, "keys from 1 to 512"),
        # The product of the other sizes may then be more than 64 bits hold.
        ("Memory", {"past": np.zeros((2, 2, 0, 3), np.float32)}, "keys from 1 to 512"),
        ("Convolution", {"n_new": np.full(2, -1)}, "n_new has -1 of 3"),
        ("Convolution", {"past": np.zeros((2, 3, 5), np.float32)}, r"past is float\[2, 3, 5\]"),
        ("Convolution", {"x": np.zeros((2, 3, 4), np.float32)}, r"x is float\[2, 3, 4\]"),
    ],
)
def test_an_unfit_run(operator: str, changes: dict[str, Any], message: str) -> None:
    fitting = MATRICES if operator == "Memory" else TOKENS
    constants = {} if operator == "Memory" else {"weight": np.zeros((5, 1, 3), np.float32)}
    opened = session(graph(operator, fitting, constants))
    with pytest.raises(Exception, match=message):
        opened.run(None, fitting | changes)


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3), (0, 1, 3)])
def test_an_unfit_convolution_does_not_open(shape: tuple[int, ...]) -> None:
    with pytest.raises(Exception, match="weight is float"):
        session(graph("Convolution", TOKENS, {"weight": np.zeros(shape, np.float32)}))

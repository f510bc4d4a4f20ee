"""A trial of each of the library's operators, in a process that may crash.

python -m kvasir.kernels.self_test LIBRARY PATH ends with 0 if the operators compute what they
should. A fault of one costs all of them: `kernels.library` then has stock operators used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.kernels.library import Library
from kvasir.model.onnx.runtime import onnxruntime

GRAPH = Path(__file__).with_name("self_test.onnx")  # of `trials`; tests/kernels/graphs.py writes it
Array = NDArray[Any]
Arrays = dict[int, Array]
_ROWS = 16  # enough to use several threads
_HEADS = {"heads": 4, "kv_heads": 2}
_SIZE = 16  # of a head


class Trial(NamedTuple):
    """A node, and its right first output.

    inputs, constants: by their places. error: beside a part of 10⁻⁵. outputs: their places.
    """

    operator: str
    attributes: dict[str, Any]
    inputs: Arrays
    constants: Arrays
    expected: Array
    error: float = 1e-6
    outputs: tuple[int, ...] = (0,)


def trials() -> list[Trial]:
    """Return a trial of each operator. What products round is whole already."""
    x = _steps(127, _ROWS, 64)
    x[:, ::32] = 127  # so that a step of 8 bits is 1
    return [*_products(x), *_mixtures(x), *_functions(x), *_states(x), *_attentions()]


def _products(x: Array) -> list[Trial]:
    weight, scales = _steps(127, 64, 80), (np.arange(80, dtype=np.float32) + 1) / 128
    residual, few = np.cos(_steps(127, _ROWS, 80)), _steps(7, 80, 64)
    of_heads, by_head = _steps(127, 4, 16, 8), x.reshape(_ROWS, 4, 16)
    of_bytes: Arrays = {1: weight.astype(np.int8), 2: scales, 3: scales[::-1] - np.float32(0.01)}
    of_nibbles: Arrays = {1: _nibbles(few, 16), 2: np.full((80, 2), 0.25, dtype=np.float32)}
    y = x @ weight
    return [
        Trial("Linear", {}, {0: x, 6: residual}, of_bytes, y * scales + of_bytes[3] + residual),
        Trial("Linear4", {}, {0: x}, of_nibbles, x @ few.T / 4),
        Trial("Linear32", {}, {0: x, 6: residual}, {1: weight}, y + residual),
        Trial(
            "HeadLinear",
            {},
            {0: by_head},
            {1: of_heads},
            np.einsum("thi,hio->tho", by_head, of_heads),
        ),
    ]


def _mixtures(x: Array) -> list[Trial]:
    """Each row has its numbers, times a gate of 64, multiplied by the matrix of one expert."""
    x, (up, bias) = x[:, :32], (np.zeros(shape, np.float32) for shape in ((2, 64, 32), (2, 64)))
    up[:, 1::2], bias[:, ::2] = np.eye(32), 64
    down, chosen = _steps(7, 2, 32, 32), np.arange(_ROWS) % 2
    inputs: Arrays = {0: x, 1: np.eye(2, dtype=np.float32)[chosen]}
    scales: Arrays = {3: np.ones((2, 64, 1), np.float32), 6: np.ones((2, 32, 1), np.float32)}
    matrices: dict[str, Arrays] = {
        "Experts": {2: (up + 128).astype(np.uint8), 5: (down + 128).astype(np.uint8), **scales},
        "Experts4": {2: _nibbles(up), 5: _nibbles(down), **scales},
        "Experts32": {2: up, 5: down},
    }
    expected = 64 * np.einsum("ti,toi->to", x, down[chosen])
    return [
        Trial(operator, {}, inputs, constants | {4: bias}, expected)
        for operator, constants in matrices.items()
    ]


def _functions(x: Array) -> list[Trial]:
    mean_square = (x.astype(float) ** 2).mean(axis=1, keepdims=True)
    rms = {"norm": "rms", "epsilon": 0.0}
    return [
        Trial("Activation", {"activation": "exp"}, {0: x / 16}, {}, np.exp(x / 16)),
        Trial("Norm", rms, {0: x}, {}, x / np.sqrt(mean_square)),
    ]


def _states(x: Array) -> list[Trial]:
    """Tokens after two that were zeros; and one token, which is read from an empty state."""
    tokens, n_new = x.reshape(2, 8, 64), np.array([8, 8])
    past, taps = np.zeros((2, 2, 64), dtype=np.float32), _steps(7, 64, 1, 3)
    known = np.concatenate((past, tokens), axis=1)
    convolved = sum(known[:, i : i + 8] * taps[:, 0, i] for i in range(3))
    inputs: Arrays = {0: tokens, 3: past, 4: n_new}
    query, key, value = (x[:, None, i : i + 16] for i in (0, 16, 32))
    of_memory: Arrays = {
        0: query,
        1: key,
        2: value,
        3: np.zeros((_ROWS, 1, 16, 16), dtype=np.float32),
    }
    of_memory |= {4: np.zeros((_ROWS, 1, 1), dtype=np.float32), 6: np.ones(_ROWS, dtype=np.int64)}
    read = (query * key).sum(axis=-1, keepdims=True) * value
    return [
        Trial("Convolution", {}, inputs, {1: taps}, np.asarray(convolved), outputs=(0, 1)),
        Trial("Memory", {}, of_memory, {}, read, outputs=(0, 1)),
    ]


def _attentions() -> list[Trial]:
    """Each sequence is one token, which attends to itself: its values come out."""
    heads, kv_heads = _HEADS["heads"], _HEADS["kv_heads"]
    qkv = np.sin(_steps(127, _ROWS, (heads + 2 * kv_heads) * _SIZE))
    values = qkv[:, -kv_heads * _SIZE :].reshape(_ROWS, kv_heads, _SIZE)
    copies = values.repeat(heads // kv_heads, axis=1).reshape(_ROWS, -1)
    scales = np.ones((_ROWS, kv_heads, 16), dtype=np.float32)
    blocks = np.zeros((*scales.shape, _SIZE), dtype=np.int8)
    rows, ends = blocks.astype(np.float32), np.zeros(_ROWS, dtype=np.int32)
    starts = np.arange(_ROWS + 1, dtype=np.int32)
    run: Arrays = {5: starts, 6: ends, 7: starts[:-1, None]}
    in_bytes: Arrays = {1: blocks, 2: scales, 3: blocks, 4: scales}
    in_floats: Arrays = {1: rows, 3: rows}
    in_rows: Arrays = {0: qkv[:, None], 1: rows, 2: rows, 3: ends}
    tens, in_byte_rows = (
        np.rint(10 * copies),
        in_rows | {0: 10 * qkv[:, None], 1: blocks, 2: blocks},
    )
    texts: Arrays = {0: qkv, 1: starts}
    error, attributes = 1 / 127, _HEADS | {"appends": 1}
    return [
        Trial("Attention", _HEADS, {0: qkv} | in_bytes | run, {}, copies, error, (0, 1, 2, 3, 4)),
        Trial("Attention32", _HEADS, {0: qkv} | in_floats | run, {}, copies, outputs=(0, 1, 3)),
        Trial("TextAttention", _HEADS, texts, {}, copies, error),
        Trial("TextAttention32", _HEADS, texts, {}, copies),
        Trial("RowAttention", attributes, in_rows, {}, copies[:, None], outputs=(0, 1, 2)),
        Trial("RowAttention8", attributes, in_byte_rows, {}, tens[:, None], outputs=(0, 1, 2)),
    ]


def _steps(most: int, *shape: int) -> Array:
    """Return whole numbers from -most to most."""
    numbers = np.arange(np.prod(shape)) * 37 % (2 * most + 1) - most
    return numbers.astype(np.float32).reshape(shape)


def _nibbles(numbers: Array, *last: int) -> Array:
    """Return numbers from -8 to 7 in bytes, the low half of each first."""
    nibbles = (numbers + 8).astype(np.uint8)
    packed = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return packed.reshape(*packed.shape[:-1], -1, *last) if last else packed


def run(library: Library) -> None:
    """Compare the operators' results with the right ones. Raises RuntimeError."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    library.register(options)
    session = onnxruntime.InferenceSession(GRAPH, options, providers=["CPUExecutionProvider"])
    tried = trials()
    inputs = {f"{t.operator}.{i}": array for t in tried for i, array in t.inputs.items()}
    results = session.run([trial.operator for trial in tried], inputs)
    for trial, result in zip(tried, results, strict=True):
        if not np.allclose(result, trial.expected, rtol=1e-5, atol=trial.error):
            wrong = np.abs(result - trial.expected).max()
            raise RuntimeError(f"{trial.operator} is wrong by up to {wrong}")


if __name__ == "__main__":
    try:
        run(library := Library(Path(sys.argv[1]), sys.argv[2]))
        library.resolved()
    except Exception as error:  # the parent tells its user
        sys.exit(str(error))

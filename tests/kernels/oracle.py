"""What `Linear`, `Linear4` and `Linear32` mean, in float64: slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kit.linear_reference import mix

DOUBLES = NDArray[np.float64]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: DOUBLES) -> DOUBLES:
    return 1 / (1 + np.exp(-x))


ACTIVATIONS: dict[str, Callable[[DOUBLES], DOUBLES]] = {
    "": lambda x: x,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": _sigmoid,
}


def prologue(
    x: DOUBLES, attributes: dict[str, Any], constants: dict[str, Any]
) -> tuple[DOUBLES, DOUBLES]:
    """Return what a product rounds, [M, K], and the largest value of each row on the way, [M, 1].

    Float32 is wrong by a part of the latter, also where large values cancel.
    """
    x, gate = np.split(x, 2, axis=1) if attributes["gated"] else (x, np.ones_like(x))
    y = ACTIVATIONS[attributes["activation"]](x) * gate
    largest = np.maximum(np.abs(y), np.abs(x * gate)).max(axis=1, keepdims=True)
    if not attributes["norm"]:
        return y, largest
    if attributes["norm"] == "layer":
        y = y - y.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt((y**2).mean(axis=1, keepdims=True) + attributes["epsilon"])
    weight, bias = constants.get("norm", np.ones(1)), constants.get("norm_bias", np.zeros(1))
    return y * factor * weight + bias, largest * factor * np.abs(weight).max() + np.abs(bias).max()


def unpack_nibbles(weight: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the integers [K, N] of weights [N, K / 32, 16]."""
    pairs = np.stack([weight & 15, weight >> 4], axis=-1).astype(np.int64) - 8
    return pairs.reshape(len(weight), -1).T


def linear(
    x: DOUBLES,
    weight: NDArray[Any],
    constants: dict[str, Any],
    attributes: dict[str, Any],
    block: int,
) -> tuple[DOUBLES, DOUBLES]:
    """Return the output [M, N] and how far a right one may be from it.

    x: [M, W]. weight: [K, N], in units of its scales where they belong to columns.
    block: inputs that share a scale of activations. A value in the middle of two integers may be
    rounded to either, since float32 computes it a little differently.
    """
    y, largest = prologue(x, attributes, constants)
    if attributes.get("mixed"):
        y = mix(y)
        largest = 8 * largest
    output, tolerance = np.zeros((2, len(x), weight.shape[1]))
    for start in range(0, y.shape[1], block):
        part, rows = y[:, start : start + block], weight[start : start + block].astype(float)
        scale = np.abs(part).max(axis=1, keepdims=True) / 127
        scale[scale < np.finfo(np.float32).tiny] = np.inf  # such a row is taken for zeros
        steps = part / scale
        rounded = np.where(np.isinf(scale), 0, np.rint(steps))
        error = 2e-6 * largest
        near = np.abs(steps - np.floor(steps) - 0.5) < 2 * error / scale
        scale[np.isinf(scale)] = 0
        output += rounded @ rows * scale
        tolerance += (near * scale + 1e-5 * np.abs(part) + error) @ np.abs(rows)
    if constants["scales"].ndim == 1:
        output, tolerance = output * constants["scales"], tolerance * constants["scales"]
    return _added(output, tolerance, constants)


def float_linear(
    x: DOUBLES, weight: NDArray[Any], constants: dict[str, Any], attributes: dict[str, Any]
) -> tuple[DOUBLES, DOUBLES]:
    """Return the same of a weight [K, N] of floats, which are not rounded."""
    y, largest = prologue(x, attributes, constants)
    if attributes.get("mixed"):
        y, largest = mix(y), 8 * largest
    matrix = weight.astype(float)
    tolerance = (1e-5 * np.abs(y) + 2e-6 * largest) @ np.abs(matrix)
    return _added(y @ matrix, tolerance, constants)


def _added(
    output: DOUBLES, tolerance: DOUBLES, constants: dict[str, Any]
) -> tuple[DOUBLES, DOUBLES]:
    """Add bias and residual to a product, and what they may be wrong by."""
    added = constants.get("bias", 0) + constants.get("residual", 0)
    return output + added, tolerance + 1e-6 * np.abs(added) + 1e-30

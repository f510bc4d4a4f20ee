"""A trial of the library on a graph of one node; run in a process of its own, which may crash.

python -m kvasir.kernels.self_test LIBRARY PATH ends with 0 if the operators compute what they
should.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvasir.kernels.library import Library
from kvasir.model.onnx.runtime import onnxruntime

# A `Linear` with a bias and a residual, which tests/kernels/graphs.py writes.
GRAPH = Path(__file__).with_name("self_test.onnx")
_ROWS = 16  # enough to use several threads


def weights() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the graph's weight [64, 128], its scales [128] and its bias [128]."""
    weight = (np.arange(64 * 128) * 7 % 255 - 127).astype(np.int8).reshape(64, 128)
    scales = (np.arange(128, dtype=np.float32) + 1) / 4096
    return weight, scales, scales[::-1] - np.float32(0.01)


def run(library: Library) -> None:
    """Compare the graph's result with NumPy's. Raises RuntimeError."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    library.register(options)
    session = onnxruntime.InferenceSession(GRAPH, options, providers=["CPUExecutionProvider"])
    weight, scales, bias = weights()
    x = np.sin(np.arange(_ROWS * 64, dtype=np.float32)).reshape(_ROWS, 64)
    residual = np.cos(np.arange(_ROWS * 128, dtype=np.float32)).reshape(_ROWS, 128)
    steps = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    rounded = np.rint(x * (1 / steps)).astype(np.int32)
    expected = (rounded @ weight.astype(np.int32)) * steps * scales + bias + residual
    (found,) = session.run(None, {"x": x, "residual": residual})
    if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise RuntimeError(f"wrong by up to {np.abs(found - expected).max()}")


if __name__ == "__main__":
    try:
        run(library := Library(Path(sys.argv[1]), sys.argv[2]))
        library.resolved()
    except Exception as error:  # the parent tells its user
        sys.exit(str(error))

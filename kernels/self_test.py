"""A trial of the library on a `Linear` and both attentions, in a process that may crash.

python -m kvasir.kernels.self_test LIBRARY PATH ends with 0 if the operators compute what they
should.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvasir.kernels.library import Library
from kvasir.model.onnx.runtime import onnxruntime

# A `Linear` with a bias and a residual, an `Attention` and a `TextAttention` of the same tokens,
# which tests/kernels/graphs.py writes.
GRAPH = Path(__file__).with_name("self_test.onnx")
HEADS = {"heads": 4, "kv_heads": 2}
_ROWS = 16  # enough to use several threads
_SIZE, _BLOCK = 16, 16  # of a head, and of a block


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
    # Each sequence is one token, which attends to itself: its values come out, rounded to 8 bits.
    heads, of_values = HEADS["heads"], HEADS["kv_heads"] * _SIZE
    qkv = np.sin(np.arange(_ROWS * (heads * _SIZE + 2 * of_values), dtype=np.float32))
    qkv = qkv.reshape(_ROWS, -1)
    values = qkv[:, -of_values:].reshape(_ROWS, -1, _SIZE)
    steps_of_blocks = np.ones((_ROWS, HEADS["kv_heads"], _BLOCK), dtype=np.float32)
    blocks = np.zeros((*steps_of_blocks.shape, _SIZE), dtype=np.int8)
    inputs = {
        "x": x,
        "residual": residual,
        "qkv": qkv,
        "keys": blocks,
        "key_scales": steps_of_blocks,
        "values": blocks,
        "value_scales": steps_of_blocks,
        "cumulative_sequence_length": np.arange(_ROWS + 1, dtype=np.int32),
        "past_seqlens": np.zeros(_ROWS, dtype=np.int32),
        "block_table": np.arange(_ROWS, dtype=np.int32)[:, None],
    }
    found, *attended = session.run(["y", "attended", "texts"], inputs)
    copies = values.repeat(heads // HEADS["kv_heads"], axis=1).reshape(_ROWS, -1)
    pairs = [(found, expected, 1e-5), *((result, copies, 1 / 127) for result in attended)]
    for result, right, error in pairs:
        if not np.allclose(result, right, rtol=1e-5, atol=error):
            raise RuntimeError(f"wrong by up to {np.abs(result - right).max()}")


if __name__ == "__main__":
    try:
        run(library := Library(Path(sys.argv[1]), sys.argv[2]))
        library.resolved()
    except Exception as error:  # the parent tells its user
        sys.exit(str(error))

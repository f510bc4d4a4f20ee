"""A graph or a run that `Attention` does not take is refused with a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from tests.kernels.graphs import attention_graph, needs_library, session
from tests.kernels.test_attention import ints

pytestmark = needs_library

HEADS = {"heads": 4, "kv_heads": 2}
_KEYS, _SCALES = np.zeros((3, 2, 16, 32), dtype=np.int8), np.zeros((3, 2, 16), dtype=np.float32)


def fitting() -> dict[str, NDArray[Any]]:
    """Return a run of two tokens after one, and of one after 15."""
    caches: dict[str, NDArray[Any]] = {"keys": _KEYS, "key_scales": _SCALES, "values": _KEYS}
    return caches | {
        "value_scales": _SCALES,
        "qkv": np.ones((3, 8 * 32), dtype=np.float32),
        "cumulative_sequence_length": np.array([0, 2, 3], dtype=np.int32),
        "past_seqlens": np.array([1, 15], dtype=np.int32),
        "block_table": np.array([[1, -1], [0, -1]], dtype=np.int32),
    }


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"heads": 0}, "heads and kv_heads are 0 and 2"),
        ({"heads": 3}, "heads a multiple of kv_heads"),
        ({"kv_heads": -1}, "4 and -1"),
        # The width of a row is then 2^64 + 2 · 32, which memory would hold as 64.
        ({"heads": 2**59, "kv_heads": 1}, "from 1 to 65536"),
        ({"scale": -1.0}, "scale and softcap"),
        ({"softcap": float("nan")}, "scale and softcap"),
        ({"window": 0}, "window is 0"),
        ({"interleaved": 2}, "interleaved is 2"),
    ],
)
def test_an_unfit_attribute(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        session(attention_graph(HEADS | attributes, {}))


def test_values_that_are_read_and_not_written() -> None:
    model = ModelProto.FromString(attention_graph(HEADS, {}))
    del model.graph.node[0].output[3:], model.graph.output[3:]
    opened = session(model.SerializeToString())
    with pytest.raises(Exception, match="output 3 has no name"):
        opened.run(None, fitting())


def test_half_a_rotation() -> None:
    with pytest.raises(Exception, match="cos and sin have to be there together"):
        session(attention_graph(HEADS, {"cos": np.ones((9, 4), dtype=np.float32)}))


ONES = np.ones((18, 8), dtype=np.float32)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"slopes": ONES[0]}, r"slopes is float\[8\]; its shape has to be \[4\]"),
        ({"sinks": ONES[:4]}, r"sinks is float\[4, 8\]"),
        ({"cos": ONES, "sin": ONES[:9]}, r"sin is float\[9, 8\]"),
        ({"cos": np.repeat(ONES, 3, axis=1), "sin": ONES}, "at most 16 columns"),
        ({"cos": ONES[:15], "sin": ONES[:15]}, "1 tokens after 15.* room for 15"),
    ],
)
def test_an_unfit_constant(constants: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        session(attention_graph(HEADS, constants)).run(None, fitting())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": np.ones((3, 7 * 32), np.float32)}, "its last dimension has to be 256"),
        ({"qkv": np.ones((4, 8 * 32), np.float32)}, "is from 0 to 3; it has to be from 0 to 4"),
        ({"qkv": np.array(1, np.float32)}, "its last dimension"),
        ({"keys": _KEYS[:, :1]}, r"keys is int8\[3, 1, 16, 32\]; it has to be int8 \[N, 2, B, D\]"),
        ({"keys": _KEYS[:, :, :8]}, "multiples of 16"),
        ({"keys": _KEYS[:, :, :0]}, "multiples of 16"),
        ({"keys": _KEYS[..., :24]}, "multiples of 16"),
        ({"keys": np.zeros((3, 2, 16, 656), np.int8)}, "D at most 640"),
        ({"keys": _KEYS[0]}, r"\[2, 16, 32\]"),
        ({"values": _KEYS[:2]}, r"values is int8\[2, 2, 16, 32\]; its shape has to be \[3, 2, 16,"),
        ({"key_scales": _SCALES[:2]}, r"key_scales is float\[2, 2, 16\]"),
        ({"value_scales": _SCALES[0]}, r"value_scales is float\[2, 16\]"),
        ({"cumulative_sequence_length": ints(0, 3)}, r"int32\[2\]; its shape has to be \[3\]"),
        ({"cumulative_sequence_length": ints(1, 2, 3)}, "is from 1 to 3"),
        ({"cumulative_sequence_length": ints(0, 4, 3)}, "1 has -1 tokens after 15"),
        ({"past_seqlens": ints(1, -1)}, "1 has 1 tokens after -1"),
        ({"past_seqlens": ints(1, 32)}, "1 has 1 tokens after 32.* room for 32"),
        ({"past_seqlens": ints(1, 2**31 - 1)}, "room for 32"),
        ({"past_seqlens": ints(1, 16)}, "sequence 1 has block -1; there are 3"),
        ({"block_table": ints(1, -1, 3, -1).reshape(2, 2)}, "sequence 1 has block 3; there are 3"),
        ({"block_table": ints(1, 0)}, r"block_table is int32\[2\]"),
        ({"block_table": ints(1, 0).reshape(1, 2)}, "a row for each of past_seqlens"),
    ],
)
def test_an_unfit_input_fails_its_run_alone(changes: dict[str, Any], message: str) -> None:
    opened = session(attention_graph(HEADS, {}))
    with pytest.raises(Exception, match=message):
        opened.run(None, fitting() | changes)
    assert opened.run(None, fitting())[0].shape == (3, 4 * 32)

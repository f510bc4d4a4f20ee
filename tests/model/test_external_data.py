"""The files that a graph reads, against ONNX's own description of its format."""

from __future__ import annotations

import random

import onnx
import pytest
from onnx import TensorProto

from kvasir.model.onnx.external_data import external_files


def fill(message: object, chance: random.Random, found: set[str], depth: int = 0) -> None:
    """Fill every field of an onnx message at random, and note the locations put into tensors."""
    descriptor = message.DESCRIPTOR  # type: ignore[attr-defined]
    for field in descriptor.fields:
        if field.message_type is None:
            if field.name != "external_data" and chance.random() < 0.2:
                value = "location" if field.type == field.TYPE_STRING else None
                if value is not None and not field.is_repeated:
                    setattr(message, field.name, value)
            continue
        if chance.random() < 0.5 / (1 + depth / 4):
            part = getattr(message, field.name)
            inner = part.add() if field.is_repeated else part
            if not field.is_repeated:
                part.SetInParent()
            fill(inner, chance, found, depth + 1)
    if isinstance(message, TensorProto):
        del message.external_data[:]
        name = f"file {chance.randrange(10**9)}"
        message.external_data.add(key="length", value="7")
        message.external_data.add(key="location", value=name)
        found.add(name)


@pytest.mark.parametrize("seed", range(30))
def test_every_tensor_is_found_wherever_the_format_lets_it_be(seed: int) -> None:
    """A place that the walk forgets would let a graph read any file."""
    model, found = onnx.ModelProto(), set[str]()
    model.graph.SetInParent()
    fill(model, random.Random(seed), found)
    assert external_files(model.SerializeToString()) == found


def test_the_last_value_of_a_repeated_key_counts() -> None:
    first = onnx.StringStringEntryProto(key="location", value="model.onnx.data").SerializeToString()
    last = onnx.StringStringEntryProto(value="/etc/passwd").SerializeToString()
    entry = first + last
    tensor = b"\x6a" + bytes([len(entry)]) + entry
    assert TensorProto.FromString(tensor).external_data[0].value == "/etc/passwd"
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    assert external_files(b"\x3a" + bytes([len(graph)]) + graph) == {"/etc/passwd"}


@pytest.mark.parametrize("content", [b"\x3a\x05ab", b"\x3b", b"\xff" * 12, b"\x07", b"\x3a"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="is not an ONNX graph"):
        external_files(content)

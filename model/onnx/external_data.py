"""The files that an ONNX graph reads its weights from, without ONNX or protobuf."""

from __future__ import annotations

# The messages of onnx.proto that lead to external data: the fields with further ones, by number.
_MESSAGES: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph"}
    | {22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
    "Entry": {},
}
_SIZES = {1: 8, 5: 4}  # bytes, by wire type: https://protobuf.dev/programming-guides/encoding


def external_files(model: bytes) -> set[str]:
    """Return the locations of external data in a serialized model. Raises ValueError."""
    files: set[str] = set()
    messages = [("Model", 0, len(model))]
    while messages:
        kind, at, end = messages.pop()
        texts: dict[int, bytes] = {}  # of an entry: key 1 and value 2
        while at < end:
            tag, at = _varint(model, at)
            number, wire = tag >> 3, tag & 7
            size, at = (_SIZES[wire], at) if wire in _SIZES else _varint(model, at)
            if wire == 0:
                continue
            if wire not in (1, 2, 5) or tag >= 2**32 or at + size > end:
                raise ValueError("is not an ONNX graph")
            if wire == 2 and kind == "Entry":
                texts[number] = model[at : at + size]
            elif wire == 2 and number in _MESSAGES[kind]:
                messages.append((_MESSAGES[kind][number], at, at + size))
            at += size
        if texts.get(1) == b"location":
            files.add(texts.get(2, b"").decode(errors="replace"))
    return files


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it."""
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("is not an ONNX graph")

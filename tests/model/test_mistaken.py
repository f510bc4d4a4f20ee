"""Paths that are named in place of a model: each command names the file and the mend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from kvasir.model.directory import ModelDirectoryError, load_model_dir

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
HEADER = b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'
WHOLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(36)
ADAPTER = {
    "adapter_config.json": b'{"base_model_name_or_path": "org/base"}',
    "adapter_model.safetensors": WHOLE,
}


@pytest.mark.parametrize(
    ("files", "name", "complaint"),
    [
        (
            {"model.safetensors": POINTER},
            "",
            r"model\.safetensors is a Git LFS pointer.*git lfs pull",
        ),
        ({"tokenizer.json": POINTER}, "", r"tokenizer\.json is a Git LFS pointer"),
        ({"model.onnx.data": POINTER}, "", r"model\.onnx\.data is a Git LFS pointer"),
        ({"a.gguf": POINTER}, "a.gguf", r"a\.gguf is a Git LFS pointer"),
        ({"model.safetensors": WHOLE[:-1]}, "", "cut off: it has 105 of 106 bytes; copy it again"),
        ({"model.safetensors": WHOLE[:30]}, "", "cut off: it ends in its header; copy it again"),
        ({"model.safetensors": WHOLE}, "model.safetensors", "name its folder"),
        (ADAPTER, "", "is a LoRA adapter of org/base, not a model; merge it"),
        (
            {"genai_config.json": b"{}", "model.onnx": b"x"},
            "",
            r"ONNX Runtime GenAI.*hf://ORG/NAME",
        ),
        (
            {"genai_config.json": b"{}", "config.json": b'{"_name_or_path": "org/base"}'},
            "",
            "ONNX Runtime GenAI.*hf://org/base",
        ),
        ({}, "mm", "mm does not exist; did you mean m\\?"),
        ({}, "a/b.gguf", "does not exist; name a GGUF file that is there, or one of.*/b.gguf"),
        ({}, "org/name", "does not exist; a model of Hugging Face's hub is hf://org/name"),
        ({}, "localhost:8000", "does not exist; a server is http://localhost:8000"),
    ],
)
@pytest.mark.parametrize("read", [load_checkpoint, load_model_dir])
def test_a_path_that_is_no_model(
    read: Callable[[Path], object],
    files: dict[str, bytes],
    name: str,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    for file, content in files.items():
        Path("m", file).write_bytes(content)
    path = Path("m", name) if files else Path(name)
    with pytest.raises((CheckpointError, ModelDirectoryError), match=complaint):
        read(path)

"""A Hugging Face folder or a GGUF file, told from other paths, and read."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from kvasir.model.configuration.fields import ConfigError
from kvasir.model.directory import CONFIG_FILE
from kvasir.model.importing.contents import Contents
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.gguf.model import read_gguf_model
from kvasir.model.importing.huggingface.folder import read_folder
from kvasir.model.platform.files import parse_object, read_limited
from kvasir.model.tensor_files import TensorFileError
from kvasir.model.tokenizer import TokenizerError

_FAULTS = (ConfigError, SafetensorError, TensorFileError, TokenizerError, UnsupportedError)


def is_published(source: Path) -> bool:
    """Tell a Hugging Face folder and a GGUF file from a checkpoint directory or a run."""
    if source.suffix == ".gguf" and not source.is_dir():
        return True
    try:
        values = parse_object(read_limited(source / CONFIG_FILE))
    except (OSError, ValueError):
        return False
    return not values.keys().isdisjoint({"model_type", "architectures"})


def read_published(source: Path) -> Contents:
    """Read the headers of a Hugging Face folder or a GGUF file, and plan its parameters.

    Weights keep their types, or get those that `model.importing.quantized` gives them. Raises
    UnsupportedError, and OSError.
    """
    read = read_gguf_model if source.suffix == ".gguf" else read_folder
    try:
        return read(source)
    except _FAULTS as error:
        problem = " ".join(str(error).split())  # a header's array is written in several lines
        raise UnsupportedError(f"{source} cannot be read: {problem}") from None

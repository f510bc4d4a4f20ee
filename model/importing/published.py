"""A Hugging Face folder or a GGUF file, checked, with parameters that are yet to be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from kvasir.model.bundle import CONFIG_FILE
from kvasir.model.config import ConfigError, TransformerConfig
from kvasir.model.files import parse_object, read_limited
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.gguf.model import read_gguf_model
from kvasir.model.importing.huggingface.folder import read_folder
from kvasir.model.importing.plan import plan_parameters
from kvasir.model.tensor_files import TensorFileError
from kvasir.model.tokenizer import TokenizerError

_FAULTS = (ConfigError, SafetensorError, TensorFileError, TokenizerError, UnsupportedError)


@dataclass(frozen=True, slots=True)
class Published:
    """A published model; texts: a checkpoint directory's other files by name."""

    config: TransformerConfig
    weights: dict[str, Callable[[], Tensor]]
    texts: dict[str, str]
    files: list[Path]  # of the weights
    notes: tuple[str, ...]  # what was left out, and what will be rounded again


def is_published(source: Path) -> bool:
    """Tell a Hugging Face folder and a GGUF file from a checkpoint directory or a run."""
    if source.suffix == ".gguf" and not source.is_dir():
        return True
    try:
        values = parse_object(read_limited(source / CONFIG_FILE))
    except (OSError, ValueError):
        return False
    return not values.keys().isdisjoint({"model_type", "architectures"})


def read_published(source: Path) -> Published:
    """Read the headers of a Hugging Face folder or a GGUF file, and plan its parameters.

    Weights keep their types, or get those that `model.importing.quantized` gives them. Raises
    UnsupportedError, and OSError.
    """
    notes: list[str] = []
    read = read_gguf_model if source.suffix == ".gguf" else read_folder
    try:
        contents = read(source, notes)
        config, weights = plan_parameters(contents.family, contents.config, contents.tensors)
    except _FAULTS as error:
        problem = " ".join(str(error).split())  # a header's array is written in several lines
        raise UnsupportedError(f"{source} cannot be imported: {problem}") from None
    texts = {name: text for name, text in contents.texts.items() if text is not None}
    return Published(config, weights, texts, contents.files, tuple(notes))

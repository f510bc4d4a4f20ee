"""A published model, checked before anything is written, with parameters that are yet to be made.

It is a Hugging Face folder or a GGUF file. `model.checkpoint` opens one in place, and
`import_checkpoint` writes the same parameters to a checkpoint directory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from kvasir.model.bundle import CHAT_TEMPLATE_FILE, CONFIG_FILE
from kvasir.model.config import ConfigError, TransformerConfig
from kvasir.model.files import new_directory, parse_object, read_limited
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.gguf.model import read_gguf_model
from kvasir.model.importing.huggingface.folder import read_folder
from kvasir.model.importing.plan import plan_parameters
from kvasir.model.mistaken import find_mistake
from kvasir.model.progress import Progress, unheard
from kvasir.model.tensor_files import (
    WEIGHTS_FILE,
    PlannedTensor,
    TensorFileError,
    write_safetensors,
)
from kvasir.model.tokenizer import TokenizerError

_FAULTS = (ConfigError, SafetensorError, TensorFileError, TokenizerError, UnsupportedError)


@dataclass(frozen=True, slots=True)
class Published:
    """A published model; texts: a checkpoint directory's other files by name."""

    family: str
    config: TransformerConfig
    weights: list[PlannedTensor]
    texts: dict[str, str]
    files: list[Path]  # of the weights
    notes: tuple[str, ...]  # what was left out, and what will be rounded again


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of `import_checkpoint`."""

    family: str
    config: TransformerConfig
    n_parameters: int
    dtype: str  # of most weights
    has_chat_template: bool
    notes: tuple[str, ...]


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
        found = read(source, notes)
        config, weights = plan_parameters(found.family, found.config, found.tensors)
    except _FAULTS as error:
        problem = " ".join(str(error).split())  # a header's array is written in several lines
        raise UnsupportedError(f"{source} cannot be imported: {problem}") from None
    texts = {name: text for name, text in found.texts.items() if text is not None}
    return Published(found.family.title, config, weights, texts, found.files, tuple(notes))


def import_checkpoint(source: Path, out: Path, progress: Progress = unheard) -> Imported:
    """Write the checkpoint directory `out` of a published model, whole or not at all.

    One parameter at a time is in memory. Raises as `read_published` before anything is written, and
    FileExistsError when `out` is in use.
    """
    if wrong := find_mistake(source):
        raise UnsupportedError(wrong)
    published = read_published(source)
    with new_directory(out) as part:
        published.config.save(part / CONFIG_FILE)
        for name, text in published.texts.items():
            (part / name).write_text(text, encoding="utf-8")
        write_safetensors(part / WEIGHTS_FILE, published.weights, progress)
    counts: Counter[torch.dtype] = Counter()
    for weight in published.weights:
        counts[weight.dtype] += torch.Size(weight.shape).numel()
    return Imported(
        family=published.family,
        config=published.config,
        n_parameters=counts.total(),
        dtype=str(counts.most_common(1)[0][0]).removeprefix("torch."),
        has_chat_template=CHAT_TEMPLATE_FILE in published.texts,
        notes=published.notes,
    )

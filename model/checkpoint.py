"""The checkpoint directory: config.json, model.safetensors, tokenizer.json, and training's state.

A training run keeps its newest checkpoint in `step-00001234/`, written whole or not at all, so a
crash or a loss of power leaves the previous one. Nothing is pickled: the optimizer's state is
training.safetensors or, of a sharded run, a folder training/ with one file a process.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from kvasir.model.adapters.config import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE
from kvasir.model.adapters.layout import Layout
from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.directory import (
    CONFIG_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    load_config_and_tokenizer,
    newest_checkpoint,
    read_extra_files,
)
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.gguf.model import read_gguf_model
from kvasir.model.importing.huggingface.folder import read_folder
from kvasir.model.importing.plan import plan_adapters
from kvasir.model.network.skeleton import build_decoder, check_size, parameter_shapes
from kvasir.model.network.transformer import Transformer
from kvasir.model.not_a_model import find_mistake
from kvasir.model.platform.files import (
    in_words,
    new_directory,
    parse_object,
    read_limited,
    read_object,
)
from kvasir.model.tensor_files import (
    WEIGHTS_FILE,
    LazyWeights,
    TensorFileError,
    list_tensors,
    weight_files,
)
from kvasir.model.tokenizer import TokenizerError, parse_tokenizer

STATE_FILE = "training.safetensors"
STATE_FOLDER = "training"  # in place of the file
PROGRESS_FILE = "training.json"
_POSITIONS = "position_embedding.weight"
_FAULTS = (ConfigError, TokenizerError, TensorFileError, SafetensorError)


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded; one line with the file and the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """A decoder's parameters, its tokenizer, training's notes, and EXTRA_FILES' contents.

    weights: by the names of `Transformer.state_dict`, in their stored types; each is read, or
    made of a published model's tensors, when it is looked up, and not kept.
    """

    path: Path
    config: TransformerConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    progress: dict[str, Any]
    extra_files: dict[str, bytes] = field(default_factory=dict)
    weight_files: Sequence[Path] = ()
    notes: tuple[str, ...] = ()  # what was left out of a published model
    adapters: Callable[[], Layout] | None = None  # how adapters fit its linear layers, if known

    @cached_property
    def decoder(self) -> Transformer:
        """The whole decoder in float32 and evaluation mode, which is loaded once."""
        return build_decoder(self.config, self.weights)


def find_checkpoint(directory: Path) -> Path:
    """Return the directory, or a training run's newest step. Raises CheckpointError for neither."""
    if (newest := newest_checkpoint(directory)) is None:
        lack = "holds no checkpoint, nor a Hugging Face model"
        raise CheckpointError(
            f"{directory} {lack if directory.exists() else 'does not exist'}; "
            f"make one with: kvasir train CORPUS --out {directory}"
        )
    return newest


def save_checkpoint(
    run: Path,
    step: int,
    decoder: Transformer,
    tokenizer: Tokenizer,
    state: dict[str, Tensor] | Path,
    progress: dict[str, Any],
    *,
    weights: dict[str, Tensor] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `run/step-…`, unless it exists, and then remove older steps.

    state: what resuming needs beside the weights, or a folder within `run` with it, which is moved.
    weights: the decoder's, where it does not hold them whole; or, if extra_files describe an
    adapter, that one's.
    """
    target = run / f"step-{step:08d}"
    for abandoned in run.glob("step-*.part-*"):
        shutil.rmtree(abandoned)
    if target.exists():  # the run was interrupted right after it saved
        if isinstance(state, Path):
            shutil.rmtree(state)
        return target
    older = list(run.glob("step-*"))
    with new_directory(target) as part:
        if ADAPTER_FILE in (extra_files or {}):  # it is no model, and has peft's files alone
            save_file(weights or {}, part / ADAPTER_WEIGHTS_FILE, {"format": "pt"})
        else:
            decoder.config.save(part / CONFIG_FILE)
            save_file(decoder.state_dict() if weights is None else weights, part / WEIGHTS_FILE)
        tokenizer.save(str(part / TOKENIZER_FILE))
        if isinstance(state, Path):
            state.rename(part / STATE_FOLDER)
            older = [path for path in older if path != state]
        else:
            save_file(state, part / STATE_FILE)
        for name, content in (extra_files or {}).items():
            (part / name).write_bytes(content)
        text = json.dumps({**progress, "step": step}, indent=2) + "\n"
        (part / PROGRESS_FILE).write_text(text, encoding="utf-8")
    for path in older:
        shutil.rmtree(path)
    return target


def load_checkpoint(source: Path, max_model_len: int | None = None) -> Checkpoint:
    """Open a checkpoint, a run's newest, a Hugging Face folder or a GGUF file; check its headers.

    max_model_len: the longest row to prepare for; None is the checkpoint's own. Raises
    CheckpointError.
    """
    if wrong := find_mistake(source):
        raise CheckpointError(wrong)
    checkpoint = _open_published(source) if is_published(source) else _open_directory(source)
    config, weights = checkpoint.config, checkpoint.weights
    if max_model_len is None:
        return checkpoint
    if not 2 <= max_model_len <= config.max_model_len:
        raise CheckpointError(
            f"max_model_len must be from 2 to the model's own {config.max_model_len}, not "
            f"{max_model_len}"
        )
    if config.has_learned_positions:
        makers = {name: partial(weights.__getitem__, name) for name in weights}
        weights = LazyWeights(makers | {_POSITIONS: lambda: makers[_POSITIONS]()[:max_model_len]})
    config = dataclasses.replace(config, max_model_len=max_model_len)
    return dataclasses.replace(checkpoint, config=config, weights=weights)


def is_published(source: Path) -> bool:
    """Tell a Hugging Face folder and a GGUF file from a checkpoint directory or a run."""
    if source.suffix == ".gguf" and not source.is_dir():
        return True
    try:
        values = parse_object(read_limited(source / CONFIG_FILE))
    except (OSError, ValueError):
        return False
    return not values.keys().isdisjoint({"model_type", "architectures"})


def _open_published(source: Path) -> Checkpoint:
    """Open a Hugging Face folder or a GGUF file: read its headers, and plan its parameters.

    Weights keep their types, or get those that `model.importing.quantized` gives them.
    """
    read = read_gguf_model if source.suffix == ".gguf" else read_folder
    try:
        published = read(source)
    except (*_FAULTS, UnsupportedError) as error:
        problem = " ".join(str(error).split())  # a header's array is written in several lines
        raise CheckpointError(f"{source} cannot be read: {problem}") from None
    except OSError as error:
        raise CheckpointError(in_words(error)) from None
    files = {name: text.encode() for name, text in published.texts.items() if text is not None}
    tokenizer = parse_tokenizer(files.pop(TOKENIZER_FILE), source)
    config, weights = published.config, LazyWeights(published.weights)
    of_files = files, published.files, tuple(published.notes), published.adapters
    return Checkpoint(source, config, weights, tokenizer, {}, *of_files)


def _open_directory(directory: Path) -> Checkpoint:
    path = find_checkpoint(directory)
    if (path / MANIFEST_FILE).is_file() and not (path / WEIGHTS_FILE).is_file():
        reason = "is a model directory, which is served; name what it was exported from"
        raise CheckpointError(f"{path} {reason}")
    if (path / ADAPTER_FILE).is_file() and (wrong := find_mistake(path)):  # of a run
        raise CheckpointError(wrong)
    try:
        config, tokenizer = load_config_and_tokenizer(path)
        files = weight_files(path)
        stored = {tensor.name: tensor for tensor in list_tensors(path)}
        notes = path / PROGRESS_FILE
        progress = read_object(notes, CheckpointError) if notes.is_file() else {}
        extra_files = read_extra_files(path)
        check_size(config, sum(torch.Size(tensor.shape).numel() for tensor in stored.values()))
    except (*_FAULTS, OSError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None
    shapes = parameter_shapes(config)
    for name in sorted(shapes.keys() ^ stored.keys()):
        kind = "lacks" if name in shapes else "holds the unknown"
        raise CheckpointError(f"{path / WEIGHTS_FILE} {kind} tensor {name!r} for its {CONFIG_FILE}")
    for name, tensor in stored.items():
        shape, wanted = list(tensor.shape), list(shapes[name])
        if shape != wanted:
            raise CheckpointError(
                f"tensor {name!r} in {tensor.file} has shape {shape}, not {wanted}"
            )
    weights = LazyWeights({name: stored[name].read for name in shapes})
    adapters = partial(plan_adapters, config)
    return Checkpoint(
        path, config, weights, tokenizer, progress, extra_files, files, adapters=adapters
    )


def load_state(path: Path) -> dict[str, Tensor]:
    """Read the training state of a checkpoint. Raises CheckpointError for none or a damaged one."""
    if not (path / STATE_FILE).is_file():
        raise CheckpointError(f"{path} has no {STATE_FILE}, so its training cannot be resumed")
    try:
        return load_file(path / STATE_FILE)
    except SafetensorError as error:
        raise CheckpointError(f"{path / STATE_FILE} cannot be loaded: {error}") from None


def optimizer_state(decoder: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by "parameter/key"."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in decoder.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value.contiguous()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def restore_optimizer(
    decoder: Transformer, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """Set the optimizer's tensors to those of `optimizer_state`."""
    parameters = dict(decoder.named_parameters())
    for name, value in state.items():
        owner, _, key = name.rpartition("/")
        if owner in parameters:
            device = torch.device("cpu") if key == "step" else parameters[owner].device
            optimizer.state[parameters[owner]][key] = value.to(device)

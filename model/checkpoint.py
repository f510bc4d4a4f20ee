"""The checkpoint directory: config.json, model.safetensors, tokenizer.json and, while training, its state.

A training run keeps its newest checkpoint in `step-00001234/`. It is written beside, brought to the disk and renamed
into place, so a crash or a loss of power leaves the previous one whole. Nothing is pickled: the optimizer's state is
training.safetensors or, of a sharded run, a folder training/ of safetensors files, one a process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from model.bundle import CHAT_TEMPLATE_FILE, GENERATION_FILE, SPECIAL_TOKENS_FILE
from model.config import ConfigError, DecoderConfig
from model.network.decoder import Decoder
from model.tokenizer import TokenizerError, load_tokenizer, vocabulary_size

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "training.safetensors"
STATE_FOLDER = "training"  # in place of the file
PROGRESS_FILE = "training.json"
_POSITIONS = "position_embedding.weight"
EXTRA_FILES = (
    CHAT_TEMPLATE_FILE,
    SPECIAL_TOKENS_FILE,
    GENERATION_FILE,
)  # optional, and kept as they are


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded; one line with the file and the mend."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A decoder in evaluation mode with its tokenizer, what its training noted of itself, and the contents of those of
    EXTRA_FILES that it has.
    """

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    progress: dict[str, Any]
    extra_files: dict[str, bytes] = field(default_factory=dict)


def find_checkpoint(directory: Path) -> Path:
    """The directory itself, or the newest step inside a training run. Raises CheckpointError when there is none."""
    if (directory / CONFIG_FILE).is_file():
        return directory
    steps = sorted(path for path in directory.glob("step-*") if path.suffix != ".part")
    if not steps:
        raise CheckpointError(
            f"{directory} holds no checkpoint; make one with: kvasir train CORPUS --out {directory}"
        )
    return steps[-1]


def save_checkpoint(
    run: Path,
    step: int,
    decoder: Decoder,
    tokenizer: Tokenizer,
    state: dict[str, Tensor] | Path,
    progress: dict[str, Any],
    *,
    weights: dict[str, Tensor] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `run/step-…` and then remove older ones.

    state: what resuming needs beside the weights, or a folder within `run` that holds it, which is moved. weights: the
    decoder's, where it does not hold them whole.
    """
    target = run / f"step-{step:08d}"
    part = target.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    decoder.config.save(part / CONFIG_FILE)
    tokenizer.save(str(part / TOKENIZER_FILE))
    save_file(decoder.state_dict() if weights is None else weights, part / WEIGHTS_FILE)
    if isinstance(state, Path):
        state.rename(part / STATE_FOLDER)
    else:
        save_file(state, part / STATE_FILE)
    for name, content in (extra_files or {}).items():
        (part / name).write_bytes(content)
    (part / PROGRESS_FILE).write_text(
        json.dumps({**progress, "step": step}, indent=2) + "\n", encoding="utf-8"
    )
    older = [path for path in run.glob("step-*") if path != part]
    if target in older:  # the same step again: a run that was interrupted right after it saved
        shutil.rmtree(part)
        return target
    sync(*part.rglob("*"), part)
    part.rename(target)
    sync(run)
    for path in older:
        shutil.rmtree(path)
    return target


def sync(*paths: Path) -> None:
    """Have these files, and the names in these folders, on the disk before returning."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_checkpoint(directory: Path, max_model_len: int | None = None) -> Checkpoint:
    """Load a checkpoint, or a run's newest, in float32; max_model_len: for rows no longer than this.

    Raises CheckpointError naming what is missing or does not fit.
    """
    path = find_checkpoint(directory)
    try:
        config = DecoderConfig.load(path / CONFIG_FILE)
        tokenizer = load_tokenizer(path / TOKENIZER_FILE)
        weights = load_file(path / WEIGHTS_FILE)
        progress = _load_progress(path / PROGRESS_FILE)
        extra_files = {
            name: (path / name).read_bytes() for name in EXTRA_FILES if (path / name).is_file()
        }
    except (ConfigError, TokenizerError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None
    if (known := vocabulary_size(tokenizer)) > config.vocab_size:
        raise CheckpointError(
            f"{path / TOKENIZER_FILE} has token ids up to {known - 1}, but the decoder only {config.vocab_size} tokens"
        )
    if max_model_len is not None:
        config = _shorten(config, weights, max_model_len)
    decoder = Decoder(config).eval()
    expected = {name: tensor.shape for name, tensor in decoder.state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            kind = "lacks" if name in expected else "holds the unknown"
            raise CheckpointError(
                f"{path / WEIGHTS_FILE} {kind} tensor {name!r} for its {CONFIG_FILE}"
            )
        if weights[name].shape != expected[name]:
            shapes = f"{list(weights[name].shape)}, not {list(expected[name])}"
            raise CheckpointError(f"tensor {name!r} in {path / WEIGHTS_FILE} has shape {shapes}")
    decoder.load_state_dict(weights)
    return Checkpoint(path, decoder, tokenizer, progress, extra_files)


def _shorten(
    config: DecoderConfig, weights: dict[str, Tensor], max_model_len: int
) -> DecoderConfig:
    """The configuration with fewer positions; weights are cut, in place, to those that it has."""
    if not 2 <= max_model_len <= config.max_model_len:
        raise CheckpointError(
            f"max_model_len must be from 2 to the model's own {config.max_model_len}"
        )
    if config.position == "learned" and _POSITIONS in weights:
        missing = config.max_model_len - max_model_len
        weights[_POSITIONS] = weights[_POSITIONS][: len(weights[_POSITIONS]) - missing]
    return dataclasses.replace(config, max_model_len=max_model_len)


def _load_progress(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        progress: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    return progress


def load_state(path: Path) -> dict[str, Tensor]:
    """The training state beside a checkpoint's weights. Raises CheckpointError when it has none, or a damaged one."""
    if not (path / STATE_FILE).is_file():
        raise CheckpointError(f"{path} has no {STATE_FILE}, so its training cannot be resumed")
    try:
        return load_file(path / STATE_FILE)
    except SafetensorError as error:
        raise CheckpointError(f"{path / STATE_FILE} cannot be loaded: {error}") from None


def optimizer_state(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by "parameter/key"."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in decoder.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value.contiguous()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def restore_optimizer(
    decoder: Decoder, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_state` took."""
    parameters = dict(decoder.named_parameters())
    for name, value in state.items():
        owner, _, key = name.rpartition("/")
        if owner in parameters:
            device = torch.device("cpu") if key == "step" else parameters[owner].device
            optimizer.state[parameters[owner]][key] = value.to(device)

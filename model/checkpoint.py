"""The checkpoint directory: config.json, model.safetensors, tokenizer.json and, while training, its state.

A training run keeps its newest checkpoint in `step-00001234/`. It is written beside and renamed into place, so a crash
leaves the previous one whole. Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from model.config import ConfigError, DecoderConfig
from model.decoder import Decoder
from model.tokenizer import TokenizerError, load_tokenizer, vocabulary_size

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "training.safetensors"
PROGRESS_FILE = "training.json"


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded; one line with the file and the mend."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A decoder in evaluation mode with its tokenizer, and what its training noted of itself."""

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    progress: dict[str, Any]


def find_checkpoint(directory: Path) -> Path:
    """The directory itself, or the newest step inside a training run. Raises CheckpointError when there is none."""
    if (directory / CONFIG_FILE).is_file():
        return directory
    steps = sorted(path for path in directory.glob("step-*") if path.suffix != ".part")
    if not steps:
        raise CheckpointError(f"{directory} holds no checkpoint; make one with: kvasir train CORPUS --out {directory}")
    return steps[-1]


def save_checkpoint(
    run: Path, step: int, decoder: Decoder, tokenizer: Tokenizer, state: dict[str, Tensor], progress: dict[str, Any]
) -> Path:
    """Write `run/step-…` and then remove older ones. `state` is what resuming needs beside the weights."""
    target = run / f"step-{step:08d}"
    part = target.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    decoder.config.save(part / CONFIG_FILE)
    tokenizer.save(str(part / TOKENIZER_FILE))
    save_file(decoder.state_dict(), part / WEIGHTS_FILE)
    save_file(state, part / STATE_FILE)
    (part / PROGRESS_FILE).write_text(json.dumps({**progress, "step": step}, indent=2) + "\n", encoding="utf-8")
    older = [path for path in run.glob("step-*") if path != part]
    if target in older:  # the same step again: a run that was interrupted right after it saved
        shutil.rmtree(part)
        return target
    part.rename(target)
    for path in older:
        shutil.rmtree(path)
    return target


def load_checkpoint(directory: Path) -> Checkpoint:
    """Load a checkpoint, or a run's newest. Raises CheckpointError naming what is missing or does not fit."""
    path = find_checkpoint(directory)
    try:
        config = DecoderConfig.load(path / CONFIG_FILE)
        tokenizer = load_tokenizer(path / TOKENIZER_FILE)
        weights = load_file(path / WEIGHTS_FILE)
        progress = _load_progress(path / PROGRESS_FILE)
    except (ConfigError, TokenizerError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None
    if (known := vocabulary_size(tokenizer)) > config.vocab_size:
        raise CheckpointError(
            f"{path / TOKENIZER_FILE} has token ids up to {known - 1}, but the decoder only {config.vocab_size} tokens"
        )
    decoder = Decoder(config).eval()
    expected = {name: tensor.shape for name, tensor in decoder.state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            kind = "lacks" if name in expected else "holds the unknown"
            raise CheckpointError(f"{path / WEIGHTS_FILE} {kind} tensor {name!r} for its {CONFIG_FILE}")
        if weights[name].shape != expected[name]:
            shapes = f"{list(weights[name].shape)}, not {list(expected[name])}"
            raise CheckpointError(f"tensor {name!r} in {path / WEIGHTS_FILE} has shape {shapes}")
    decoder.load_state_dict(weights)
    return Checkpoint(path, decoder, tokenizer, progress)


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


def restore_optimizer(decoder: Decoder, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Put back what `optimizer_state` took."""
    parameters = dict(decoder.named_parameters())
    for name, value in state.items():
        owner, _, key = name.rpartition("/")
        if owner in parameters:
            device = torch.device("cpu") if key == "step" else parameters[owner].device
            optimizer.state[parameters[owner]][key] = value.to(device)

"""Low-rank adapters of a model: new ones to be trained, and those of peft's folders."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvasir.model.adapter_config import (
    ADAPTER_WEIGHTS_FILE,
    MODEL_PREFIX,
    AdapterConfig,
    AdapterError,
)
from kvasir.model.checkpoint import PROGRESS_FILE, Checkpoint, load_checkpoint
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    newest_checkpoint,
    read_extra_files,
)
from kvasir.model.network.low_rank import Factors, LowRank, PublishedRows
from kvasir.model.network.skeleton import make_skeleton
from kvasir.model.network.transformer import Transformer
from kvasir.model.not_a_model import ADAPTER_FILE
from kvasir.model.platform.files import new_directory, read_object
from kvasir.model.platform.suggestions import did_you_mean
from kvasir.model.tensor_files import FLOATS, WEIGHTS_FILE, hash_weights
from kvasir.model.tokenizer import load_tokenizer

_CHOICES = ("router", "shared_gate")  # linear layers that peft leaves as they are
_SHOWN = 20  # names in an error


def layers_of(checkpoint: Checkpoint) -> dict[str, tuple[nn.Linear, PublishedRows]]:
    """Return the linear layers of a model's blocks, without values, and where they are published.

    Those of experts are none. Raises AdapterError for a GGUF file, whose names no adapter has.
    """
    if checkpoint.path.suffix == ".gguf":
        raise AdapterError(
            f"{checkpoint.path} has llama.cpp's names, which no adapter has; begin with the "
            "Hugging Face folder of the model"
        )
    found = {}
    for name, layer in make_skeleton(checkpoint.config).named_modules():
        inside = "blocks." in name and not name.endswith(_CHOICES)
        if isinstance(layer, nn.Linear) and inside:
            n = layer.out_features
            own = PublishedRows((name,), (n,), torch.arange(n))
            rows = checkpoint.rows and checkpoint.rows(f"{name}.weight", n)
            found[name] = layer, rows or own
    return found


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """Updates by module that are zero yet, their adapter_config.json, and their model."""

    checkpoint: Checkpoint
    updates: Mapping[str, Factors]
    text: str

    @classmethod
    def make(cls, checkpoint: Checkpoint, config: AdapterConfig, seed: int) -> NewAdapter:
        """Make down uniform (He et al. 2015, as in peft) and up zero. Raises AdapterError."""
        updates, transposed, generator = dict[str, Factors](), set[bool](), torch.Generator()
        generator.manual_seed(seed)
        known = layers_of(checkpoint).values()
        for layer, rows in known:
            for module, height in zip(rows.modules, rows.heights, strict=True):
                if config.covers(module):
                    down = torch.empty(config.r, layer.in_features)
                    nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
                    up = torch.zeros(height, config.r)
                    updates[module] = Factors(down, up, config.scale(module))
                    transposed.add(rows.transposed)
        names = [module for _, rows in known for module in rows.modules]
        for end in config.target_modules:
            if not any(f".{name}".endswith(f".{end}") for name in names):
                ends = sorted({name.rpartition(".")[2] for name in names})
                advice = did_you_mean(end, ends, f"there are {', '.join(ends[:_SHOWN])}")
                place = checkpoint.path
                raise AdapterError(f"{place} has no module {end!r} for an adapter; {advice}")
        targets = config.target_modules or sorted({name.rpartition(".")[2] for name in updates})
        causal = checkpoint.config.pooling is None and checkpoint.config.encoder is None
        described = config.model_dump() | {
            "target_modules": list(targets),
            "task_type": "CAUSAL_LM" if causal else None,
            "fan_in_fan_out": transposed == {True},
            "lora_dropout": 0.0,
            "bias": "none",
            "modules_to_save": None,
            "inference_mode": True,
        }
        return cls(checkpoint, updates, json.dumps(described, indent=2) + "\n")

    @property
    def n_parameters(self) -> int:
        """The number of parameters that are trained."""
        return sum(update.down.numel() + update.up.numel() for update in self.updates.values())

    def join(self, decoder: Transformer, files: dict[str, bytes]) -> dict[str, Any]:
        """Put the updates beside the decoder's layers, and their description among the files.

        Returns what a run needs to find its model again, for training.json.
        """
        attach(decoder, self.checkpoint, self.updates)
        files[ADAPTER_FILE] = self.text.encode()
        return {
            "path": str(self.checkpoint.path.resolve()),
            "sha256": hash_weights(self.checkpoint.weight_files),
            "config": asdict(decoder.config),
        }


def attach(decoder: Transformer, checkpoint: Checkpoint, updates: Mapping[str, Factors]) -> None:
    """Put updates beside the decoder's layers, and leave nothing else to be trained."""
    decoder.requires_grad_(False)
    for name, rows, own in _match(checkpoint, updates):
        layer = decoder.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        decoder.set_submodule(name, LowRank(layer, rows, own))


def read_updates(folder: Path) -> dict[str, Factors]:
    """Read the updates in a folder of peft, in float32, by module.

    Raises AdapterError for what is not computed, or not finite, and OSError.
    """
    config, path = AdapterConfig.read(folder), folder / ADAPTER_WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise AdapterError(f"{path} cannot be loaded: {error}; copy it again") from None
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if not name.startswith(MODEL_PREFIX) or kind not in ("lora_A", "lora_B"):
            raise AdapterError(f"{path} holds {name!r}, which is no matrix of a LoRA adapter")
        if tensor.dim() != 2 or tensor.dtype not in FLOATS or not tensor.isfinite().all():
            described = f"{list(tensor.shape)}, {tensor.dtype}"
            raise AdapterError(f"{path} holds {name!r} ({described}): not a finite matrix")
        parts.setdefault(module.removeprefix(MODEL_PREFIX), {})[kind] = tensor.float()
    updates = {}
    for module, pair in parts.items():
        if len(pair) < 2:
            raise AdapterError(f"{path} has only {next(iter(pair))} of {module!r}; copy it again")
        down, up, rank = pair["lora_A"], pair["lora_B"], config.rank(module)
        if not down.shape[0] == up.shape[1] == rank:
            shapes = f"{list(down.shape)} and {list(up.shape)}"
            raise AdapterError(f"{path} has {shapes} for {module!r}, whose rank is {rank}")
        updates[module] = Factors(down, up, config.scale(module))
    return updates


def _match(
    checkpoint: Checkpoint, updates: Mapping[str, Factors]
) -> Iterator[tuple[str, PublishedRows, dict[str, Factors]]]:
    """Yield each layer that has updates. Raises AdapterError for one that fits no layer."""
    left, matched = dict(updates), []
    for name, (layer, rows) in layers_of(checkpoint).items():
        own = {module: left.pop(module) for module in rows.modules if module in left}
        for module, height in zip(rows.modules, rows.heights, strict=True):
            if module in own:
                update, n_in = own[module], layer.in_features
                shape, wanted = (update.up.shape[0], update.down.shape[1]), (height, n_in)
                if shape != wanted:
                    raise AdapterError(
                        f"the adapter's update of {module!r} is {list(shape)}, and "
                        f"{checkpoint.path} has {list(wanted)} there; it is of another base"
                    )
        if own:
            matched.append((name, rows, own))
    if left:
        raise AdapterError(
            f"{checkpoint.path} has no linear layer {next(iter(left))!r}, which the adapter "
            f"updates ({len(left)} of {len(updates)} are unknown); it is of another base"
        )
    yield from matched


def write_merged(checkpoint: Checkpoint, adapter: Path, out: Path) -> tuple[int, list[str]]:
    """Write a model with an adapter's updates in its matrices as a checkpoint.

    adapter: a folder of peft, or a run. Returns the number of matrices that were changed, which are
    float32, and notes. Raises AdapterError, FileExistsError, and OSError.
    """
    folder = adapter if (adapter / ADAPTER_FILE).is_file() else newest_checkpoint(adapter)
    if folder is None or not (folder / ADAPTER_FILE).is_file():
        raise AdapterError(f"{adapter} is no adapter: there is no {ADAPTER_FILE}, nor a run of one")
    config, notes = checkpoint.config, list[str]()
    base, own = AdapterConfig.read(folder).base_model_name_or_path, str(checkpoint.path.resolve())
    if base not in (None, own) and Path(base or "").name != checkpoint.path.name:
        notes.append(f"{folder} names {base} as its model, not {checkpoint.path}; their shapes fit")
    with new_directory(out) as part:
        weights: dict[str, Tensor] = dict(checkpoint.weights)
        for name, rows, updates in (matched := list(_match(checkpoint, read_updates(folder)))):
            weight = weights[f"{name}.weight"]
            layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
            with torch.no_grad():
                update = LowRank(layer, rows, updates).update(torch.eye(weight.shape[1]))
            weights[f"{name}.weight"] = weight.float() + update.t()
        if (notes_of_run := folder / PROGRESS_FILE).is_file():  # chats may have added an ending
            trained = read_object(notes_of_run, AdapterError).get("base", {}).get("config", {})
            ends = tuple(trained.get("eos_token_ids", config.eos_token_ids))
            config = replace(config, eos_token_ids=ends)
        config.save(part / CONFIG_FILE)
        checkpoint.tokenizer.save(str(part / TOKENIZER_FILE))
        for name, content in (checkpoint.extra_files | read_extra_files(folder)).items():
            (part / name).write_bytes(content)
        save_file({name: w.contiguous() for name, w in weights.items()}, part / WEIGHTS_FILE)
    return len(matched), notes


def open_adapter(step: Path) -> Checkpoint:
    """Return the checkpoint of a run's adapter: its model, and the updates beside its layers.

    Raises AdapterError where the model is not what it was, and CheckpointError.
    """
    progress = read_object(step / PROGRESS_FILE, AdapterError)
    try:
        base, config = progress["base"], TransformerConfig(**progress["base"]["config"])
        path, expected = Path(base["path"]), base["sha256"]
    except (KeyError, TypeError) as error:
        reason = f"training.json is incomplete ({error}); it cannot be resumed"
        raise AdapterError(f"{step}'s {reason}") from None
    checkpoint = load_checkpoint(path)
    if hash_weights(checkpoint.weight_files) != expected:
        raise AdapterError(f"{path} is not the model that {step} began with; bring that back")
    files = read_extra_files(step) | {ADAPTER_FILE: (step / ADAPTER_FILE).read_bytes()}
    tokenizer = load_tokenizer(step / TOKENIZER_FILE)
    own = replace(checkpoint, path=step, config=config, tokenizer=tokenizer)
    opened = replace(own, progress=progress, extra_files=files)
    attach(opened.decoder, checkpoint, read_updates(step))
    return opened

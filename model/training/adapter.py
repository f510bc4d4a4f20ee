"""Low-rank adapters of a model: new ones to be trained, and those of peft's folders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kvasir.model.adapters.config import ADAPTER_FILE, AdapterConfig, AdapterError
from kvasir.model.adapters.layout import Layout
from kvasir.model.adapters.peft import Factors, read_adapter
from kvasir.model.checkpoint import PROGRESS_FILE, Checkpoint, load_checkpoint
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import CONFIG_FILE, TOKENIZER_FILE, newest_checkpoint, read_extra_files
from kvasir.model.network.transformer import Transformer
from kvasir.model.platform.files import new_directory, read_object
from kvasir.model.platform.suggestions import did_you_mean
from kvasir.model.tensor_files import WEIGHTS_FILE, hash_weights
from kvasir.model.tokenizer import load_tokenizer
from kvasir.model.training.low_rank import LowRank

_SHOWN = 20  # names in an error


def layout_of(checkpoint: Checkpoint) -> Layout:
    """Return how adapters fit a model. Raises AdapterError for a GGUF file."""
    if checkpoint.adapters is None:
        raise AdapterError(
            f"{checkpoint.path} has llama.cpp's names, which no adapter has; begin with the "
            "Hugging Face folder of the model"
        )
    return checkpoint.adapters()


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """An adapter that changes nothing yet, its adapter_config.json, and its model."""

    checkpoint: Checkpoint
    layout: Layout
    modules: Mapping[str, Factors]
    text: str

    @classmethod
    def make(cls, checkpoint: Checkpoint, config: AdapterConfig, seed: int) -> NewAdapter:
        """Make A uniform (He et al. 2015, as in peft) and B zero. Raises AdapterError."""
        layout, modules = layout_of(checkpoint), dict[str, Factors]()
        generator = torch.Generator().manual_seed(seed)
        for module, (n_out, n_in) in layout.sizes.items():
            if config.covers(module):
                a = torch.empty(config.r, n_in)
                nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
                b = np.zeros((n_out, config.r), dtype=np.float32)
                modules[module] = Factors(a.numpy(), b, config.scaling(module))
        names = layout.sizes.keys()
        for end in config.target_modules:
            if not any(f".{name}".endswith(f".{end}") for name in names):
                ends = sorted({name.rpartition(".")[2] for name in names})
                advice = did_you_mean(end, ends, f"there are {', '.join(ends[:_SHOWN])}")
                place = checkpoint.path
                raise AdapterError(f"{place} has no module {end!r} for an adapter; {advice}")
        targets = config.target_modules or sorted({name.rpartition(".")[2] for name in modules})
        causal = checkpoint.config.pooling is None and checkpoint.config.encoder is None
        described = config.model_dump() | {
            "target_modules": targets,
            "task_type": "CAUSAL_LM" if causal else None,
            "inference_mode": True,
        }
        return cls(checkpoint, layout, modules, json.dumps(described, indent=2) + "\n")

    @property
    def n_parameters(self) -> int:
        """The number of parameters that are trained."""
        return sum(factors.a.size + factors.b.size for factors in self.modules.values())

    def join(self, decoder: Transformer, files: dict[str, bytes]) -> dict[str, Any]:
        """Put the adapter beside the decoder's layers, and its description among the files.

        Returns what a run needs to find its model again, for training.json.
        """
        attach(decoder, self.layout, self.modules)
        files[ADAPTER_FILE] = self.text.encode()
        return {
            "path": str(self.checkpoint.path.resolve()),
            "sha256": hash_weights(self.checkpoint.weight_files),
            "config": asdict(decoder.config),
        }


def attach(decoder: Transformer, layout: Layout, modules: Mapping[str, Factors]) -> None:
    """Put an adapter beside the decoder's layers, and leave nothing else to be trained."""
    decoder.requires_grad_(False)
    for weight, layer in layout.layers_of(modules).items():
        base = decoder.get_submodule(name := weight.removesuffix(".weight"))
        assert isinstance(base, nn.Linear)
        decoder.set_submodule(name, LowRank(base, layer, modules))


def write_merged(checkpoint: Checkpoint, adapter: Path, out: Path) -> tuple[int, list[str]]:
    """Write a model with an adapter's updates in its matrices as a checkpoint.

    adapter: a folder of peft, or a run. Returns the number of matrices that were changed, which are
    float32, and notes. Raises AdapterError, FileExistsError, and OSError.
    """
    folder = adapter if (adapter / ADAPTER_FILE).is_file() else newest_checkpoint(adapter)
    if folder is None or not (folder / ADAPTER_FILE).is_file():
        raise AdapterError(f"{adapter} is no adapter: there is no {ADAPTER_FILE}, nor a run of one")
    config, notes = checkpoint.config, list[str]()
    layout = layout_of(checkpoint)
    found = read_adapter(folder, str(folder), layout)
    base, own = found.base, str(checkpoint.path.resolve())
    if base not in (None, own) and Path(base or "").name != checkpoint.path.name:
        notes.append(f"{folder} names {base} as its model, not {checkpoint.path}; their shapes fit")
    layers = layout.layers_of(found.modules)
    with new_directory(out) as part:
        weights: dict[str, Tensor] = dict(checkpoint.weights)
        for name, layer in layers.items():
            weight, ones = weights[name].float(), torch.eye(len(layer.inputs))
            linear = nn.Linear(len(layer.inputs), len(layer.outputs), device="meta")
            with torch.no_grad():
                weights[name] = weight + LowRank(linear, layer, found.modules).update(ones).t()
        if (notes_of_run := folder / PROGRESS_FILE).is_file():  # chats may have added an ending
            trained = read_object(notes_of_run, AdapterError).get("base", {}).get("config", {})
            ends = tuple(trained.get("eos_token_ids", config.eos_token_ids))
            config = replace(config, eos_token_ids=ends)
        config.save(part / CONFIG_FILE)
        checkpoint.tokenizer.save(str(part / TOKENIZER_FILE))
        for name, content in (checkpoint.extra_files | read_extra_files(folder)).items():
            (part / name).write_bytes(content)
        save_file({name: w.contiguous() for name, w in weights.items()}, part / WEIGHTS_FILE)
    return len(layers), notes


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
    layout = layout_of(checkpoint)
    attach(opened.decoder, layout, read_adapter(step, str(step), layout).modules)
    return opened

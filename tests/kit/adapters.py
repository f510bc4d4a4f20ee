"""Adapters as peft saves them, with random numbers that change answers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

ALL = "all-linear"


def save_adapter(folder: Path, model: nn.Module, *, seed: int = 0, **options: Any) -> Any:
    """Save a random adapter of a model; return peft's model, which has it."""
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL}
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM"} | values | options)
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: Any = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
    adapted.save_pretrained(folder)
    return adapted


def set_config(folder: Path, **values: object) -> None:
    """Change fields of a folder's adapter_config.json."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace a folder's tensors."""
    file = folder / "adapter_model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file)

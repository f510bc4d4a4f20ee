"""The contents of a published model, whether in a Hugging Face folder or in a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from kvasir.model.adapters.layout import Layout
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import GENERATION_FILE
from kvasir.model.records import GenerationDefaults


@dataclass(frozen=True, slots=True)
class Contents:
    """A published model as a checkpoint, with parameters that are yet to be made."""

    config: TransformerConfig
    weights: dict[str, Callable[[], Tensor]]
    texts: dict[str, str | None]  # other files by name
    files: list[Path]  # of the weights
    notes: list[str]  # what was left out, and what will be rounded again
    adapters: Callable[[], Layout] | None = None  # how adapters fit; None of a GGUF file


def to_json(values: Mapping[str, object]) -> str | None:
    """Return a file's JSON object; None for an empty one."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n" if values else None


def generation_defaults(given: Mapping[str, Any], notes: list[str]) -> str | None:
    """Return generation_config.json: the recommended sampling parameters that the API has.

    Without do_sample only the repetition penalty has a meaning.
    """
    names = GenerationDefaults.model_fields if given.get("do_sample") else ["repetition_penalty"]
    defaults: dict[str, float] = {}
    for name in names:
        try:
            defaults |= GenerationDefaults.model_validate({name: given.get(name)}).given()
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            notes.append(f"{GENERATION_FILE}'s {name} is left out: {given[name]!r}: {reason}")
    return to_json(defaults)

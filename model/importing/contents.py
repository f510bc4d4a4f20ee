"""The contents of a published model, whether in a Hugging Face folder or in a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvasir.model.bundle import GENERATION_FILE
from kvasir.model.config import TransformerConfig
from kvasir.model.importing.families.family import Family
from kvasir.model.records import GenerationDefaults
from kvasir.model.tensor_files import StoredTensor


@dataclass(frozen=True, slots=True)
class Contents:
    """A model as it was published; texts: a checkpoint directory's other files by name."""

    family: Family
    config: TransformerConfig
    texts: dict[str, str | None]
    tensors: list[StoredTensor]
    files: list[Path]  # of the tensors


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

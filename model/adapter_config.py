"""adapter_config.json, as peft writes it for LoRA: what it means, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from kvasir.model.not_a_model import ADAPTER_FILE
from kvasir.model.platform.files import read_object
from kvasir.model.platform.suggestions import did_you_mean, first_problem
from kvasir.model.records import Record

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
MODEL_PREFIX = "base_model.model."  # of a module's name in that file
# Fields that change nothing of a finished adapter, or that its tensors tell as well.
_IGNORED = {
    *("peft_version", "auto_mapping", "task_type", "revision", "inference_mode", "lora_dropout"),
    *("init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
_NEUTRAL: tuple[object, ...] = (None, False, "none", [], {})
_SPECIFIED = {"r": "r", "alpha": "lora_alpha", "modules": "target_modules", "rslora": "use_rslora"}
Rank = Annotated[int, Field(gt=0, le=4096)]
Alpha = Annotated[float, Field(gt=0)]


class AdapterError(ValueError):
    """An adapter that cannot be read or made; one line with the value and the remedy."""


class AdapterConfig(Record):
    """The rank and scale of each module's update, by peft's names.

    The scale is alpha / r (Hu et al. 2022) or, with use_rslora, alpha / √r (Kalajdzievski 2023).
    Patterns are regular expressions of the ends of modules' names. target_modules: such ends; none
    are all.
    """

    peft_type: Literal["LORA"] = "LORA"
    base_model_name_or_path: str | None = None
    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[str, Alpha] = Field(default_factory=dict)
    target_modules: list[str] = Field(default_factory=list)

    @classmethod
    def parse(cls, text: str, base: str) -> AdapterConfig:
        """Read what --lora says of an adapter of `base`, as "r=16,alpha=32,modules=q+v,rslora".

        alpha is 2 r by default. Raises AdapterError.
        """
        values: dict[str, Any] = {"base_model_name_or_path": base}
        for name, equals, value in (part.strip().partition("=") for part in text.split(",")):
            if name not in _SPECIFIED:
                advice = did_you_mean(name, _SPECIFIED, f"there are {', '.join(_SPECIFIED)}")
                raise AdapterError(f"--lora knows no {name!r}; {advice}")
            values[_SPECIFIED[name]] = value if equals else True
        try:
            if "target_modules" in values:
                values["target_modules"] = str(values["target_modules"]).split("+")
            return cls.model_validate({"lora_alpha": 2 * float(values.get("r", 0)), **values})
        except ValueError as error:
            raise AdapterError(f"--lora {text!r}: {first_problem(error)}; try r=16") from None

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Read a folder's adapter_config.json. Raises AdapterError, and OSError."""
        values = read_object(folder / ADAPTER_FILE, AdapterError)
        known = cls.model_fields.keys() - {"target_modules"}
        given = {
            key: value
            for key, value in values.items()
            if key in known or (key not in _IGNORED and value not in _NEUTRAL)
        }
        try:
            return cls.model_validate({key: v for key, v in given.items() if v is not None})
        except ValidationError as error:
            problem = first_problem(error)
            raise AdapterError(f"{folder / ADAPTER_FILE} is not computed: {problem}") from None

    def rank(self, module: str) -> int:
        """Return the rank of a module's update."""
        return int(_of_module(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return the factor of a module's update."""
        rank, alpha = self.rank(module), _of_module(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def covers(self, module: str) -> bool:
        """Tell whether a module is among the targets."""
        ends = self.target_modules
        return not ends or any(f".{module}".endswith(f".{end}") for end in ends)


def _of_module(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that the end of a module's name matches."""
    return next((v for key, v in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)

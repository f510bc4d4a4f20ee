"""adapter_config.json of peft's folders: what it means, and what is refused, in one line.

An adapter adds scaling · B A to a linear layer's weight, with A [r, n_in] and B [n_out, r] (Hu et
al., "LoRA", 2021). scaling is alpha / r, or alpha / √r with `use_rslora` (Kalajdzievski, 2023).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from kvasir.model.platform.files import parse_object
from kvasir.model.platform.suggestions import did_you_mean, first_problem
from kvasir.model.records import Record

ADAPTER_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 4096
# Fields that change nothing once an adapter is trained, or that its tensors tell as well.
_IGNORED = {"auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout"}
_IGNORED |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
_IGNORED |= {"fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config"}
_IGNORED |= {"ensure_weight_tying"}
_EMPTY: tuple[object, ...] = (None, False, "", [], {})  # values of fields that are not computed
_SPECIFIED = {"r": "r", "alpha": "lora_alpha", "modules": "target_modules", "rslora": "use_rslora"}
Rank = Annotated[int, Field(gt=0, le=MOST_RANK)]
Alpha = Annotated[float, Field(gt=0)]
End = Annotated[str, Field(pattern=r"^\^?[\w.-]+\$?$")]  # of modules' names
Number = TypeVar("Number", int, float)


class AdapterError(ValueError):
    """An adapter that cannot be used or made; one line with its name, the field, what is there."""


def refuse(name: str, field: str, found: str, expected: str) -> AdapterError:
    """Return the error of an adapter, in one line."""
    found = " ".join(found.split())[:200]
    return AdapterError(f"adapter {name!r}: {field} is {found}; expected {expected}")


class AdapterConfig(Record):
    """The ranks and factors of modules' updates, by peft's names.

    target_modules: ends of modules' names, of an adapter that is to be made; none are all. The ways
    to begin that are missing in init_lora_weights change the weights of the model as well.
    """

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"] | None = None
    base_model_name_or_path: str | None = None
    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    rank_pattern: dict[End, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[End, Alpha] = Field(default_factory=dict)
    target_modules: list[str] = Field(default_factory=list)
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] = True

    @classmethod
    def parse(cls, text: str, base: str) -> AdapterConfig:
        """Read what --lora says of an adapter of `base`, as "r=16,alpha=32,modules=q_proj+v_proj".

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
    def read(cls, content: bytes, name: str) -> AdapterConfig:
        """Read a folder's adapter_config.json. name: in errors. Raises AdapterError."""
        try:
            values = parse_object(content)
        except ValueError as error:
            raise refuse(name, ADAPTER_FILE, f"unusable (it {error})", "peft's own") from None
        known = cls.model_fields.keys() - _IGNORED
        for field, value in values.items():
            if field not in known | _IGNORED and value not in _EMPTY:
                raise refuse(name, field, repr(value), "nothing: this is not computed")
        given = {key: values[key] for key in known if values.get(key) is not None}
        try:
            return cls.model_validate(given, strict=True)
        except ValidationError as error:
            raise AdapterError(f"adapter {name!r}: {first_problem(error)}") from None

    def rank(self, module: str) -> int:
        """Return the rank of a module's update."""
        return _of_module(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """Return the factor of a module's update."""
        rank, alpha = self.rank(module), _of_module(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def covers(self, module: str) -> bool:
        """Tell whether a module is among the targets."""
        ends = self.target_modules
        return not ends or any(f".{module}".endswith(f".{end}") for end in ends)


def _of_module(pattern: Mapping[str, Number], module: str, default: Number) -> Number:
    """Return the value of the first pattern that the end of a module's name matches."""
    return next((v for key, v in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)

"""adapter_config.json, as peft writes it for LoRA: what it means, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.model.not_a_model import ADAPTER_FILE
from kvasir.model.platform.files import read_object
from kvasir.model.platform.suggestions import did_you_mean

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
MODEL_PREFIX = "base_model.model."  # of a module's name in that file
_MOST_RANK = 4096
_SPECIFICATION = ("r", "alpha", "modules", "rslora")
# Fields that change nothing of a finished adapter, or that its tensors tell as well.
_IGNORED = {
    *("peft_version", "auto_mapping", "task_type", "revision", "inference_mode", "lora_dropout"),
    *("init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
_PATTERNS = {"rank_pattern", "alpha_pattern"}
_NEUTRAL: tuple[object, ...] = (None, False, "none", [], {})


class AdapterError(ValueError):
    """An adapter that cannot be read or made; one line with the value and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The rank and scale of each module's update, and the model that it is for.

    The scale is alpha / r (Hu et al. 2022) or, with use_rslora, alpha / √r (Kalajdzievski 2023).
    target_modules: the ends of modules' names; none are all. Patterns are regular expressions of
    such ends. base: the model's name or path.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    target_modules: Sequence[str] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base: str | None = None

    @classmethod
    def parse(cls, text: str) -> AdapterConfig:
        """Read what --lora says, as "r=16,alpha=32,modules=q_proj+v_proj,rslora".

        Raises AdapterError.
        """
        given = dict[str, str]()
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in _SPECIFICATION or (name == "rslora") == bool(equals) or name in given:
                advice = did_you_mean(name, _SPECIFICATION, f"write {_SPECIFICATION[0]}=16")
                advice = "each is given once" if name in given else advice
                advice = "write it without a value" if name == "rslora" and equals else advice
                raise AdapterError(f"--lora has {part.strip()!r}; {advice}")
            given[name] = value
        r = _number(given.get("r", ""), "r")
        alpha = _number(given["alpha"], "alpha") if "alpha" in given else 2 * r
        if r != int(r) or r > _MOST_RANK:
            raise AdapterError(f"--lora's r is a whole number up to {_MOST_RANK}, not {r:g}")
        modules = tuple(filter(None, given.get("modules", "").split("+")))
        return cls(r=int(r), lora_alpha=alpha, use_rslora="rslora" in given, target_modules=modules)

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Read a folder's adapter_config.json. Raises AdapterError, and OSError."""
        path = folder / ADAPTER_FILE
        values = read_object(path, AdapterError)
        if (kind := values.get("peft_type")) != "LORA":
            raise AdapterError(f"{path} has peft_type {kind!r}; only 'LORA' is computed")
        base = values.get("base_model_name_or_path")
        known = {"peft_type", "r", "lora_alpha", "use_rslora", "base_model_name_or_path"}
        for key, value in values.items():
            if key not in known | _PATTERNS | _IGNORED and value not in _NEUTRAL:
                raise AdapterError(f"{path} has {key} {value!r:.80}, which is not computed")
        ranks, alphas = (values.get(key) or {} for key in sorted(_PATTERNS, reverse=True))
        try:
            numbers: list[Any] = [values["r"], values["lora_alpha"]]
            numbers += [*ranks.values(), *alphas.values()]
        except (KeyError, AttributeError) as error:
            raise AdapterError(f"{path} is incomplete ({error}); copy it again") from None
        for value in numbers:
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise AdapterError(f"{path} has {value!r:.80} for a rank or an alpha")
        return cls(
            r=values["r"],
            lora_alpha=values["lora_alpha"],
            use_rslora=bool(values.get("use_rslora")),
            rank_pattern=ranks,
            alpha_pattern=alphas,
            base=base if isinstance(base, str) else None,
        )

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

    def to_json(self, targets: Sequence[str], *, causal: bool, transposed: bool) -> str:
        """Return the file's text, with fields that peft, transformers and vLLM read.

        targets: ends of the names of all modules with an update. transposed: their matrices are.
        """
        values: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if causal else None,
            "base_model_name_or_path": self.base,
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "use_rslora": self.use_rslora,
            "target_modules": list(targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": transposed,
            "modules_to_save": None,
            "inference_mode": True,
        }
        return json.dumps(values, indent=2) + "\n"


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise AdapterError(f"--lora's {name} must be a number above 0, as {name}=16, not {text!r}")
    return value


def _of_module(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that the end of a module's name matches."""
    return next((v for key, v in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)

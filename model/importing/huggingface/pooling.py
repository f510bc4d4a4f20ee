"""The pooling of a folder: its sentence-transformers modules, or its classifier."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer, normalizers

from kvasir.model.config import Pooling, TransformerConfig
from kvasir.model.configuration.parts import Projection
from kvasir.model.directory import CONFIG_FILE, EMBEDDING_FILE
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.families.family import Dense, Family
from kvasir.model.importing.huggingface.tokenizer import TOKENIZER_CONFIG_FILE, read_optional
from kvasir.model.importing.tensors import first_rows
from kvasir.model.platform.files import read_limited
from kvasir.model.platform.suggestions import first_problem
from kvasir.model.records import EmbeddingDefaults
from kvasir.model.tensor_files import StoredTensor, list_tensors

CLASSIFIER = "ForSequenceClassification"  # the end of its architecture's name
_MODULES_FILE = "modules.json"
_MODULES = TypeAdapter(list[dict[str, Any]])
_SETTINGS = "sentence_*_config.json"
_MODES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FORMER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
}
_INPUT = ("sentence_embedding", None)
_OF_DENSE: dict[str, tuple[Any, ...]] = {
    "activation_function": tuple(_ACTIVATIONS),
    "bias": (True, False, None),
    "module_input_name": _INPUT,
    "module_output_name": _INPUT,
    "use_residual": (False, None),
}


def add_pooling(
    source: Path,
    values: Mapping[str, Any],
    family: Family,
    config: TransformerConfig,
    notes: list[str],
) -> tuple[Family, TransformerConfig, list[StoredTensor]]:
    """Return a family and a configuration with their pooling, if any, and its further tensors.

    values: of config.json. Raises UnsupportedError for a pooling that Kvasir does not compute.
    """
    tensors: list[StoredTensor] = []
    if any(name.endswith(CLASSIFIER) for name in values.get("architectures") or []):
        layers, pooling = _read_classifier(source, values, family, config)
    elif (source / _MODULES_FILE).is_file():
        layers, pooling = _read_modules(source, config, tensors)
    elif config.causal:
        return family, config, tensors
    else:
        notes.append(f"it has no {_MODULES_FILE}, so a text's vector is the mean of its tokens'")
        layers, pooling = (), Pooling(kind="mean")
    if "norm" in family.scales:
        raise _wrong(CONFIG_FILE, "model_type", values["model_type"], "no vectors of its texts")
    modules = dict(family.modules)
    for i, layer in enumerate(layers):
        modules[f"pooler.projections.{i}.linear"] = layer.module
        modules[f"pooler.projections.{i}.norm"] = layer.norm or ""
    if config.has_learned_positions:
        table = family.source("position_embedding")
        modules["position_embedding"] = first_rows(table, config.max_model_len)
    family = replace(family, modules=modules, unused=(*family.unused, "lm_head."))
    config = replace(
        config,
        pooling=pooling,
        max_model_len=_longest(source, config.max_model_len),
        tied_embeddings=True,
        head_bias=False,
        head_projection=None,
        bos_token_id=None,
        eos_token_ids=(),
    )
    return family, config, tensors


def _read_classifier(
    source: Path, values: Mapping[str, Any], family: Family, config: TransformerConfig
) -> tuple[tuple[Dense, ...], Pooling]:
    """Return the layers that score labels. A single label is a reranker's, or a regression."""
    given = values.get("id2label") or {str(i): f"LABEL_{i}" for i in range(2)}
    try:
        labels = tuple(given[str(i)] for i in range(len(given)))
    except (LookupError, TypeError):
        raise _wrong(CONFIG_FILE, "id2label", given, "a text for each of 0, 1, …") from None
    key = "classifier_pooling"
    kind: Any = "last" if config.causal else values.get(key, "cls")
    if kind not in ("cls", "mean", "last"):
        raise _wrong(CONFIG_FILE, key, kind, "'cls' or 'mean'")
    activation: Any = "softmax"
    if values.get("problem_type") == "multi_label_classification":
        activation = "sigmoid"
    elif len(labels) == 1:
        own = values.get("sentence_transformers") or read_optional(source / EMBEDDING_FILE)
        if not isinstance(own, dict):
            raise _wrong(CONFIG_FILE, "sentence_transformers", own, "an object")
        former = values.get("sbert_ce_default_activation_function")
        activation = str(own.get("activation_fn") or former or "Sigmoid").rpartition(".")[2].lower()
        if activation not in ("sigmoid", "identity"):
            raise _wrong(CONFIG_FILE, "activation_fn", activation, "'sigmoid' or 'identity'")
    layers = (*family.classifier[:-1], replace(family.classifier[-1], d_out=len(labels)))
    projections = _projections(layers, config)
    return layers, Pooling(
        kind=kind, projections=projections, labels=labels, label_activation=activation
    )


def _read_modules(
    source: Path, config: TransformerConfig, tensors: list[StoredTensor]
) -> tuple[tuple[Dense, ...], Pooling]:
    """Return what follows the network in modules.json; its tensors are added to `tensors`."""
    try:
        listed = _MODULES.validate_json(read_limited(source / _MODULES_FILE))
        steps = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    except (ValidationError, LookupError):
        raise UnsupportedError(f"{_MODULES_FILE} is not a list of modules; copy it again") from None
    steps = [step for step in steps if step[0] != "Dropout"]
    kinds = [kind for kind, _ in steps]
    dense = kinds[2:-1] if kinds[-1:] == ["Normalize"] else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(dense) - {"Dense"} or steps[0][1]:
        wanted = "Transformer in the folder itself, Pooling, any Dense, and perhaps Normalize"
        raise _wrong(_MODULES_FILE, "list", kinds, wanted)
    layers = []
    for kind, name in steps[1:]:
        if Path(name).name != name or name in ("", ".."):
            raise _wrong(_MODULES_FILE, "path", name, "what is in the folder")
        if kind == "Dense":
            layers.append(_read_dense(source / name))
            stored = list_tensors(source / name)
            tensors += (replace(tensor, name=f"{name}.{tensor.name}") for tensor in stored)
    file = f"{steps[1][1]}/{CONFIG_FILE}"
    values = read_optional(source / file)
    former = [mode for key, mode in _FORMER_MODES.items() if values.get(key)]
    mode: Any = values.get("pooling_mode", former or "mean")
    if isinstance(mode, list) and len(mode) == 1:
        mode = mode[0]
    if not isinstance(mode, str) or mode not in _MODES:
        raise _wrong(file, "pooling_mode", mode, f"one of {', '.join(_MODES)}")
    if values.get("include_prompt") is False:
        raise _wrong(file, "include_prompt", False, "poolings of the prompt, too")
    kept: Any = _MODES[mode]
    pooling = Pooling(
        kind=kept, projections=_projections(layers, config), normalize=kinds[-1] == "Normalize"
    )
    return tuple(layers), pooling


def _read_dense(folder: Path) -> Dense:
    values = read_optional(folder / CONFIG_FILE)
    for key, allowed in _OF_DENSE.items():
        if values.get(key) not in allowed:
            wanted = " or ".join(str(value) for value in allowed if value is not None)
            raise _wrong(f"{folder.name}/{CONFIG_FILE}", key, values.get(key), wanted)
    activation: Any = _ACTIVATIONS[values["activation_function"]]
    bias = values.get("bias") is not False
    return Dense(f"{folder.name}.linear", activation, bias, d_out=values.get("out_features"))


def _projections(layers: Iterable[Dense], config: TransformerConfig) -> tuple[Projection, ...]:
    return tuple(
        Projection(
            d_out=config.d_model if layer.d_out is None else layer.d_out,
            activation=layer.activation,
            bias=layer.bias,
            norm=layer.norm is not None,
        )
        for layer in layers
    )


def _longest(source: Path, most: int) -> int:
    """Return the number of tokens beyond which sentence-transformers would cut a text.

    Its own settings go before those of the tokenizer.
    """
    for path in (*source.glob(_SETTINGS), source / TOKENIZER_CONFIG_FILE):
        values = read_optional(path)
        for key in ("max_seq_length", "model_max_length"):
            if (limit := values.get(key)) is not None:
                if type(limit) not in (int, float) or not limit >= 2:
                    raise _wrong(path.name, key, limit, "at least 2 tokens")
                return int(min(most, limit))
    return most


def read_prompts(source: Path) -> str | None:
    """Return config_sentence_transformers.json with what Kvasir reads; None without the file."""
    values = read_optional(source / EMBEDDING_FILE)
    given = {key: values[key] for key in EmbeddingDefaults.model_fields if values.get(key)}
    try:
        defaults = EmbeddingDefaults(**given)
    except ValueError as error:
        raise UnsupportedError(f"{EMBEDDING_FILE}: {first_problem(error)}") from None
    return defaults.model_dump_json(indent=2) + "\n" if values else None


def lowercased(tokenizer: str, source: Path) -> str:
    """Return a tokenizer.json that first makes letters small, if the folder asks for that."""
    settings = (read_optional(path) for path in source.glob(_SETTINGS))
    if not any(values.get("do_lower_case") for values in settings):
        return tokenizer
    made = Tokenizer.from_str(tokenizer)
    own = [made.normalizer] if made.normalizer else []
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return json.dumps(json.loads(made.to_str()), ensure_ascii=False)


def _wrong(file: str, key: str, value: object, wanted: str) -> UnsupportedError:
    return UnsupportedError(f"{file}'s {key} is {value!r}; Kvasir computes {wanted}")

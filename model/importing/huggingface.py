"""The import of a Hugging Face checkpoint folder as a checkpoint directory, whole or not at all.

The folder is checked before anything is written: its configuration, its tokenizer, and the shapes
in the headers of its weights. `model.importing.families` has the tables.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from model.bundle import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    GenerationDefaults,
    token_texts,
)
from model.config import ConfigError, DecoderConfig
from model.files import new_directory, read_object
from model.importing.families import FAMILIES
from model.importing.family import Family
from model.importing.tensors import reorder_rotary_pairs
from model.importing.weights import PlannedTensor, UnsupportedError, write_safetensors
from model.network.skeleton import parameter_shapes
from model.progress import Progress, unheard
from model.tensor_files import WEIGHTS_FILE, Shape, StoredTensor, TensorFileError, list_tensors
from model.tokenizer import TokenizerError, load_tokenizer

_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_CHAT_TEMPLATES = "additional_chat_templates"
_TEMPLATES = TypeAdapter(dict[str, str])
_SPECIAL_TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
# Tensors that are computed, not learned.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))$")
_LAYER = re.compile(r"(?<=^blocks\.)\d+")
_REWRITE_TOKENIZER = (
    "write one from its other tokenizer files with transformers: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of `import_checkpoint`."""

    family: str
    config: DecoderConfig
    n_parameters: int
    dtype: str  # of most weights
    has_chat_template: bool
    notes: tuple[str, ...]  # what was left out of the folder


def import_checkpoint(source: Path, out: Path, progress: Progress = unheard) -> Imported:
    """Write the checkpoint directory `out` from config.json, *.safetensors and tokenizer.json.

    Weights keep their types, and one parameter at a time is in memory. Raises UnsupportedError
    before anything is written, and FileExistsError when `out` is in use.
    """
    notes: list[str] = []
    try:
        family, config = _read_config(source)
        _check_tokenizer(source, config)
        texts = {
            CHAT_TEMPLATE_FILE: _chat_template(source, notes),
            SPECIAL_TOKENS_FILE: _special_tokens(source),
            GENERATION_FILE: _generation_defaults(source, notes),
        }
        config, weights = _plan(family, config, list_tensors(source, _BUFFERS))
    except (
        *(ConfigError, SafetensorError),
        *(TensorFileError, TokenizerError, UnsupportedError),
    ) as error:
        raise UnsupportedError(f"{source} cannot be imported: {error}") from None
    with new_directory(out) as part:
        config.save(part / CONFIG_FILE)
        shutil.copyfile(source / TOKENIZER_FILE, part / TOKENIZER_FILE)
        for name, text in texts.items():
            if text is not None:
                (part / name).write_text(text, encoding="utf-8")
        write_safetensors(part / WEIGHTS_FILE, weights, progress)
    counts: Counter[torch.dtype] = Counter()
    for weight in weights:
        counts[weight.dtype] += torch.Size(weight.shape).numel()
    dtype = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    has_chat_template = texts[CHAT_TEMPLATE_FILE] is not None
    return Imported(family.title, config, counts.total(), dtype, has_chat_template, tuple(notes))


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where the file is missing."""
    return read_object(path, UnsupportedError) if path.is_file() else {}


def _read_config(source: Path) -> tuple[Family, DecoderConfig]:
    if not (source / CONFIG_FILE).is_file():
        raise UnsupportedError(
            f"it has no {CONFIG_FILE}; name a folder with that, *.safetensors and {TOKENIZER_FILE}"
        )
    values, generation = _read_object(source / CONFIG_FILE), _read_object(source / GENERATION_FILE)
    kind, names = values.get("model_type"), values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedError(f"{CONFIG_FILE}'s architectures is {names!r}, not a list of names")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not set(names) <= set(family.architectures):
        supported = ", ".join(f"{one.architectures[0]} ({key})" for key, one in FAMILIES.items())
        raise UnsupportedError(
            f"{CONFIG_FILE} describes {' '.join(names) or 'a model'} of model_type {kind!r}; "
            f"supported are {supported}"
        )
    options = family.options(values)
    bos, eos = (
        options[key] if generation.get(key) is None else generation[key]
        for key in ("bos_token_id", "eos_token_id")
    )
    ends = eos if isinstance(eos, list) else [eos] * (eos is not None)
    return family, family.config(values, bos_token_id=bos, eos_token_ids=ends)


def _check_tokenizer(source: Path, config: DecoderConfig) -> None:
    if not (source / TOKENIZER_FILE).is_file():
        raise UnsupportedError(f"it has no {TOKENIZER_FILE}; {_REWRITE_TOKENIZER}")
    tokenizer = load_tokenizer(source / TOKENIZER_FILE, config.vocab_size)
    key = "added_tokens_decoder"
    wanted = _read_object(source / _TOKENIZER_CONFIG_FILE).get(key, {})
    if not isinstance(wanted, dict):
        raise UnsupportedError(f"{_TOKENIZER_CONFIG_FILE}'s {key} is {wanted!r}, not an object")
    added = {str(i): token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    for token_id, token in wanted.items():  # transformers adds those that are missing
        content = token.get("content") if isinstance(token, dict) else token
        if added.get(token_id) != content:
            raise UnsupportedError(
                f"{_TOKENIZER_CONFIG_FILE} adds the token {content!r} as {token_id}, which "
                f"{TOKENIZER_FILE} does not have; {_REWRITE_TOKENIZER}"
            )


def _chat_template(source: Path, notes: list[str]) -> str | None:
    """Return the default template, from files or else from tokenizer_config.json.

    transformers has others by name, as tool_use for tools. Files of the folder go before the
    single file.
    """
    more = (source / _CHAT_TEMPLATES).glob("*.jinja")
    files = {"default": source / CHAT_TEMPLATE_FILE} | {path.stem: path for path in more}
    templates: dict[str, str] = {}
    for name, path in files.items():
        try:
            if path.is_file():
                templates[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UnsupportedError(f"{path.name} is not UTF-8 text") from None
    given = _read_object(source / _TOKENIZER_CONFIG_FILE).get("chat_template")
    if not templates and given is not None:
        try:
            if isinstance(given, list):
                given = {one["name"]: one["template"] for one in given}
            given = {"default": given} if isinstance(given, str) else given
            templates = _TEMPLATES.validate_python(given)
        except (LookupError, TypeError, ValidationError):
            raise UnsupportedError(
                f"{_TOKENIZER_CONFIG_FILE}'s chat_template is neither a text nor texts by name"
            ) from None
    if others := sorted(templates.keys() - {"default"}):
        without = "" if "default" in templates else "; none of them is the default"
        notes.append(f"chat templates left out: {', '.join(others)}{without}")
    return templates.get("default")


def _special_tokens(source: Path) -> str | None:
    """Return special_tokens_map.json: the texts of tokens that a chat template may name.

    They are found as transformers finds them. The source's own special_tokens_map.json is of an
    older form, and counts where tokenizer_config.json lacks added_tokens_decoder: it overrides the
    usual names, but not a model's own.
    """
    values = _read_object(source / _TOKENIZER_CONFIG_FILE)
    older = _read_object(source / SPECIAL_TOKENS_FILE)
    if "added_tokens_decoder" in values:
        older = {}
    usual = {name: token for name, token in older.items() if name in _SPECIAL_TOKENS}
    every = older | values | usual
    tokens = {name: token for name, token in every.items() if name.endswith("_token")}
    for extra in (values.get("extra_special_tokens"), older.get("extra_special_tokens")):
        tokens |= extra if isinstance(extra, dict) else {}  # a list gives no names
    texts = token_texts(tokens)
    return json.dumps(texts, indent=2, ensure_ascii=False) + "\n" if texts else None


def _generation_defaults(source: Path, notes: list[str]) -> str | None:
    """Return generation_config.json: the recommended sampling parameters that the API has.

    Without do_sample only the repetition penalty has a meaning.
    """
    given = _read_object(source / GENERATION_FILE)
    names = GenerationDefaults.model_fields if given.get("do_sample") else ["repetition_penalty"]
    defaults: dict[str, float] = {}
    for name in names:
        try:
            defaults |= GenerationDefaults.model_validate({name: given.get(name)}).given()
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            notes.append(f"{GENERATION_FILE}'s {name} is left out: {given[name]!r}: {reason}")
    return json.dumps(defaults, indent=2) + "\n" if defaults else None


def _plan(
    family: Family, config: DecoderConfig, stored: Iterable[StoredTensor]
) -> tuple[DecoderConfig, list[PlannedTensor]]:
    """Return the configuration, untied where the head differs, and every parameter to be made.

    Raises UnsupportedError naming a tensor that is missing, unknown or of the wrong shape.
    """
    held: dict[str, StoredTensor] = {}
    for tensor in stored:
        if (name := family.plain_name(tensor.name)) in held:
            names = f"{held[name].name!r} and {tensor.name!r}"
            raise UnsupportedError(f"tensors {names} are the same parameter")
        held[name] = tensor
    embedding, head = f"{family.modules['embedding']}.weight", f"{family.modules['head']}.weight"
    if config.tied_embeddings and head in held:  # tied ones are stored under either name or both
        other = held.pop(head)
        one = held.setdefault(embedding, other)
        if one is not other and not torch.equal(one.read(), other.read()):
            held[head] = other
            config = replace(config, tied_embeddings=False)
    config.check_size(sum(torch.Size(tensor.shape).numel() for tensor in held.values()))
    shapes = parameter_shapes(config)
    weights = [_take(name, shape, family, config, held) for name, shape in shapes.items()]
    for tensor in held.values():
        unknown = f"the unknown tensor {tensor.name!r}"
        raise UnsupportedError(f"{tensor.file.name} holds {unknown} for its {CONFIG_FILE}")
    return config, weights


def _take(
    name: str, shape: Shape, family: Family, config: DecoderConfig, held: dict[str, StoredTensor]
) -> PlannedTensor:
    """Return the plan of a parameter; its tensors are removed from `held`."""
    layer = (_LAYER.search(name) or ("",))[0]
    module, _, kind = _LAYER.sub("*", name).rpartition(".")
    source = family.source(module)
    tensors = []
    names = source.names(layer, config)
    for theirs, expected in zip(names, source.shapes(shape, config), strict=True):
        wanted = f"{theirs}.{kind}"
        if wanted not in held:
            missing = f"the tensor {wanted!r} of {list(expected)}"
            raise UnsupportedError(f"it lacks {missing} for its {CONFIG_FILE}")
        tensor = held.pop(wanted)
        if tensor.shape != expected:
            raise UnsupportedError(
                f"tensor {tensor.name!r} in {tensor.file.name} has shape {list(tensor.shape)}, "
                f"not {list(expected)}"
            )
        tensors.append(tensor)
    stored = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    dtype = torch.float32 if source.in_float32 else stored

    def make() -> Tensor:
        made = source.join([tensor.read() for tensor in tensors], config)
        if ".attention.qkv." in name:
            made = reorder_rotary_pairs(made, config)
        return made.to(dtype).expand(shape).contiguous()

    return PlannedTensor(name, shape, dtype, make)

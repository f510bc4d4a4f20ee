"""A Hugging Face checkpoint folder → a checkpoint directory of ours, all or nothing.

What the folder holds is judged before anything is written: its configuration, its tokenizer, and the shapes in the
headers of its weights. `model.families` has the tables.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from model.bundle import CHAT_TEMPLATE_FILE, GENERATION_FILE, SPECIAL_TOKENS_FILE, GenerationDefaults
from model.checkpoint import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE
from model.config import ConfigError, DecoderConfig
from model.families import FAMILIES
from model.family import Family, UnsupportedError
from model.new_directory import new_directory
from model.tensors import Source, parameter_shapes, rotary_pairs_apart
from model.tokenizer import TokenizerError, load_tokenizer, vocabulary_size
from model.weights import Shape, Stored, WeightsError, Written, stored_tensors, write_safetensors

_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))$")  # computed, not learned
_LAYER = re.compile(r"(?<=^blocks\.)\d+")


class HuggingFaceError(Exception):
    """A folder that cannot be imported; one line with the file and the mend."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What `import_checkpoint` wrote. dtype: of most of the weights."""

    family: str
    config: DecoderConfig
    n_parameters: int
    dtype: str
    has_chat_template: bool


def import_checkpoint(source: Path, out: Path) -> Imported:
    """Write the checkpoint directory `out` from a folder with config.json, *.safetensors and tokenizer.json.

    Weights keep their types, and one parameter at a time is in memory. Raises HuggingFaceError naming the file, key or
    tensor that is missing, unknown or does not fit, before anything is written; FileExistsError when `out` is in use.
    """
    try:
        family, config = _read_config(source)
        _check_tokenizer(source / TOKENIZER_FILE, config)
        texts = {
            CHAT_TEMPLATE_FILE: _chat_template(source),
            SPECIAL_TOKENS_FILE: _special_tokens(source),
            GENERATION_FILE: _generation(source),
        }
        config, weights = _plan(family, config, stored_tensors(source, _BUFFERS))
    except (ConfigError, SafetensorError, TokenizerError, UnsupportedError, WeightsError) as error:
        raise HuggingFaceError(f"{source} cannot be imported: {error}") from None
    with new_directory(out) as part:
        config.save(part / CONFIG_FILE)
        shutil.copyfile(source / TOKENIZER_FILE, part / TOKENIZER_FILE)
        for name, text in texts.items():
            if text is not None:
                (part / name).write_text(text, encoding="utf-8")
        write_safetensors(part / WEIGHTS_FILE, weights)
    counts: Counter[torch.dtype] = Counter()
    for weight in weights:
        counts[weight.dtype] += torch.Size(weight.shape).numel()
    dtype = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    return Imported(family.title, config, counts.total(), dtype, texts[CHAT_TEMPLATE_FILE] is not None)


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a file that may be missing, which then is an empty one."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UnsupportedError(f"{path.name} does not hold an object")
    return values


def _read_config(source: Path) -> tuple[Family, DecoderConfig]:
    if not (source / CONFIG_FILE).is_file():
        raise UnsupportedError(f"it has no {CONFIG_FILE}; name a folder with that, *.safetensors and {TOKENIZER_FILE}")
    values, generation = _read_object(source / CONFIG_FILE), _read_object(source / GENERATION_FILE)
    kind, architectures = values.get("model_type"), values.get("architectures") or ()
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not set(architectures) <= set(family.architectures):
        supported = ", ".join(f"{known.architectures[0]} ({name})" for name, known in FAMILIES.items())
        named = f"{' '.join(map(str, architectures)) or 'a model'} of model_type {kind!r}"
        raise UnsupportedError(f"{CONFIG_FILE} describes {named}; supported are {supported}")
    options = {**family.defaults, **values}
    bos, eos = (
        options[key] if generation.get(key) is None else generation[key] for key in ("bos_token_id", "eos_token_id")
    )
    ends = eos if isinstance(eos, list) else [eos] * (eos is not None)
    return family, family.config(values, bos_token_id=bos, eos_token_ids=ends)


def _check_tokenizer(path: Path, config: DecoderConfig) -> None:
    if not path.is_file():
        raise UnsupportedError(
            f"it has no {TOKENIZER_FILE}; write one from its other tokenizer files with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if (known := vocabulary_size(load_tokenizer(path))) > config.vocab_size:
        raise UnsupportedError(
            f"{path.name} has token ids up to {known - 1}, but the decoder {config.vocab_size} tokens"
        )


def _chat_template(source: Path) -> str | None:
    """chat_template.jinja, or tokenizer_config.json's only or default one."""
    if (path := source / CHAT_TEMPLATE_FILE).is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UnsupportedError(f"{CHAT_TEMPLATE_FILE} is not UTF-8 text") from None
    template = _read_object(source / _TOKENIZER_CONFIG_FILE).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UnsupportedError(f"{_TOKENIZER_CONFIG_FILE}'s chat_template is neither a text nor a list of named ones")
    return template


def _special_tokens(source: Path) -> str | None:
    """special_tokens_map.json: the texts of the tokens that a chat template may name."""
    tokens: dict[str, str] = {}
    for file in (SPECIAL_TOKENS_FILE, _TOKENIZER_CONFIG_FILE):  # the second overrides the first
        values = _read_object(source / file)
        for name in _SPECIAL_TOKENS:
            token = values.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                tokens[name] = text
    return json.dumps(tokens, indent=2, ensure_ascii=False) + "\n" if tokens else None


def _generation(source: Path) -> str | None:
    """Advice on sampling. Without do_sample the file's temperature and its like mean nothing; the penalty does."""
    given = _read_object(source / GENERATION_FILE)
    names = GenerationDefaults.model_fields if given.get("do_sample") else ("repetition_penalty",)
    try:
        advice = GenerationDefaults.model_validate({name: given[name] for name in names if name in given}).given()
    except ValidationError as error:
        first = error.errors()[0]
        raise UnsupportedError(f"{GENERATION_FILE}'s {first['loc'][0]} is {first['input']!r}: {first['msg']}") from None
    return json.dumps(advice, indent=2) + "\n" if advice else None


def _plan(family: Family, config: DecoderConfig, stored: Iterable[Stored]) -> tuple[DecoderConfig, list[Written]]:
    """Every parameter, to be made of the tensors it is in, and the configuration; untied where the head is another.

    Raises UnsupportedError naming a tensor that is missing, unknown or of the wrong shape.
    """
    held: dict[str, Stored] = {}
    for tensor in stored:
        if (name := family.plain_name(tensor.name)) in held:
            raise UnsupportedError(f"tensors {held[name].name!r} and {tensor.name!r} are the same parameter")
        held[name] = tensor
    embedding, head = (f"{family.modules[module].modules[0]}.weight" for module in ("embedding", "head"))
    if config.tied_embeddings and head in held:
        config = _settle_head(config, held, embedding, head)
    weights = [_take(name, shape, family, config, held) for name, shape in parameter_shapes(config).items()]
    for tensor in held.values():
        raise UnsupportedError(f"{tensor.file.name} holds the unknown tensor {tensor.name!r} for its {CONFIG_FILE}")
    return config, weights


def _settle_head(config: DecoderConfig, held: dict[str, Stored], embedding: str, head: str) -> DecoderConfig:
    """Tied embeddings are stored under either name or both; a head with other contents is one of its own."""
    if embedding not in held:
        held[embedding] = held.pop(head)
    elif held[embedding].shape != held[head].shape or not torch.equal(held[embedding].read(), held[head].read()):
        return replace(config, tied_embeddings=False)
    else:
        del held[head]
    return config


def _take(name: str, shape: Shape, family: Family, config: DecoderConfig, held: dict[str, Stored]) -> Written:
    """One of our parameters, whose tensors are taken out of those held."""
    layer = (_LAYER.search(name) or ("",))[0]
    module, _, kind = _LAYER.sub("*", name).rpartition(".")
    source = family.modules[module]
    tensors = []
    for theirs, expected in zip(source.modules, source.shapes(shape, config), strict=True):
        wanted = f"{theirs.replace('*', layer)}.{kind}"
        if wanted not in held:
            raise UnsupportedError(f"it lacks the tensor {wanted!r} of {list(expected)} for its {CONFIG_FILE}")
        tensor = held.pop(wanted)
        if tensor.shape != expected:
            raise UnsupportedError(
                f"tensor {tensor.name!r} in {tensor.file.name} has shape {list(tensor.shape)}, not {list(expected)}"
            )
        tensors.append(tensor)
    stored = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    dtype = torch.float32 if source.in_float32 else stored
    return Written(name, shape, dtype, partial(_make, name, shape, source, tensors, dtype, config))


def _make(
    name: str, shape: Shape, source: Source, tensors: list[Stored], dtype: torch.dtype, config: DecoderConfig
) -> Tensor:
    made = source.join([tensor.read() for tensor in tensors], config)
    if ".attention.qkv." in name:
        made = rotary_pairs_apart(made, config)
    return made.to(dtype).expand(shape).contiguous()

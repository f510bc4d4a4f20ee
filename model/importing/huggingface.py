"""A Hugging Face checkpoint folder → a checkpoint directory of ours, all or nothing.

What the folder holds is judged before anything is written: its configuration, its tokenizer, and the shapes in the
headers of its weights. `model.importing.families` has the tables.
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

from model.bundle import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    GenerationDefaults,
)
from model.checkpoint import WEIGHTS_FILE
from model.config import ConfigError, DecoderConfig
from model.files import new_directory
from model.importing.families import FAMILIES
from model.importing.family import Family, UnsupportedError
from model.importing.tensors import Source, parameter_shapes, rotary_pairs_apart
from model.importing.weights import (
    Shape,
    Stored,
    WeightsError,
    Written,
    stored_tensors,
    write_safetensors,
)
from model.progress import Progress, unheard
from model.tokenizer import TokenizerError, load_tokenizer, vocabulary_size

_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_CHAT_TEMPLATES = "additional_chat_templates"
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))$"
)  # computed, not learned
_LAYER = re.compile(r"(?<=^blocks\.)\d+")


class HuggingFaceError(Exception):
    """A folder that cannot be imported; one line with the file and the mend."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What `import_checkpoint` wrote. dtype: of most of the weights. notes: what it left out of the folder."""

    family: str
    config: DecoderConfig
    n_parameters: int
    dtype: str
    has_chat_template: bool
    notes: tuple[str, ...]


def import_checkpoint(source: Path, out: Path, progress: Progress = unheard) -> Imported:
    """Write the checkpoint directory `out` from a folder with config.json, *.safetensors and tokenizer.json.

    Weights keep their types, and one parameter at a time is in memory. Raises HuggingFaceError naming the file, key or
    tensor that is missing, unknown or does not fit, before anything is written; FileExistsError when `out` is in use.
    """
    notes: list[str] = []
    try:
        family, config = _read_config(source)
        _check_tokenizer(source, config)
        texts = {
            CHAT_TEMPLATE_FILE: _chat_template(source, notes),
            SPECIAL_TOKENS_FILE: _special_tokens(source),
            GENERATION_FILE: _generation(source, notes),
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
        write_safetensors(part / WEIGHTS_FILE, weights, progress)
    counts: Counter[torch.dtype] = Counter()
    for weight in weights:
        counts[weight.dtype] += torch.Size(weight.shape).numel()
    dtype = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    return Imported(
        family.title,
        config,
        counts.total(),
        dtype,
        texts[CHAT_TEMPLATE_FILE] is not None,
        tuple(notes),
    )


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
        raise UnsupportedError(
            f"it has no {CONFIG_FILE}; name a folder with that, *.safetensors and {TOKENIZER_FILE}"
        )
    values, generation = _read_object(source / CONFIG_FILE), _read_object(source / GENERATION_FILE)
    kind, architectures = values.get("model_type"), values.get("architectures") or ()
    if not isinstance(architectures, list | tuple) or not all(
        isinstance(name, str) for name in architectures
    ):
        raise UnsupportedError(
            f"{CONFIG_FILE}'s architectures is {architectures!r}, not a list of names"
        )
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not set(architectures) <= set(family.architectures):
        supported = ", ".join(
            f"{known.architectures[0]} ({name})" for name, known in FAMILIES.items()
        )
        named = f"{' '.join(architectures) or 'a model'} of model_type {kind!r}"
        raise UnsupportedError(f"{CONFIG_FILE} describes {named}; supported are {supported}")
    options = {**family.defaults, **values}
    bos, eos = (
        options[key] if generation.get(key) is None else generation[key]
        for key in ("bos_token_id", "eos_token_id")
    )
    ends = eos if isinstance(eos, list) else [eos] * (eos is not None)
    return family, family.config(values, bos_token_id=bos, eos_token_ids=ends)


def _check_tokenizer(source: Path, config: DecoderConfig) -> None:
    mend = (
        "write one from its other tokenizer files with transformers: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )
    if not (source / TOKENIZER_FILE).is_file():
        raise UnsupportedError(f"it has no {TOKENIZER_FILE}; {mend}")
    tokenizer = load_tokenizer(source / TOKENIZER_FILE)
    if (known := vocabulary_size(tokenizer)) > config.vocab_size:
        raise UnsupportedError(
            f"{TOKENIZER_FILE} has token ids up to {known - 1}, but the decoder {config.vocab_size} tokens"
        )
    wanted = _read_object(source / _TOKENIZER_CONFIG_FILE).get("added_tokens_decoder", {})
    if not isinstance(wanted, dict):
        raise UnsupportedError(
            f"{_TOKENIZER_CONFIG_FILE}'s added_tokens_decoder is {wanted!r}, not an object"
        )
    added = {
        str(token_id): token.content
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    for token_id, token in wanted.items():  # transformers adds those that are missing
        content = token.get("content") if isinstance(token, dict) else token
        if added.get(token_id) != content:
            raise UnsupportedError(
                f"{_TOKENIZER_CONFIG_FILE} adds the token {content!r} as {token_id}, which {TOKENIZER_FILE} does not "
                f"have; {mend}"
            )


def _chat_template(source: Path, notes: list[str]) -> str | None:
    """The default one. transformers has others by name, and takes tool_use where there are tools."""
    templates = _chat_templates(source)
    if others := sorted(templates.keys() - {"default"}):
        without = "" if "default" in templates else "; none of them is the default"
        notes.append(f"chat templates left out: {', '.join(others)}{without}")
    return templates.get("default")


def _chat_templates(source: Path) -> dict[str, str]:
    """By name: files, of which the folder's go before the single one, or else what tokenizer_config.json holds."""
    more = sorted((source / _CHAT_TEMPLATES).glob("*.jinja"))
    files = {"default": source / CHAT_TEMPLATE_FILE} | {path.stem: path for path in more}
    if templates := {name: _read_text(path) for name, path in files.items() if path.is_file()}:
        return templates
    given = _read_object(source / _TOKENIZER_CONFIG_FILE).get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    pairs: list[tuple[Any, Any]] = [(None, given)]
    if isinstance(given, list):
        pairs = [
            (one.get("name"), one.get("template")) if isinstance(one, dict) else (None, one)
            for one in given
        ]
    elif isinstance(given, dict):
        pairs = list(given.items())
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        raise UnsupportedError(
            f"{_TOKENIZER_CONFIG_FILE}'s chat_template is neither a text nor texts by name"
        )
    return dict(pairs)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UnsupportedError(f"{path.name} is not UTF-8 text") from None


def _special_tokens(source: Path) -> str | None:
    """special_tokens_map.json: the texts of the tokens that a chat template may name, as transformers finds them.

    That file of the source's is of an older form, and counts where tokenizer_config.json lacks added_tokens_decoder: it
    overrides the usual names, but not a model's own.
    """
    values, older = (
        _read_object(source / file) for file in (_TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE)
    )
    if "added_tokens_decoder" in values:
        older = {}
    usual, own = values | older, older | values
    tokens = {name: usual.get(name) for name in _SPECIAL_TOKENS}
    tokens |= {
        name: token for name, token in own.items() if name.endswith("_token") and name not in tokens
    }
    for extra in (values.get("extra_special_tokens"), older.get("extra_special_tokens")):
        tokens |= extra if isinstance(extra, dict) else {}  # a list gives no names
    contents = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    texts = {name: text for name, text in contents.items() if isinstance(text, str)}
    return json.dumps(texts, indent=2, ensure_ascii=False) + "\n" if texts else None


def _generation(source: Path, notes: list[str]) -> str | None:
    """Advice on sampling. Without do_sample the file's temperature and its like mean nothing; the penalty does."""
    given = _read_object(source / GENERATION_FILE)
    advice: dict[str, float] = {}
    for name in (
        GenerationDefaults.model_fields if given.get("do_sample") else ("repetition_penalty",)
    ):
        try:
            advice |= GenerationDefaults.model_validate({name: given.get(name)}).given()
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            notes.append(f"{GENERATION_FILE}'s {name} is left out: {given[name]!r}: {reason}")
    return json.dumps(advice, indent=2) + "\n" if advice else None


def _plan(
    family: Family, config: DecoderConfig, stored: Iterable[Stored]
) -> tuple[DecoderConfig, list[Written]]:
    """Every parameter, to be made of the tensors it is in, and the configuration; untied where the head is another.

    Raises UnsupportedError naming a tensor that is missing, unknown or of the wrong shape.
    """
    held: dict[str, Stored] = {}
    for tensor in stored:
        if (name := family.plain_name(tensor.name)) in held:
            raise UnsupportedError(
                f"tensors {held[name].name!r} and {tensor.name!r} are the same parameter"
            )
        held[name] = tensor
    embedding, head = (
        f"{family.modules[module].modules[0]}.weight" for module in ("embedding", "head")
    )
    if config.tied_embeddings and head in held:
        config = _settle_head(config, held, embedding, head)
    weights = [
        _take(name, shape, family, config, held) for name, shape in parameter_shapes(config).items()
    ]
    for tensor in held.values():
        raise UnsupportedError(
            f"{tensor.file.name} holds the unknown tensor {tensor.name!r} for its {CONFIG_FILE}"
        )
    return config, weights


def _settle_head(
    config: DecoderConfig, held: dict[str, Stored], embedding: str, head: str
) -> DecoderConfig:
    """Tied embeddings are stored under either name or both; a head with other contents is one of its own."""
    if embedding not in held:
        held[embedding] = held.pop(head)
    elif held[embedding].shape != held[head].shape or not torch.equal(
        held[embedding].read(), held[head].read()
    ):
        return replace(config, tied_embeddings=False)
    else:
        del held[head]
    return config


def _take(
    name: str, shape: Shape, family: Family, config: DecoderConfig, held: dict[str, Stored]
) -> Written:
    """One of our parameters, whose tensors are taken out of those held."""
    layer = (_LAYER.search(name) or ("",))[0]
    module, _, kind = _LAYER.sub("*", name).rpartition(".")
    source = family.modules[module]
    tensors = []
    for theirs, expected in zip(source.modules, source.shapes(shape, config), strict=True):
        wanted = f"{theirs.replace('*', layer)}.{kind}"
        if wanted not in held:
            raise UnsupportedError(
                f"it lacks the tensor {wanted!r} of {list(expected)} for its {CONFIG_FILE}"
            )
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
    name: str,
    shape: Shape,
    source: Source,
    tensors: list[Stored],
    dtype: torch.dtype,
    config: DecoderConfig,
) -> Tensor:
    made = source.join([tensor.read() for tensor in tensors], config)
    if ".attention.qkv." in name:
        made = rotary_pairs_apart(made, config)
    return made.to(dtype).expand(shape).contiguous()

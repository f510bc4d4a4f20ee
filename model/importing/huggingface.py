"""The import of a published checkpoint as a checkpoint directory, whole or not at all.

A Hugging Face folder, or a GGUF file, is checked before anything is written: its configuration, its
tokenizer, and the shapes in the headers of its weights. `model.importing.families` has the tables.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from tokenizers import Tokenizer
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
from model.importing.families import FAMILIES, WITH_VISION
from model.importing.family import Family
from model.importing.gguf import read_gguf
from model.importing.gguf_family import read_family
from model.importing.gguf_tokenizer import read_tokenizer
from model.importing.quantized import restore
from model.importing.tensors import reorder_rotary_pairs
from model.importing.weights import PlannedTensor, UnsupportedError, write_safetensors
from model.network.skeleton import parameter_shapes
from model.progress import Progress, unheard
from model.tensor_files import WEIGHTS_FILE, Shape, StoredTensor, TensorFileError, list_tensors
from model.tokenizer import TokenizerError, check_tokenizer, load_tokenizer

_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_CHAT_TEMPLATES = "additional_chat_templates"
_TEMPLATES = TypeAdapter(dict[str, str])
_SPECIAL_TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
# Tensors that are computed, not learned, and those that only see images.
_IGNORED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))$"
    r"|^(model\.)?(vision_tower|multi_modal_projector)\."
)
_OF_BOTH = ("quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id")
# The recommended sampling parameters in a GGUF file.
_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")}
_SAMPLING |= {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_LAYER = re.compile(r"(?<=^blocks\.)\d+")
_REWRITE_TOKENIZER = (
    "write one from its other tokenizer files with transformers: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), which for a tokenizer.model "
    "needs the packages sentencepiece and protobuf, or tiktoken"
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
    """Write the checkpoint directory `out` from a Hugging Face folder or a GGUF file.

    Weights keep their types, or get those that `model.importing.quantized` gives them, and one
    parameter at a time is in memory. Raises UnsupportedError before anything is written, and
    FileExistsError when `out` is in use.
    """
    notes: list[str] = []
    read = _read_gguf if source.suffix == ".gguf" else _read_folder
    try:
        family, config, texts, stored = read(source, notes)
        config, weights = _plan(family, config, stored)
    except (
        *(ConfigError, SafetensorError),
        *(TensorFileError, TokenizerError, UnsupportedError),
    ) as error:
        raise UnsupportedError(f"{source} cannot be imported: {error}") from None
    with new_directory(out) as part:
        config.save(part / CONFIG_FILE)
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


_Read = tuple[Family, DecoderConfig, dict[str, str | None], list[StoredTensor]]


def _read_folder(source: Path, notes: list[str]) -> _Read:
    """Return a folder's family, configuration, texts by file name, and tensors."""
    family, config = _read_config(source, notes)
    template = _chat_template(source, notes)
    texts = {
        TOKENIZER_FILE: _tokenizer(source, config, template, notes),
        CHAT_TEMPLATE_FILE: template,
        SPECIAL_TOKENS_FILE: _special_tokens(source),
        GENERATION_FILE: _generation_defaults(_read_object(source / GENERATION_FILE), notes),
    }
    stored = restore(list_tensors(source, _IGNORED), _read_object(source / CONFIG_FILE), notes)
    return family, config, texts, stored


def _read_gguf(source: Path, notes: list[str]) -> _Read:
    """Return the same of a GGUF file."""
    gguf = read_gguf(source)
    tokenizer = read_tokenizer(gguf.values)
    family, config, stored = read_family(gguf, tokenizer.bos, tokenizer.ends)
    if tokenizer.size > config.vocab_size:
        raise UnsupportedError(
            f"its tokenizer has token ids up to {tokenizer.size - 1}, but the model only "
            f"{config.vocab_size} tokens"
        )
    template = gguf.values.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise UnsupportedError("its key tokenizer.chat_template is not a text")
    if others := sorted(key for key in gguf.values if key.startswith("tokenizer.chat_template.")):
        notes.append(f"chat templates left out: {', '.join(others)}")
    if gguf.rounded:
        kinds = ", ".join(sorted(set(gguf.rounded.values())))
        notes.append(
            f"{len(gguf.rounded)} weights were rounded before ({kinds}); export rounds them again"
        )
    sampling = {name: gguf.values.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    texts = {
        TOKENIZER_FILE: tokenizer.text,
        CHAT_TEMPLATE_FILE: template,
        SPECIAL_TOKENS_FILE: _json(tokenizer.special_tokens),
        GENERATION_FILE: _generation_defaults(sampling | {"do_sample": True}, notes),
    }
    return family, config, texts, stored


def _json(values: Mapping[str, object]) -> str | None:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n" if values else None


def _read_config(source: Path, notes: list[str]) -> tuple[Family, DecoderConfig]:
    if not (source / CONFIG_FILE).is_file():
        raise UnsupportedError(
            f"it has no {CONFIG_FILE}; name a folder with that, *.safetensors and "
            f"{TOKENIZER_FILE}, or a .gguf file"
        )
    values, generation = _read_object(source / CONFIG_FILE), _read_object(source / GENERATION_FILE)
    kind, names = values.get("model_type"), values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedError(f"{CONFIG_FILE}'s architectures is {names!r}, not a list of names")
    accepted = {key: family.architectures for key, family in FAMILIES.items()} | WITH_VISION
    family = None
    if isinstance(kind, str) and set(names) <= set(accepted.get(kind, ())):
        if kind in WITH_VISION:
            values = _text_part(values)
            notes.append("only the part for text is imported: the model sees no images")
        text_kind = values["model_type"]
        family = FAMILIES.get(text_kind) if isinstance(text_kind, str) else None
    if family is None:
        supported = ", ".join(f"{one[0]} ({key})" for key, one in accepted.items())
        raise UnsupportedError(
            f"{CONFIG_FILE} describes {' '.join(names) or 'a model'} of model_type {kind!r}; "
            f"supported are {supported}"
        )
    values.pop("quantization_config", None)  # of the weights alone
    options = family.options(values)
    bos, eos = (
        options[key] if generation.get(key) is None else generation[key]
        for key in ("bos_token_id", "eos_token_id")
    )
    ends = eos if isinstance(eos, list) else [eos] * (eos is not None)
    config = family.config(values, bos_token_id=None, eos_token_ids=[])
    given = [end for end in ends if type(end) is not int or 0 <= end < config.vocab_size]
    if ends and not given:
        raise UnsupportedError(
            f"eos_token_id is {eos!r}, which is beyond the vocabulary of {config.vocab_size}; name "
            f"the token that ends a text as eos_token_id in {GENERATION_FILE}"
        )
    if given != ends:
        beyond = ", ".join(str(end) for end in ends if end not in given)
        notes.append(
            f"end-of-text token {beyond} is left out: it is beyond the vocabulary of "
            f"{config.vocab_size}, so the model never produces it"
        )
    config = family.config(values, bos_token_id=bos, eos_token_ids=given)
    return family.scaled(values), config


def _text_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's values in the config.json of a model that also sees images."""
    text = values.get("text_config") or {}
    if not isinstance(text, dict):
        raise UnsupportedError(f"{CONFIG_FILE}'s text_config is {text!r}, not an object")
    usual = {"model_type": WITH_VISION[values["model_type"]][1], "tie_word_embeddings": True}
    return usual | {key: values[key] for key in _OF_BOTH if key in values} | text


def _tokenizer(source: Path, config: DecoderConfig, template: str | None, notes: list[str]) -> str:
    """Return tokenizer.json, without added tokens that the model has no embeddings for.

    Such a token pads batches, or stands for an image. The chat template must not write it.
    """
    path, size = source / TOKENIZER_FILE, config.vocab_size
    if not path.is_file():
        raise UnsupportedError(f"it has no {TOKENIZER_FILE}; {_REWRITE_TOKENIZER}")
    tokenizer = load_tokenizer(path)
    added = {str(i): token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    beyond = {i: content for i, content in added.items() if int(i) >= size}
    text = path.read_text(encoding="utf-8")
    state = json.loads(text)
    if max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0) >= size:
        check_tokenizer(tokenizer, path, size)
    if beyond:
        known = _named_tokens(source).items()
        for place, one in beyond.items():
            names = {one, *(name for name, text in known if text == one)}
            written = any(name in (template or "") for name in names)
            if written or int(place) in tokenizer.encode("").ids:
                raise UnsupportedError(
                    f"prompts need the token {one!r}, which {TOKENIZER_FILE} adds as "
                    f"{place}, but the model has only {size} tokens; import the model that was "
                    "trained with it"
                )
        kept = [token for token in state["added_tokens"] if str(token["id"]) not in beyond]
        state["added_tokens"] = kept
        notes.append(
            f"tokens that the model has no embeddings for, beyond its vocabulary of {size}, are "
            f"left out: {', '.join(map(repr, beyond.values()))}"
        )
    if _mark_spaces(state, source) or beyond:
        text = json.dumps(state, ensure_ascii=False)
        tokenizer = Tokenizer.from_str(text)
    check_tokenizer(tokenizer, path, size)
    key = "added_tokens_decoder"
    wanted = _read_object(source / _TOKENIZER_CONFIG_FILE).get(key, {})
    if not isinstance(wanted, dict):
        raise UnsupportedError(f"{_TOKENIZER_CONFIG_FILE}'s {key} is {wanted!r}, not an object")
    for token_id, token in wanted.items():  # transformers adds those that are missing
        content = token.get("content") if isinstance(token, dict) else token
        if added.get(token_id) != content:
            raise UnsupportedError(
                f"{_TOKENIZER_CONFIG_FILE} adds the token {content!r} as {token_id}, which "
                f"{TOKENIZER_FILE} does not have; {_REWRITE_TOKENIZER}"
            )
    return text


def _mark_spaces(state: dict[str, Any], source: Path) -> bool:
    """Make a Llama's tokenizer.json mark spaces as transformers 5 does; tell whether it changed.

    Files converted from SentencePiece put a space before each text between special tokens, and
    LlamaTokenizer only before the first, unless tokenizer_config.json says `legacy`. With other
    families that name this class, as Mistral and Phi-3, transformers believes the file.
    """
    values = _read_object(source / _TOKENIZER_CONFIG_FILE)
    kind, family = values.get("tokenizer_class"), _read_object(source / CONFIG_FILE)["model_type"]
    if kind not in ("LlamaTokenizer", "LlamaTokenizerFast") or family != "llama":
        return False
    if '"ByteLevel"' in json.dumps([state.get("pre_tokenizer"), state.get("decoder")]):
        return False
    with_space = values.get("add_prefix_space") is not False
    always = "always" if values.get("legacy") else "first"
    state["normalizer"] = None
    state["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": always if with_space else "never",
        "split": False,
    }
    return True


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
    """Return special_tokens_map.json: the texts of tokens that a chat template may name."""
    return _json(_named_tokens(source))


def _named_tokens(source: Path) -> dict[str, Any]:
    """Return special tokens by name.

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
    return token_texts(tokens)


def _generation_defaults(given: Mapping[str, Any], notes: list[str]) -> str | None:
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
    return _json(defaults)


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
    taken: set[str] = set()
    weights = [_take(name, shape, family, config, held, taken) for name, shape in shapes.items()]
    for name in held.keys() - taken:
        tensor = held[name]
        unknown = f"the unknown tensor {tensor.name!r}"
        raise UnsupportedError(f"{tensor.file.name} holds {unknown} for its configuration")
    return config, weights


def _take(
    name: str,
    shape: Shape,
    family: Family,
    config: DecoderConfig,
    held: dict[str, StoredTensor],
    taken: set[str],
) -> PlannedTensor:
    """Return the plan of a parameter; the names of its tensors are added to `taken`."""
    layer = (_LAYER.search(name) or ("",))[0]
    module, _, kind = _LAYER.sub("*", name).rpartition(".")
    source = family.source(module)
    tensors = []
    for theirs, expected in zip(source.names(config), source.shapes(shape, config), strict=True):
        places = theirs.replace("*", layer).split("|")[: 2 if config.parallel_residual else 1]
        names = [f"{place}.{kind}" for place in places]
        wanted = next((name for name in names if name in held), names[0])
        if wanted not in held:
            missing = f"the tensor {wanted!r} of {list(expected)}"
            raise UnsupportedError(f"it lacks {missing} for its configuration")
        taken.add(wanted)
        tensor = held[wanted]
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

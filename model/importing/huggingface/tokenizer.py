"""The tokenizer of a Hugging Face folder, mended, and the texts that belong to it.

Its chat template and the names of its special tokens may be in tokenizer_config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer

from kvasir.model.directory import (
    CHAT_TEMPLATE_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    token_texts,
)
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.huggingface.sentencepiece import (
    FILES,
    SOURCE_FILE,
    VOCABULARY_FILE,
    read_marian,
    read_sentencepiece,
)
from kvasir.model.platform.files import read_limited, read_object
from kvasir.model.tokenizer import check_tokenizer, parse_tokenizer
from kvasir.model.tokenizer_limits import MAX_FILE

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_CHAT_TEMPLATES = "additional_chat_templates"
_TEMPLATES = TypeAdapter(dict[str, str])
_SPECIAL_TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_REWRITE_TOKENIZER = (
    "write one from its other tokenizer files with transformers: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), which for a tokenizer.model "
    "needs the packages sentencepiece and protobuf, or tiktoken"
)


def read_optional(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where the file is missing."""
    return read_object(path, UnsupportedError) if path.is_file() else {}


def read_tokenizer(
    source: Path, model_type: str, size: int, template: str | None, notes: list[str]
) -> str:
    """Return tokenizer.json, without added tokens beyond the model's `size` embeddings.

    Such a token pads batches, or stands for an image. The chat template must not write it.
    """
    path, text = source / TOKENIZER_FILE, _read_text(source, model_type)
    tokenizer = parse_tokenizer(text.encode(), path)
    added = {str(i): token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    beyond = {i: content for i, content in added.items() if int(i) >= size}
    state = json.loads(text)
    if max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0) >= size:
        check_tokenizer(tokenizer, path, size)
    if beyond:
        named = read_special_tokens(source).items()
        for place, content in beyond.items():
            names = {content, *(name for name, text in named if text == content)}
            written = any(name in (template or "") for name in names)
            if written or int(place) in tokenizer.encode("").ids:
                raise UnsupportedError(
                    f"prompts need the token {content!r}, which {TOKENIZER_FILE} adds as "
                    f"{place}, but the model has only {size} tokens; use the model that was "
                    "trained with it"
                )
        kept = [token for token in state["added_tokens"] if str(token["id"]) not in beyond]
        state["added_tokens"] = kept
        notes.append(
            f"tokens that the model has no embeddings for, beyond its vocabulary of {size}, are "
            f"left out: {', '.join(map(repr, beyond.values()))}"
        )
    if _mark_spaces(state, source, model_type) or beyond:
        text = json.dumps(state, ensure_ascii=False)
        tokenizer = Tokenizer.from_str(text)
    check_tokenizer(tokenizer, path, size)
    key = "added_tokens_decoder"
    wanted = read_optional(source / TOKENIZER_CONFIG_FILE).get(key, {})
    if not isinstance(wanted, dict):
        raise UnsupportedError(f"{TOKENIZER_CONFIG_FILE}'s {key} is {wanted!r}, not an object")
    for token_id, token in wanted.items():  # transformers adds those that are missing
        given = token.get("content") if isinstance(token, dict) else token
        if added.get(token_id) != given:
            raise UnsupportedError(
                f"{TOKENIZER_CONFIG_FILE} adds the token {given!r} as {token_id}, which "
                f"{TOKENIZER_FILE} does not have; {_REWRITE_TOKENIZER}"
            )
    return text


def _read_text(source: Path, model_type: str) -> str:
    """Return the text of tokenizer.json, made of other files where there is none."""
    path = source / TOKENIZER_FILE
    if path.is_file():
        try:
            return read_limited(path, MAX_FILE).decode()
        except UnicodeDecodeError:
            raise UnsupportedError(f"{path.name} is not UTF-8 text") from None
    if (source / SOURCE_FILE).is_file() and (source / VOCABULARY_FILE).is_file():
        return read_marian(source)
    if files := [source / name for name in FILES if (source / name).is_file()]:
        values = read_optional(source / TOKENIZER_CONFIG_FILE)
        return read_sentencepiece(files[0], model_type, values)
    raise UnsupportedError(f"it has no {TOKENIZER_FILE}; {_REWRITE_TOKENIZER}")


def _mark_spaces(state: dict[str, Any], source: Path, model_type: str) -> bool:
    """Make a Llama's tokenizer.json mark spaces as transformers 5 does; tell whether it changed.

    Files converted from SentencePiece put a space before each text between special tokens, and
    LlamaTokenizer only before the first, unless tokenizer_config.json says `legacy`. With other
    families that name this class, as Mistral and Phi-3, transformers believes the file.
    """
    values = read_optional(source / TOKENIZER_CONFIG_FILE)
    kind = values.get("tokenizer_class")
    if kind not in ("LlamaTokenizer", "LlamaTokenizerFast") or model_type != "llama":
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


def read_chat_template(source: Path, notes: list[str]) -> str | None:
    """Return the default template, from files or else from tokenizer_config.json.

    transformers has others by name: tool_use, which becomes one with the default, is for tools.
    Files of the folder go before the single file.
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
    given = read_optional(source / TOKENIZER_CONFIG_FILE).get("chat_template")
    if not templates and given is not None:
        try:
            if isinstance(given, list):
                given = {entry["name"]: entry["template"] for entry in given}
            given = {"default": given} if isinstance(given, str) else given
            templates = _TEMPLATES.validate_python(given)
        except (LookupError, TypeError, ValidationError):
            raise UnsupportedError(
                f"{TOKENIZER_CONFIG_FILE}'s chat_template is neither a text nor texts by name"
            ) from None
    if {"default", "tool_use"} <= templates.keys():
        # As Jinja does, drop a line feed at their ends.
        given, plain = (templates.pop(name).removesuffix("\n") for name in ("tool_use", "default"))
        templates["default"] = f"{{% if tools %}}{given}{{% else %}}{plain}{{% endif %}}"
    if left_out := sorted(templates.keys() - {"default"}):
        without = "" if "default" in templates else "; none of them is the default"
        notes.append(f"chat templates left out: {', '.join(left_out)}{without}")
    return templates.get("default")


def read_special_tokens(source: Path) -> dict[str, Any]:
    """Return the texts of special tokens, which a chat template may name, by name.

    They are found as transformers finds them. The source's own special_tokens_map.json is of an
    older form, and counts where tokenizer_config.json lacks added_tokens_decoder: it overrides the
    usual names, but not a model's own.
    """
    values = read_optional(source / TOKENIZER_CONFIG_FILE)
    older = read_optional(source / SPECIAL_TOKENS_FILE)
    if "added_tokens_decoder" in values:
        older = {}
    usual = {name: token for name, token in older.items() if name in _SPECIAL_TOKENS}
    every = older | values | usual
    tokens = {name: token for name, token in every.items() if name.endswith("_token")}
    for extra in (values.get("extra_special_tokens"), older.get("extra_special_tokens")):
        tokens |= extra if isinstance(extra, dict) else {}  # a list gives no names
    return token_texts(tokens)

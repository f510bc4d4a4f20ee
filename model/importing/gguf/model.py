"""A GGUF file as a published model: its family, configuration, texts and tensors."""

from __future__ import annotations

from pathlib import Path

from kvasir.model.directory import (
    CHAT_TEMPLATE_FILE,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
)
from kvasir.model.importing.contents import Contents, generation_defaults, to_json
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.gguf.family import read_family
from kvasir.model.importing.gguf.file import read_gguf
from kvasir.model.importing.gguf.tokenizer import read_tokenizer
from kvasir.model.importing.plan import plan_parameters
from kvasir.model.platform.files import read_limited

# The recommended sampling parameters among the keys of the metadata.
_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")}
_SAMPLING |= {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def read_gguf_model(source: Path) -> Contents:
    """Return the contents of a file, with the other parts of a split one."""
    gguf, notes = read_gguf(source), list[str]()
    tokenizer = read_tokenizer(gguf.values)
    family, config, stored = read_family(gguf, tokenizer.bos, tokenizer.ends)
    if tokenizer.size > config.vocab_size:
        raise UnsupportedError(
            f"its tokenizer has token ids up to {tokenizer.size - 1}, but the model only "
            f"{config.vocab_size} tokens"
        )
    template = gguf.values.get("tokenizer.chat_template")
    if template is None and (beside := source.with_name(CHAT_TEMPLATE_FILE)).is_file():
        try:
            template = read_limited(beside).decode()
        except UnicodeDecodeError:
            raise UnsupportedError(f"{beside.name} beside it is not UTF-8 text") from None
    if not isinstance(template, str | None):
        raise UnsupportedError("its key tokenizer.chat_template is not a text")
    if further := sorted(key for key in gguf.values if key.startswith("tokenizer.chat_template.")):
        notes.append(f"chat templates left out: {', '.join(further)}")
    if gguf.rounded:
        kinds = ", ".join(sorted(set(gguf.rounded.values())))
        notes.append(
            f"{len(gguf.rounded)} weights were rounded before ({kinds}); export rounds them again"
        )
    sampling = {name: gguf.values.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    texts = {
        TOKENIZER_FILE: tokenizer.text,
        CHAT_TEMPLATE_FILE: template,
        SPECIAL_TOKENS_FILE: to_json(tokenizer.special_tokens),
        GENERATION_FILE: generation_defaults(sampling | {"do_sample": True}, notes),
    }
    config, weights = plan_parameters(family, config, stored)
    return Contents(config, weights, texts, gguf.files, notes)

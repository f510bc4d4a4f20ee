"""A Hugging Face folder as a published model: its family, configuration, texts and tensors."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.model.config import TransformerConfig
from kvasir.model.directory import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    EMBEDDING_FILE,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
)
from kvasir.model.importing.contents import Contents, generation_defaults, to_json
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.families.decoders import DECODERS, WITH_VISION
from kvasir.model.importing.families.encoder_decoders import ENCODER_DECODERS
from kvasir.model.importing.families.encoders import ENCODERS
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.missing import MISSING
from kvasir.model.importing.huggingface.pooling import (
    CLASSIFIER,
    add_pooling,
    lowercased,
    read_prompts,
)
from kvasir.model.importing.huggingface.tokenizer import (
    read_chat_template,
    read_optional,
    read_special_tokens,
    read_tokenizer,
)
from kvasir.model.importing.plan import plan_adapters, plan_parameters
from kvasir.model.importing.quantized import restore
from kvasir.model.importing.quantized_formats import QUANTIZATION_KEYS
from kvasir.model.platform.suggestions import nearest
from kvasir.model.tensor_files import list_tensors, weight_files

_KNOWN = DECODERS | ENCODERS | ENCODER_DECODERS
# Tensors that are computed, not learned, and those that only see images.
_IGNORED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias)|embeddings\.position_ids"
    r"|mlp\.act_fn\.(beta|eps)|EncDecAttention\.relative_attention_bias\.weight)$"
    r"|^(model\.)?(vision_tower|visual|multi_modal_projector|vision_embed_tokens|vqmodel)\."
)
_OF_BOTH = (
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype", "torch_dtype"),
    *QUANTIZATION_KEYS,
)


def read_folder(source: Path) -> Contents:
    """Return the contents of a folder with config.json, *.safetensors and tokenizer.json."""
    notes = list[str]()
    whole, generation = (read_optional(source / name) for name in (CONFIG_FILE, GENERATION_FILE))
    family, values = _find_family(whole, notes)
    config = _read_config(family, values, generation, notes)
    family, config, of_layers = add_pooling(source, whole, family.adapted(values), config, notes)
    template = read_chat_template(source, notes)
    tokenizer = read_tokenizer(source, whole["model_type"], config.vocab_size, template, notes)
    texts = {
        TOKENIZER_FILE: lowercased(tokenizer, source),
        CHAT_TEMPLATE_FILE: template,
        SPECIAL_TOKENS_FILE: to_json(read_special_tokens(source)),
        GENERATION_FILE: generation_defaults(generation, notes),
        EMBEDDING_FILE: None if config.pooling is None else read_prompts(source),
    }
    stored = list(restore(list_tensors(source, _IGNORED), values, notes))
    config, weights = plan_parameters(family, config, [*stored, *of_layers])
    adapters = partial(plan_adapters, config, family, [tensor.name for tensor in stored])
    return Contents(config, weights, texts, weight_files(source), notes, adapters)


def _find_family(values: dict[str, Any], notes: list[str]) -> tuple[Family, dict[str, Any]]:
    """Return the family that config.json names, and the values of its decoder."""
    kind, names = values.get("model_type"), values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedError(f"{CONFIG_FILE}'s architectures is {names!r}, not a list of names")
    accepted = {key: family.architectures for key, family in _KNOWN.items()} | WITH_VISION
    for key, (first, *further) in accepted.items():
        accepted[key] = (first, *further, first.replace("ForCausalLM", CLASSIFIER))
    family = None
    if isinstance(kind, str) and set(names) <= set(accepted.get(kind, ())):
        if kind in WITH_VISION:
            values = _text_part(values)
            notes.append("only the part for text is read: the model sees no images")
        text_kind = values["model_type"]
        family = _KNOWN.get(text_kind) if isinstance(text_kind, str) else None
    if family is None:
        described = f"{CONFIG_FILE} describes {' '.join(names) or 'a model'} of model_type {kind!r}"
        if isinstance(kind, str) and (own := accepted.get(kind)):
            raise UnsupportedError(f"{described}; supported are {', '.join(dict.fromkeys(own))}")
        if isinstance(kind, str) and kind in MISSING:
            raise UnsupportedError(
                f"{described}, which {MISSING[kind]}; Kvasir does not compute it"
            )
        near = nearest(str(kind), accepted)
        hint = "" if near is None else f"the nearest that is computed is {near!r}; "
        raise UnsupportedError(f"{described}; {hint}supported are {', '.join(sorted(accepted))}")
    return family, values


def _read_config(
    family: Family, values: dict[str, Any], generation: dict[str, Any], notes: list[str]
) -> TransformerConfig:
    """Return the configuration; generation_config.json's tokens go before config.json's."""
    # Quantization is of the weights alone.
    values = {key: value for key, value in values.items() if key not in QUANTIZATION_KEYS}
    options = family.options(values)
    bos, eos = (
        options[key] if generation.get(key) is None else generation[key]
        for key in ("bos_token_id", "eos_token_id")
    )
    ends = eos if isinstance(eos, list) else [eos] * (eos is not None)
    tokens: dict[str, Any] = {
        "bos_token_id": bos,
        "target_prefix": _prefix(values, family, generation),
    }
    config = family.config(values, **tokens, eos_token_ids=[])
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
    return family.config(values, **tokens, eos_token_ids=given)


def _prefix(values: dict[str, Any], family: Family, generation: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens with which a target begins: one that starts it, and one that is forced."""
    if family.encoder is None:
        return ()
    defaults = {"decoder_start_token_id": family.start_token, "forced_bos_token_id": None}
    given = {key: generation.get(key, values.get(key)) for key in defaults}
    tokens = [default if given[key] is None else given[key] for key, default in defaults.items()]
    return tuple(token for token in tokens if token is not None)


def _text_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's values in the config.json of a model that also sees images."""
    outer = ("model_type", "architectures")  # a flat one: Fuyu's
    flat = {key: value for key, value in values.items() if key not in outer}
    text = values.get("text_config") or flat
    if not isinstance(text, dict):
        raise UnsupportedError(f"{CONFIG_FILE}'s text_config is {text!r}, not an object")
    usual = {"model_type": WITH_VISION[values["model_type"]][1], "tie_word_embeddings": True}
    return usual | {key: values[key] for key in _OF_BOTH if key in values} | text

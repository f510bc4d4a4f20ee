"""The families of GGUF files: a published family under the names of llama.cpp.

A `Family` maps keys of a config.json and names of tensors. Its variant for GGUF maps keys of the
metadata and llama.cpp's names of the same tensors, so that all else is said once. llama.cpp's
converter has already added 1 to Gemma's norms, transposed GPT-2's matrices and put the rows of
queries, keys and values one after another. Names: gguf-py's constants.py and tensor_mapping.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.families.decoders import DECODERS
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.gguf.file import Gguf, shortest
from kvasir.model.importing.tensors import Source, stacked
from kvasir.model.tensor_files import StoredTensor

_ARCHITECTURES = {  # general.architecture: the model_type of its config.json
    **{name: name for name in ("llama", "smollm3", "qwen2", "qwen3", "phi3", "gpt2")},
    **{name: name for name in ("gemma", "gemma2", "granite", "olmo2", "stablelm", "starcoder2")},
    "gemma3": "gemma3_text",
    "gptneox": "gpt_neox",
    "phi2": "phi",
}
# Whose converter makes neighbours of the two channels of a rotary pair.
_NEIGHBOURS = {"llama", "smollm3", "granite"}
_REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
}
_OF_SOME = {  # keys whose defaults are those of their families
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_PATTERN = "attention.sliding_window_pattern"
_PERIODS = {"gemma2": 2, "gemma3": 6, "olmo2": 4}  # the last layer of each has no window
# Keys that are read below, or that change nothing: tensors tell the size of the vocabulary.
_KNOWN = (
    *("attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.finetuned"),
    *("vocab_size", "expert_used_count", "pooling_type", "tensor_data_layout", *_EPSILONS),
)
# Keys that change what is computed, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "nextn_predict_layers": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0,),
    "attention.temperature_length": (0,),
}
_MODULES: dict[str, tuple[str, ...]] = {  # our module: tensors, where there is one, and several
    "embedding": ("token_embd",),
    "position_embedding": ("position_embd",),
    "norm": ("output_norm",),
    "head": ("output",),
    "blocks.*.attention_norm": ("attn_norm",),
    "blocks.*.attention.qkv": ("attn_qkv", "attn_q", "attn_k", "attn_v"),
    "blocks.*.attention.query_norm": ("attn_q_norm",),
    "blocks.*.attention.key_norm": ("attn_k_norm",),
    "blocks.*.attention.output": ("attn_output",),
    "blocks.*.attention_output_norm": ("post_attention_norm",),
    "blocks.*.feed_forward_norm": ("ffn_norm",),
    "blocks.*.feed_forward.up": ("ffn_up", "ffn_gate", "ffn_up"),
    "blocks.*.feed_forward.down": ("ffn_down",),
    "blocks.*.feed_forward_output_norm": ("post_ffw_norm",),
}
_FIRST_NORM, _SECOND_NORM = "blocks.*.attention_norm", "blocks.*.feed_forward_norm"
_FACTORS = "rope_freqs.weight"
_LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers: these scale scores by d_model / n_head


def read_family(
    gguf: Gguf, bos: int | None, ends: list[int]
) -> tuple[Family, TransformerConfig, list[StoredTensor]]:
    """Return a file's family and configuration, and the tensors of its parameters.

    bos, ends: the tokens before a text and after an answer. Raises UnsupportedError for what the
    decoder does not compute, and ConfigError.
    """
    kind = gguf.values.get("general.architecture")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise UnsupportedError(
            f"it describes a model of general.architecture {kind!r}; supported are "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    values = _values(kind, gguf.values, tensors)
    olmo3 = kind == "olmo2" and values[f"{kind}.attention.sliding_window"]
    family, rope = DECODERS["olmo3" if olmo3 else _ARCHITECTURES[kind]], values["rope_parameters"]
    longrope = [tensors.pop(name, None) for name in _LONGROPE]
    if all(longrope):
        short, long = ([shortest(n) for n in part.read().flatten()] for part in longrope if part)
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    stated = f"{kind}.rope.scaling.attn_factor"
    in_yarn = olmo3 and rope.get("rope_type") == "yarn" and values.get(stated) != 1.0
    if all(longrope) or in_yarn:  # it is config.json's attention_factor
        rope["attention_factor"] = values.pop(stated, None)
    factors = tensors.pop(_FACTORS, None)
    if factors is not None:
        values["rope_parameters"] |= _llama3(values, family, factors)
    names = {key: f"{kind}.{name}" for key, name in (_REQUIRED | _OPTIONAL | _OF_SOME).items()}
    neutral = {f"{kind}.{key}": (None, *allowed) for key, allowed in _NEUTRAL.items()}
    read = family.options({})
    neutral |= {names[key]: (None, 0) for key in (*_OPTIONAL, *_OF_SOME) if key not in read}
    if "head_dim" not in read:
        usual = _head_dim(kind, values | {names["head_dim"]: None})
        neutral |= {names["head_dim"]: (None, usual)}
    if kind in _PERIODS and "sliding_window_pattern" not in read:
        neutral |= {f"{kind}.{_PATTERN}": (None, _PERIODS[kind])}
    read_anyhow = {f"{kind}.{name}" for name in _KNOWN}
    for key in values:
        if key.startswith(f"{kind}.") and key not in {*read_anyhow, *names.values(), *neutral}:
            raise UnsupportedError(
                f"its key {key} is unknown, and may change what the model computes; use the "
                "model's folder with config.json"
            )
    family = replace(
        family,
        names=names,
        only=neutral,
        modules={module: _source(family, module, kind) for module in family.modules},
        prefixes=(),
        former_names={},
    )
    try:
        config = family.config(values, bos_token_id=bos, eos_token_ids=ends)
    except UnsupportedError as error:
        raise UnsupportedError(str(error).replace("config.json's", "its key")) from None
    return family.adapted(values), config, list(tensors.values())


def _values(kind: str, given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata, with what a config.json would say beside it."""
    values = {k: _single(value) for k, value in given.items() if k.startswith(f"{kind}.")}
    for name in _REQUIRED.values():
        if f"{kind}.{name}" not in values:
            raise UnsupportedError(f"it lacks the key {kind}.{name}; convert the model again")
    for name in _OPTIONAL.values():
        values.setdefault(f"{kind}.{name}", None)
    if "token_embd.weight" not in tensors:
        raise UnsupportedError("it lacks the tensor 'token_embd.weight'; copy it again")
    epsilons = (values.get(f"{kind}.{name}") for name in _EPSILONS)
    values |= {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors or kind == "gpt2",
        "attention_bias": f"blk.0.attn_{'q' if kind == 'stablelm' else 'output'}.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "rms_norm_eps": next((epsilon for epsilon in epsilons if epsilon is not None), None),
        "rope_parameters": _rope(kind, values),
    }
    if values[f"{kind}.attention.sliding_window"] == 0:
        values[f"{kind}.attention.sliding_window"] = None
    if kind in _GEMMA_27B:
        largest = values[f"{kind}.block_count"] == _GEMMA_27B[kind]
        length = {f"{kind}.attention.key_length": None} if largest else {}
        values["query_pre_attn_scalar"] = _head_dim(kind, values | length)
    pattern: Any = given.get(f"{kind}.{_PATTERN}")
    if kind in _PERIODS and hasattr(pattern, "tolist"):  # a value for each layer
        del values[f"{kind}.{_PATTERN}"]
        if len(pattern) != (n_layers := values[f"{kind}.block_count"]):
            raise UnsupportedError(
                f"its key {kind}.{_PATTERN} has {len(pattern)} values for {n_layers} layers"
            )
        types = ("full_attention", "sliding_attention")
        values["layer_types"] = [types[bool(slides)] for slides in pattern]
    return values


def _single(value: Any) -> Any:
    """Return the number that an array repeats for each layer, or else the value."""
    many = getattr(value, "tolist", lambda: value)()
    return many[0] if isinstance(many, list) and many and many.count(many[0]) == len(many) else many


def _head_dim(kind: str, values: Mapping[str, Any]) -> int:
    names = ("attention.key_length", "embedding_length", "attention.head_count")
    given, width, heads = (values[f"{kind}.{name}"] for name in names)
    for name, size in zip(names, (given, width, heads), strict=True):
        if not (type(size) is int and size > 0) and not (size is None and size is given):
            raise UnsupportedError(f"its key {kind}.{name} must be a positive number, not {size!r}")
    length = values.get(f"{kind}.attention.value_length", given)
    if given is not None and length != given:
        raise UnsupportedError(
            f"its key {kind}.attention.value_length is {length!r}, and Kvasir computes only "
            f"the key_length, {given!r}"
        )
    return int(given or width // heads)


def _rope(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_parameters, as a config.json has them."""
    head_dim = _head_dim(kind, values)
    turned = values.get(f"{kind}.rope.dimension_count", head_dim)
    base = values.get(f"{kind}.rope.freq_base", 10000.0)
    scaling = {
        key.removeprefix(f"{kind}.rope.scaling."): value
        for key, value in values.items()
        if key.startswith(f"{kind}.rope.scaling.")
    }
    if type(turned) is not int or not 0 < turned <= head_dim:
        raise UnsupportedError(
            f"its key {kind}.rope.dimension_count is {turned!r}, not from 1 to {head_dim}"
        )
    if type(base) is not float or not base > 1.0:
        raise UnsupportedError(f"its key {kind}.rope.freq_base is {base!r}, not more than 1.0")
    rope: dict[str, Any] = {"rope_theta": base}
    if turned < head_dim:  # the product with head_dim is rounded down again
        rope["partial_rotary_factor"] = math.nextafter(turned / head_dim, 1.0)
    rope["original_max_position_embeddings"] = scaling.get("original_context_length")
    factor = scaling.get("factor", values.get(f"{kind}.rope.scale_linear"))  # the former key
    # llama.cpp takes a factor without a type for a linear one.
    scaled = scaling.get("type", "none" if factor in (None, 0.0, 1.0) else "linear")
    if scaled != "none":
        rope |= {
            "rope_type": scaled,
            "factor": factor,
            "beta_fast": scaling.get("yarn_beta_fast"),
            "beta_slow": scaling.get("yarn_beta_slow"),
        }
    return rope


def _llama3(values: Mapping[str, Any], family: Family, factors: StoredTensor) -> dict[str, Any]:
    """Return the scaling of rotary positions that llama.cpp stores as a divisor of each frequency.

    Llama 3.1 and those after it differ only in the factor of the lowest frequencies.
    """
    divisors = factors.read().double().flatten()
    base, original = values["rope_parameters"]["rope_theta"], 8192
    rope = {"rope_type": "llama3", "factor": float(divisors.max())}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": original}
    turns = original * base ** -(torch.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    part = ((turns - 1.0) / 3.0).clamp(0.0, 1.0).double()  # between the lowest and the highest
    expected = 1.0 / ((1.0 - part) / rope["factor"] + part)
    if not torch.allclose(divisors, expected, rtol=1e-3) or "llama3" not in family.scalings:
        raise UnsupportedError(
            f"tensor {_FACTORS!r} in {factors.file.name} does not scale rotary positions as Llama "
            "3.1 does; use the model's folder with config.json"
        )
    return rope


def _source(family: Family, module: str, kind: str) -> Source:
    """Return the place of a module of ours in a GGUF file."""
    source, names = family.source(module), _MODULES[module]
    names = names[1:] if len(source.modules) > 1 else names[:1]
    places = tuple(f"blk.*.{name}" if module.startswith("blocks.") else name for name in names)
    if module == _SECOND_NORM:  # one norm may serve both sublayers
        first, own = family.source(_FIRST_NORM).modules[0], source.modules[0].split("|")
        shared = ["blk.*.attn_norm"] if first in own else []
        return Source(("|".join([*places, *shared][own[0] == first :]),))
    if module.endswith(("query_norm", "key_norm")):  # to one in float32, 1 is added already
        kept = Source(source.modules, source.shapes) if source.in_float32 else source
        return replace(kept, modules=places)
    if len(places) == 1:
        return Source(places)
    if module.endswith(".qkv") and kind in _NEIGHBOURS:
        return replace(stacked(*places), join=_join_neighbours)
    return stacked(*places)


def _join_neighbours(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
    """Return queries, keys and values whose rotary pairs are half a head apart, as ours."""
    *turned, values = tensors
    apart = (rows.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2) for rows in turned)
    return torch.cat([*(rows.flatten(0, 2) for rows in apart), values])

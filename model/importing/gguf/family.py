"""The families of GGUF files: a published family under the names of llama.cpp.

A `Family` maps keys of a config.json and names of tensors. Its variant for GGUF maps keys of the
metadata and llama.cpp's names of the same tensors, so that all else is said once. llama.cpp's
converter has already added 1 to Gemma's norms, transposed GPT-2's matrices and put the rows of
queries, keys and values one after another. Names: gguf-py's constants.py and tensor_mapping.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.families.decoders import DECODERS
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.gguf import architectures as ggml
from kvasir.model.importing.gguf.file import Gguf, shortest
from kvasir.model.importing.gguf.positions import FACTORS, head_dim, llama3_scaling, rope_parameters
from kvasir.model.importing.tensors import Source, of_gates, stacked
from kvasir.model.tensor_files import StoredTensor

_FIRST_NORM, _SECOND_NORM = "blocks.*.attention_norm", "blocks.*.feed_forward_norm"
_FURTHER, _MOST_FURTHER = "nextn_predict_layers", 16
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
    if not isinstance(kind, str) or kind not in ggml.ARCHITECTURES:
        raise UnsupportedError(
            f"it describes a model of general.architecture {kind!r}; supported are "
            f"{', '.join(sorted(ggml.ARCHITECTURES))}"
        )
    tensors = {tensor.name: _as_published(tensor) for tensor in gguf.tensors}
    values = _values(kind, gguf.values, tensors)
    family, rope = DECODERS[_model_type(kind, values)], values["rope_parameters"]
    longrope = [tensors.pop(name, None) for name in _LONGROPE]
    if all(longrope):
        short, long = ([shortest(n) for n in part.read().flatten()] for part in longrope if part)
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    stated = f"{kind}.rope.scaling.attn_factor"
    in_yarn = (
        family is DECODERS["olmo3"]
        and rope.get("rope_type") == "yarn"
        and values.get(stated) != 1.0
    )
    if all(longrope) or in_yarn:  # it is config.json's attention_factor
        rope["attention_factor"] = values.pop(stated, None)
    factors = tensors.pop(FACTORS, None)
    if factors is not None:
        values["rope_parameters"] |= llama3_scaling(values, family, factors)
    names = {key: f"{kind}.{name}" for key, name in ggml.KEYS.items()}
    neutral = _neutral(kind, family, names, values)
    read_anyhow = {f"{kind}.{name}" for name in ggml.KNOWN}
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
        unused=tuple(f"blk.{layer}." for layer in _further_layers(kind, values)),
    )
    try:
        config = family.config(values, bos_token_id=bos, eos_token_ids=ends)
    except UnsupportedError as error:
        raise UnsupportedError(str(error).replace("config.json's", "its key")) from None
    return family.adapted(values), config, list(tensors.values())


def _model_type(kind: str, values: Mapping[str, Any]) -> str:
    """Return the model_type of an architecture, which some have two of."""
    if kind == "olmo2" and values[f"{kind}.attention.sliding_window"]:
        return "olmo3"
    if kind == "llama" and values.get(f"{kind}.expert_count"):
        return "mixtral"
    return ggml.ARCHITECTURES[kind]


def _neutral(
    kind: str, family: Family, names: Mapping[str, str], values: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Return the keys that a family does not read, and the values that change nothing."""
    read = family.options({})
    neutral = {f"{kind}.{key}": (None, *allowed) for key, allowed in ggml.NEUTRAL.items()}
    neutral |= {names[key]: (None, 0) for key in (*ggml.OPTIONAL, *ggml.OF_SOME)}
    if kind in ggml.PERIODS:
        neutral[f"{kind}.{ggml.PATTERN}"] = (None, ggml.PERIODS[kind])
    neutral[names["head_dim"]] = (None, head_dim(kind, {**values, names["head_dim"]: None}))
    for width in (ggml.EXPERT_WIDTH, ggml.SHARED_WIDTH):  # else as wide as another layer
        neutral[f"{kind}.{width}"] = (None, 0, values[names["intermediate_size"]])
    neutral[f"{kind}.expert_gating_func"] = (None, 1 + ("router" in family.fields))
    if kind == "glm4moe":
        neutral[f"{kind}.{_FURTHER}"] = (None, *range(_MOST_FURTHER + 1))
    for key in read:
        neutral.pop(names.get(key, ""), None)
    return neutral


def _further_layers(kind: str, values: Mapping[str, Any]) -> range:
    """Return the layers that predict further tokens, behind the others."""
    n_layers, n_more = (values.get(f"{kind}.{name}") for name in ("block_count", _FURTHER))
    if type(n_layers) is not int or type(n_more) is not int:
        return range(0)
    return range(n_layers, n_layers + min(n_more, _MOST_FURTHER))


def _add_unsaid(kind: str, values: dict[str, Any]) -> None:
    """Add what a config.json of an architecture says, and its files do not."""
    if kind == "qwen3moe":
        values.setdefault(f"{kind}.expert_weights_norm", True)
    elif kind == "gpt-oss":
        values["rope_parameters"]["truncate"] = False
    elif kind == "glm4moe":  # which counts all layers
        n_layers, n_more = (values.get(f"{kind}.{name}") for name in ("block_count", _FURTHER))
        if type(n_layers) is int and type(n_more) is int and 0 < n_more < n_layers:
            values[f"{kind}.block_count"] = n_layers - n_more
    elif kind in ("lfm2", "lfm2moe"):  # whose layers of convolutions have no heads of keys
        values["block_auto_adjust_ff_dim"] = False
        counts = values[key := f"{kind}.attention.head_count_kv"]
        if isinstance(counts, list) and counts:
            values["layer_types"] = ["full_attention" if count else "conv" for count in counts]
            values[key] = max(counts)
    elif kind in _GEMMA_27B:
        largest = values[f"{kind}.block_count"] == _GEMMA_27B[kind]
        length = {f"{kind}.attention.key_length": None} if largest else {}
        values["query_pre_attn_scalar"] = head_dim(kind, values | length)


def _values(kind: str, given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata, with what a config.json would say beside it."""
    values = {k: _single(value) for k, value in given.items() if k.startswith(f"{kind}.")}
    for name in ggml.REQUIRED.values():
        if f"{kind}.{name}" not in values:
            raise UnsupportedError(f"it lacks the key {kind}.{name}; convert the model again")
    for name in ggml.OPTIONAL.values():
        values.setdefault(f"{kind}.{name}", None)
    if "token_embd.weight" not in tensors:
        raise UnsupportedError("it lacks the tensor 'token_embd.weight'; copy it again")
    epsilons = (values.get(f"{kind}.{name}") for name in ggml.EPSILONS)
    values |= {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors or kind == "gpt2",
        "attention_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & tensors.keys()),
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "rms_norm_eps": next((epsilon for epsilon in epsilons if epsilon is not None), None),
        "rope_parameters": rope_parameters(kind, values),
    }
    for name in ("attention.sliding_window", ggml.CLAMP):
        if values.get(f"{kind}.{name}") == 0:
            values[f"{kind}.{name}"] = None
    _add_unsaid(kind, values)
    pattern: Any = given.get(f"{kind}.{ggml.PATTERN}")
    if kind in ggml.PERIODS and hasattr(pattern, "tolist"):  # a value for each layer
        del values[f"{kind}.{ggml.PATTERN}"]
        if len(pattern) != (n_layers := values[f"{kind}.block_count"]):
            raise UnsupportedError(
                f"its key {kind}.{ggml.PATTERN} has {len(pattern)} values for {n_layers} layers"
            )
        types = ("full_attention", "sliding_attention")
        values["layer_types"] = [types[bool(slides)] for slides in pattern]
    return values


def _single(value: Any) -> Any:
    """Return the number that an array repeats for each layer, or else the value."""
    many = getattr(value, "tolist", lambda: value)()
    return many[0] if isinstance(many, list) and many and many.count(many[0]) == len(many) else many


def _places(family: Family, module: str, kind: str) -> tuple[str, ...]:
    """Return the modules of a GGUF file that hold one of ours."""
    several = len(family.source(module).modules) > 1
    names = ggml.MODULES[module]
    if module.endswith((".qkv", "forward.up")):
        names = names[1:] if several else names[:1]
    if (renamed := ggml.RENAMED.get((module, kind))) is not None:
        names = (renamed,)
    places = tuple(f"blk.*.{name}" if module.startswith("blocks.") else name for name in names)
    if module == _SECOND_NORM:  # one norm may serve both sublayers
        first, own = family.source(_FIRST_NORM).modules, family.source(module).modules[0].split("|")
        shared = ["blk.*.attn_norm"] if {*first} & {*own} else []
        return ("|".join([*places, *shared][[own[0]] == [*first] :]),)
    return places


def _source(family: Family, module: str, kind: str) -> Source:
    """Return the place of a module of ours in a GGUF file."""
    source = family.source(module)
    if not source.modules:  # of what no file holds
        return source
    places = _places(family, module, kind)
    if module.endswith(("query_norm", "key_norm")):  # to one in float32, 1 is added already
        kept = Source(source.modules, source.shapes) if source.in_float32 else source
        return replace(kept, modules=places)
    if len(places) == 1:
        return Source(places)
    if module.endswith("expert_up"):
        return of_gates(*places)
    if not module.endswith(".qkv"):
        return stacked(*places)
    join = _join_neighbours if kind in ggml.NEIGHBOURS else source.join
    return replace(source, modules=places, join=join)


def _as_published(tensor: StoredTensor) -> StoredTensor:
    """Return a tensor with the dimensions of size 1 that llama.cpp's converter leaves out.

    The gate of a shared expert is [1, d_model], and a convolution [channels, 1, kernel].
    """
    if tensor.name.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape), read=lambda: tensor.read()[None])
    if tensor.name.endswith("shortconv.conv.weight") and len(tensor.shape) == 2:
        channels, kernel = tensor.shape
        return replace(tensor, shape=(channels, 1, kernel), read=lambda: tensor.read()[:, None])
    return tensor


def _join_neighbours(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
    """Return queries, keys and values whose rotary pairs are half a head apart, as ours."""
    *turned, values = tensors
    apart = (rows.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2) for rows in turned)
    return torch.cat([*(rows.flatten(0, 2) for rows in apart), values])

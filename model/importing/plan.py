"""A published model as a checkpoint: each parameter made of the tensors of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import reduce
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvasir.model.adapters.layout import Layer, Layout, Part
from kvasir.model.config import TransformerConfig
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.heads import reorder_rotary_pairs
from kvasir.model.importing.tensors import Source, module_and_kind
from kvasir.model.network.skeleton import check_size, make_skeleton, parameter_shapes
from kvasir.model.tensor_files import Shape, StoredTensor

_LAYER = re.compile(r"(?<=\bblocks\.)\d+")
_NUMBER = re.compile(r"\.\d+\.")
_TURNED = re.compile(r"\.attention\.(qkv|query_norm|key_norm)\.")
_ENCODER = "encoder."
_LOGIT_BIAS = "final_logits_bias.bias"
_FORMER_PREFIX = re.compile(r"^(\w+_model)\.model\.$")  # in files alone
_CHOICES = ("router", "shared_gate")  # linear layers that adapters leave as they are


def plan_parameters(
    family: Family, config: TransformerConfig, stored: Iterable[StoredTensor]
) -> tuple[TransformerConfig, dict[str, Callable[[], Tensor]]]:
    """Return the configuration, untied where the head differs, and every parameter to be made.

    Raises UnsupportedError naming a tensor that is missing, unknown or of the wrong shape.
    """
    held: dict[str, StoredTensor] = {}
    for tensor in stored:
        if (name := family.plain_name(tensor.name)) in held:
            names = f"{held[name].name!r} and {tensor.name!r}"
            raise UnsupportedError(f"tensors {names} are the same parameter")
        held[name] = tensor
    config = _merge_embeddings(held, family, config)
    check_size(config, sum(torch.Size(tensor.shape).numel() for tensor in held.values()))
    shapes = parameter_shapes(config)
    taken: set[str] = set()
    weights = {
        name: _take(name, shape, family, config, held, taken) for name, shape in shapes.items()
    }
    for name in held.keys() - taken:
        tensor, (module, _, kind) = held[name], name.rpartition(".")
        if name.startswith(family.unused) or _NUMBER.sub(".*.", name).startswith(family.unused):
            continue
        # AutoGPTQ stores a bias of zeros for every layer.
        if kind == "bias" and f"{module}.weight" in taken and not tensor.read().any():
            continue
        unknown = f"the unknown tensor {tensor.name!r}"
        raise UnsupportedError(f"{tensor.file.name} holds {unknown} for its configuration")
    return config, weights


def _merge_embeddings(
    held: dict[str, StoredTensor], family: Family, config: TransformerConfig
) -> TransformerConfig:
    """Leave one of equal embeddings; return the configuration of the head that is left."""
    embedding = f"{family.modules['embedding']}.weight"
    head = f"{family.modules.get('head')}.weight"
    for module in family.same_embeddings:
        if (other := held.pop(f"{module}.weight", None)) is None:
            continue
        if not _same(first := held.setdefault(embedding, other), other):
            raise UnsupportedError(
                f"tensors {first.name!r} and {other.name!r} differ, and Kvasir computes "
                f"{family.architectures[0]} with one embedding for both"
            )
    if (bias := held.get(_LOGIT_BIAS)) is not None:
        if bias.read().any():
            config = replace(config, head_bias=True)
        else:
            del held[_LOGIT_BIAS]
    # Tied ones are stored under either name or both.
    if config.pooling is None and config.tied_embeddings and head in held:
        other = held.pop(head)
        if not _same(held.setdefault(embedding, other), other):
            held[head] = other
            config = replace(config, tied_embeddings=False)
    return config


def _same(first: StoredTensor, other: StoredTensor) -> bool:
    return first is other or torch.equal(first.read(), other.read())


def _take(
    name: str,
    shape: Shape,
    family: Family,
    config: TransformerConfig,
    held: dict[str, StoredTensor],
    taken: set[str],
) -> Callable[[], Tensor]:
    """Return what makes a parameter; the names of its tensors are added to `taken`."""
    source, config, layer, kind = _place(name, family, config)
    tensors = []
    for theirs, expected in zip(source.names(config), source.shapes(shape, config), strict=True):
        places = theirs.replace("*", layer).split("|")[: 2 if config.parallel_residual else 1]
        names = [f"{place}.{kind}" for place in places]
        wanted = next((name for name in names if name in held), names[0])
        if wanted not in held and kind == "bias" and source.zeros_if_absent:
            return lambda: torch.zeros(shape)
        if wanted not in held:
            missing = f"the tensor {wanted!r} of {list(expected)}"
            raise UnsupportedError(f"it lacks {missing} for its configuration")
        taken.add(wanted)
        tensor = held[wanted]
        if tensor.shape != expected:
            raise UnsupportedError(f"{tensor} has shape {list(tensor.shape)}, not {list(expected)}")
        tensors.append(tensor)
    types = [tensor.dtype for tensor in tensors] or [torch.float32]
    stored = reduce(torch.promote_types, types)
    dtype = torch.float32 if source.in_float32 else stored

    def make() -> Tensor:
        if source.part is not None:
            made = torch.empty(shape, dtype=dtype)
            for i, tensor in enumerate(tensors):
                source.part(made, i).copy_(tensor.read())
            return made
        made = _join(name, source, config, [tensor.read() for tensor in tensors])
        if kind == "weight" and source.weight_plus:
            made = made.float() + source.weight_plus
        return made.to(dtype).expand(shape).contiguous()

    return make


def _place(
    name: str, family: Family, config: TransformerConfig
) -> tuple[Source, TransformerConfig, str, str]:
    """Return a parameter's source, the side's configuration, its layer and its kind."""
    layer = (_LAYER.search(name) or ("",))[0]
    module, kind = module_and_kind(_LAYER.sub("*", name))
    if name.startswith(_ENCODER) and config.encoder is not None:
        config = config.encoder
    alone, _ = module_and_kind(name)  # a layer may have a place of its own
    return family.source(alone if alone in family.modules else module), config, layer, kind


def _join(name: str, source: Source, config: TransformerConfig, tensors: list[Tensor]) -> Tensor:
    """Make a parameter of its tensors, with our order of rotary pairs."""
    made = source.join(tensors, config)
    if turned := _TURNED.search(name):
        made = reorder_rotary_pairs(made, config, of_norm=turned[1] != "qkv")
    return made


def plan_adapters(
    config: TransformerConfig, family: Family | None = None, stored: Collection[str] = ()
) -> Layout:
    """Return how linear layers in blocks, but those of experts and routers, become ours.

    stored: the names of all tensors of the model. Without a family the layers are ours already.
    """
    prefix, layers = _prefix(family, config, stored), dict[str, Layer]()
    for name, linear in make_skeleton(config).named_modules():
        if not isinstance(linear, nn.Linear) or "blocks." not in name or name.endswith(_CHOICES):
            continue
        n_out, n_in = linear.weight.shape
        parts, outputs = [Part(name, n_out, 0, np.arange(n_out, dtype=np.int32))], np.ones(n_out)
        if family is not None:
            parts, outputs = _trace_rows(f"{name}.weight", n_out, family, config, prefix)
        inputs = np.ones(n_in, dtype=np.float32)
        layers[f"{name}.weight"] = Layer(tuple(parts), outputs.astype(np.float32), inputs)
    return Layout((prefix, *(() if family is None else family.prefixes)), layers)


def _prefix(family: Family | None, config: TransformerConfig, stored: Collection[str]) -> str:
    """Return the beginning of modules' names in transformers, which files may leave out."""
    if family is None or config.pooling is not None:  # transformers loads the body alone
        return ""
    own = (p for p in family.prefixes if any(tensor.startswith(p) for tensor in stored))
    prefix = next(own, "" if config.encoder is not None else family.prefixes[-1])
    return _FORMER_PREFIX.sub(r"model.\1.", prefix)


def _trace_rows(
    name: str, n_rows: int, family: Family, config: TransformerConfig, prefix: str
) -> tuple[list[Part], NDArray[np.float64]]:
    """Return the parts of our matrix, and the factor of each row: what joins them joins numbers.

    One column tells, as no source of a linear layer moves columns. Numbers begin with 1.
    """
    source, side, layer, _ = _place(name, family, config)
    shapes, parts = source.shapes((n_rows, 1), side), list[Part]()
    heights = [prod(shape) for shape in shapes]
    columns = torch.arange(1, sum(heights) + 1, dtype=torch.float64).split(heights)
    numbers = [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]
    ones = [torch.ones_like(column) for column in numbers]
    made, factors = (
        _join(name, source, side, given).double().flatten().numpy() for given in (numbers, ones)
    )
    rows = np.rint(made / factors).astype(np.int32) - 1
    for module, n_out in zip(source.names(side), heights, strict=True):
        ours = np.flatnonzero((rows >= 0) & (rows < n_out))
        parts.append(Part(prefix + module.replace("*", layer), n_out, int(ours[0]), rows[ours]))
        rows -= n_out
    return parts, factors

"""A published model as a checkpoint: each parameter made of the tensors of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from math import prod

import numpy as np
import torch
from torch import Tensor

from kvasir.model.adapters.layout import Layer, Layout, Part
from kvasir.model.config import TransformerConfig
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.tensors import Source, module_and_kind, reorder_rotary_pairs
from kvasir.model.network.low_rank import PublishedRows
from kvasir.model.network.skeleton import check_size, parameter_shapes
from kvasir.model.tensor_files import Shape, StoredTensor

_LAYER = re.compile(r"(?<=\bblocks\.)\d+")
_NUMBER = re.compile(r"\.\d+\.")
_TURNED = re.compile(r"\.attention\.(qkv|query_norm|key_norm)\.")
_ENCODER = "encoder."
_LOGIT_BIAS = "final_logits_bias.bias"
# Weights that adapters may change.
_ADAPTABLE = re.compile(
    r"^blocks\.\d+\.(attention\.(qkv|output|query|query_latent|latent)"
    r"|feed_forward\.(shared\.)?(up|down))\.weight$"
)


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
    embedding, head = (
        f"{family.modules['embedding']}.weight",
        f"{family.modules.get('head')}.weight",
    )
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
    if (
        config.pooling is None and config.tied_embeddings and head in held
    ):  # tied ones are stored under either name or both
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
        names = _choices(theirs, layer, kind, config)
        wanted = next((name for name in names if name in held), names[0])
        if wanted not in held and source.zeros_if_absent:
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
    return family.source(module), config, layer, kind


def _choices(theirs: str, layer: str, kind: str, config: TransformerConfig) -> list[str]:
    """Return the plain names that a tensor of a source may have, the usual one first."""
    places = theirs.replace("*", layer).split("|")[: 2 if config.parallel_residual else 1]
    return [f"{place}.{kind}" for place in places]


def _join(name: str, source: Source, config: TransformerConfig, tensors: list[Tensor]) -> Tensor:
    """Make a parameter of its tensors, with our order of rotary pairs."""
    made = source.join(tensors, config)
    if turned := _TURNED.search(name):
        made = reorder_rotary_pairs(made, config, of_norm=turned[1] != "qkv")
    return made


def published_rows(
    family: Family, config: TransformerConfig, stored: Iterable[str], name: str, n_rows: int
) -> PublishedRows:
    """Return where the rows of our matrix `name` [n_rows, …], not one of a stack, are published.

    stored: the names of all tensors of the model.
    """
    held = {family.plain_name(tensor): tensor for tensor in stored}
    source, side, layer, kind = _place(name, family, config)
    shapes = source.shapes((n_rows, 1), side)  # one column tells: no source moves columns
    heights = tuple(map(prod, shapes))
    firsts = [sum(heights[:i]) for i in range(len(heights))]
    numbers = [
        torch.arange(first + 1, first + 1 + height, dtype=torch.float64).view(shape)
        for first, height, shape in zip(firsts, heights, shapes, strict=True)
    ]
    ones = [torch.ones_like(part) for part in numbers]
    factor = _join(name, source, side, ones).flatten()[0].item()
    made = _join(name, source, side, numbers).flatten().double() / factor
    places = (_choices(place, layer, kind, side)[0] for place in source.names(side))
    names = [held[place].removesuffix(".weight") for place in places]
    prefix = next((p for p in family.prefixes if names[0].startswith(p)), "")
    if config.pooling is not None:  # transformers loads the body alone
        names = [one.removeprefix(prefix) for one in names]
    elif not prefix and config.encoder is None:
        names = [family.prefixes[-1] + one for one in names]
    return PublishedRows(
        modules=tuple(names),
        heights=heights,
        order=made.round().long() - 1,
        factor=factor,
        transposed=len(shapes) == 1 and shapes[0] != (n_rows, 1),
    )


def plan_adapters(config: TransformerConfig, family: Family | None = None) -> Layout:
    """Return how a model's linear layers become ours; without a family they are ours already."""
    layers = dict[str, Layer]()
    for name, shape in parameter_shapes(config).items():
        if not _ADAPTABLE.match(name):
            continue
        rows = np.arange(shape[0], dtype=np.int32)
        made: tuple[tuple[Part, ...], Tensor] | None
        made = (Part(name.removesuffix(".weight"), shape[0], 0, rows),), torch.ones(shape[0])
        if family is not None:
            made = _trace_rows(name, shape, family, config)
        if made is not None:
            factors = made[1].numpy().astype(np.float32)
            layers[name] = Layer(made[0], factors, np.ones(shape[1], dtype=np.float32))
    return Layout(("",) if family is None else family.prefixes, layers)


def _trace_rows(
    name: str, shape: Shape, family: Family, config: TransformerConfig
) -> tuple[tuple[Part, ...], Tensor] | None:
    """Return the parts of a matrix and the factors of its rows; None if it is made otherwise.

    What joins tensors is given two columns, of the numbers of rows and of twice those.
    """
    layer = (_LAYER.search(name) or ("",))[0]
    source = family.source(module_and_kind(_LAYER.sub("*", name))[0])
    if source.part is not None or not source.modules:
        return None
    modules = [theirs.replace("*", layer) for theirs in source.names(config)]
    narrow, wide = (source.shapes((shape[0], n), config) for n in (2, 3))
    numbered, ones, first = list[Tensor](), list[Tensor](), 1
    for theirs, other in zip(narrow, wide, strict=True):
        rows_last = theirs[0] != other[0]
        n_rows = theirs[int(rows_last)]
        numbers = torch.arange(first, first + n_rows, dtype=torch.float64)
        pairs = torch.stack((numbers, 2 * numbers), dim=1)
        numbered.append(pairs.t() if rows_last else pairs)
        ones.append(torch.ones_like(numbered[-1]))
        first += len(numbers)
    try:
        made, factors = (_join(name, source, config, given).double() for given in (numbered, ones))
    except RuntimeError:  # columns are cut or moved
        return None
    numbers = (made / factors).round()
    is_same = made.shape == (shape[0], 2) and bool((2 * numbers[:, 0] == numbers[:, 1]).all())
    if not is_same:
        return None
    rows, parts, start = numbers[:, 0].int().numpy() - 1, list[Part](), 0
    for module, tensor in zip(modules, numbered, strict=True):
        end = start + tensor.numel() // 2
        places = np.flatnonzero((rows >= start) & (rows < end))
        if not len(places) or places[-1] - places[0] + 1 != len(places):
            return None
        parts.append(Part(module, end - start, int(places[0]), rows[places] - start))
        start = end
    return tuple(parts), factors[:, 0]

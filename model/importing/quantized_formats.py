"""The formats of `quantized.py`: from a weight's integers and scales to how it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor
from torch.nn import functional

from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.tensor_files import Shape, StoredTensor, dtype_name

QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # the second is the older name
_BLOCK = 32  # of an int4 export
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns in a word, the lowest bits first
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The values of four bits: a sign, two bits of exponent, one of fraction (OCP Microscaling, 2023).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_Nothing = Annotated[dict[str, Any] | None, Field(max_length=0)]
_Size = Annotated[int, Field(strict=True, gt=0)]
_Lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
Made = tuple[Shape, torch.dtype, Callable[[], Tensor]]  # a weight, and how it is read


class _Weights(BaseModel):
    block_structure: tuple[_Size, _Size] | None = None


class _Group(BaseModel):
    weights: _Weights | None = None


class _Sparsity(BaseModel):
    format: Literal["dense"] = "dense"


class Scheme(BaseModel):
    """The keys of quantization_config that decide about the meaning of weights."""

    model_config = ConfigDict(title=QUANTIZATION_KEYS[0])

    quant_method: Literal["awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mxfp4"]
    bits: Literal[4, 8] = 4
    group_size: Annotated[int, Field(strict=True, ge=-1)] = -1  # -1: one group
    sym: bool = False
    desc_act: bool = False
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    version: Annotated[Literal["gemm"], _Lower] = "gemm"
    weight_block_size: tuple[_Size, _Size] | None = None
    format: Literal[
        "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
    ] = "dense"
    config_groups: dict[str, _Group] = {}
    sparsity_config: _Sparsity | None = None
    # Rotations of weights, and bits of single layers: none are computed.
    transform_config: _Nothing = None
    dynamic: _Nothing = None

    @property
    def block(self) -> tuple[int, int] | None:
        """The rows and columns that share a scale, of FP8 in blocks."""
        groups = (group.weights for group in self.config_groups.values())
        listed = (group.block_structure for group in groups if group and group.block_structure)
        return self.weight_block_size or next(listed, None)


@dataclass(slots=True)
class Parts:
    """The tensors of one weight; those beside the first are taken from the checkpoint's."""

    first: StoredTensor
    stem: str  # of their names
    held: dict[str, StoredTensor]
    exact: bool = False  # float32 preserves the integers for an int4 export

    def find(self, name: str) -> StoredTensor | None:
        """Take a part that a weight may lack."""
        return self.held.pop(self.stem + name, None)

    def words(self, part: StoredTensor, shape: Shape | None = None) -> StoredTensor:
        """Return a part that packs integers. Raises UnsupportedError for another."""
        if part.dtype != torch.int32:
            raise UnsupportedError(f"{part} is {dtype_name(part.dtype)}, not I32")
        return self.check(part, shape)

    def groups_of(self, order: StoredTensor | None, n_in: int, group: int) -> Tensor:
        """Return the group of each input. Raises UnsupportedError for one that does not exist."""
        group_of = None if order is None else order.read().long()
        if order is None or group_of is None or group_of.min() == group_of.max() == -1:
            return torch.arange(n_in) // group  # not reordered
        if group_of.min() < 0 or group_of.max() >= math.ceil(n_in / group):
            raise UnsupportedError(f"{order} names no group")
        return group_of

    def take(self, *names: str, shape: Shape | None = None) -> StoredTensor:
        """Take a part by its name, or by one of several. Raises UnsupportedError for none."""
        for name in names:
            if (part := self.find(name)) is not None:
                return part if shape is None else self.check(part, shape)
        raise UnsupportedError(
            f"it lacks the tensor {self.stem + names[0]!r}, which {self.first.name!r} needs"
        )

    def check(self, part: StoredTensor, shape: Shape | None, rank: int = 2) -> StoredTensor:
        """Return a part of the given shape, or else rank. Raises UnsupportedError for another."""
        fits = len(part.shape) == rank if shape is None else part.shape == shape
        if not fits or 0 in part.shape:
            wanted = f"not {rank} dimensions" if shape is None else f"not {list(shape)}"
            raise UnsupportedError(f"{part} has shape {list(part.shape)}, {wanted}")
        return part


def _unpack(words: Tensor, bits: int, axis: int) -> Tensor:
    """Return the unsigned integers in words of 32 bits, the lowest bits first along an axis."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts = words.unsqueeze(axis + 1) >> shifts.reshape(-1, *[1] * (words.dim() - axis - 1))
    return torch.flatten(parts & (2**bits - 1), axis, axis + 1)


def gptq(parts: Parts, scheme: Scheme) -> Made:
    """GPTQ (Frantar et al. 2022): qweight [in · bits / 32, out], the rest by group of inputs."""
    bits, qweight = scheme.bits, parts.words(parts.first)
    n_in, n_out = qweight.shape[0] * 32 // bits, qweight.shape[1]
    group = n_in if scheme.group_size < 1 else scheme.group_size
    groups = math.ceil(n_in / group)
    qzeros = parts.words(parts.take("qzeros"), (groups, math.ceil(n_out * bits / 32)))
    scales = parts.take("scales", shape=(groups, n_out))
    if (order := parts.find("g_idx")) is not None:
        parts.check(order, (n_in,))
    parts.exact = scheme.sym and not scheme.desc_act and bits == 4 and group % _BLOCK == 0

    def read() -> Tensor:
        group_of = parts.groups_of(order, n_in, group)
        zeros = _unpack(qzeros.read(), bits, 1)[:, :n_out]
        if scheme.checkpoint_format == "gptq":  # its first version stores one less
            zeros = (zeros + 1) & (2**bits - 1)
        integers = _unpack(qweight.read(), bits, 0) - zeros[group_of]
        return torch.t(integers * scales.read().float()[group_of])

    return (n_out, n_in), torch.float32 if parts.exact else scales.dtype, read


def awq(parts: Parts, scheme: Scheme) -> Made:
    """AWQ (Lin et al. 2023): qweight [in, out / 8], qzeros [groups, out / 8], scales."""
    n_in, words = parts.words(parts.first).shape
    group = n_in if scheme.group_size < 1 else scheme.group_size
    groups, columns = math.ceil(n_in / group), torch.tensor(_AWQ_ORDER).argsort()
    if scheme.bits != 4:
        raise UnsupportedError(f"config.json has awq with {scheme.bits} bits; only 4 are known")
    qzeros = parts.words(parts.take("qzeros"), (groups, words))
    scales = parts.take("scales", shape=(groups, 8 * words))

    def integers(tensor: StoredTensor) -> Tensor:
        wide: Tensor = _unpack(tensor.read(), 4, 1).unflatten(1, (words, 8))
        return wide[..., columns].flatten(1)

    def read() -> Tensor:
        group_of = torch.arange(n_in) // group
        centred = integers(parts.first) - integers(qzeros)[group_of]
        return torch.t(centred * scales.read().float()[group_of])

    return (8 * words, n_in), scales.dtype, read


def packed(parts: Parts, _: Scheme) -> Made:
    """compressed-tensors, packed: weight_packed [out, in · bits / 32], scales [out, groups]."""
    words, stored = parts.words(parts.first), parts.take("weight_shape", shape=(2,))
    if stored.dtype.is_floating_point:
        raise UnsupportedError(f"{stored} is {dtype_name(stored.dtype)}, not I64")
    n_out, n_in = (int(size) for size in stored.read())
    bits = next((n for n in (4, 8) if words.shape == (n_out, math.ceil(n_in * n / 32))), None)
    scales = parts.check(parts.take("weight_scale"), None)
    groups = scales.shape[1]
    if bits is None or scales.shape[0] != n_out or n_in % groups:
        raise UnsupportedError(
            f"{words} has shape {list(words.shape)} with scales "
            f"{list(scales.shape)}, which is not [{n_out}, {n_in}] in 4 or 8 bits"
        )
    if (zeros := parts.find("weight_zero_point")) is not None:
        parts.words(zeros, (math.ceil(n_out * bits / 32), groups))
    if (order := parts.find("weight_g_idx")) is not None:
        parts.check(order, (n_in,))
    group, middle = n_in // groups, 2 ** (bits - 1)
    parts.exact = zeros is None and order is None and bits == 4 and group % _BLOCK == 0

    def read() -> Tensor:
        group_of = parts.groups_of(order, n_in, group)
        integers: Tensor = _unpack(words.read(), bits, 1)[:, :n_in] - middle
        if zeros is not None:
            integers -= (_unpack(zeros.read(), bits, 0)[:n_out] - middle)[:, group_of]
        return integers * scales.read().float()[:, group_of]

    return (n_out, n_in), torch.float32 if parts.exact else scales.dtype, read


def scaled(parts: Parts, scheme: Scheme) -> Made:
    """int8 or FP8 [out, in], with one scale for the tensor, each row, each group or each block."""
    weight = parts.check(parts.first, None)
    scales = parts.take("weight_scale", "weight_scale_inv")
    zeros = parts.find("weight_zero_point")
    block = scheme.block
    # [], [1], [out], [out, 1], [out, groups], [rows of blocks, columns of blocks]
    rows, columns = (*scales.shape, 1, 1)[:2]
    sizes = tuple(
        n if count < 2 else (block[axis] if block else n // count)
        for axis, (n, count) in enumerate(zip(weight.shape, (rows, columns), strict=True))
    )
    counts = tuple(math.ceil(n / max(size, 1)) for n, size in zip(weight.shape, sizes, strict=True))
    if counts != (rows, columns) or len(scales.shape) > 2:
        raise UnsupportedError(
            f"{scales} has shape {list(scales.shape)}, which does not fit {list(weight.shape)}"
        )
    if zeros is not None:
        parts.check(zeros, scales.shape)

    def spread(tensor: Tensor) -> Tensor:
        wide = tensor.float().reshape(rows, columns)
        for axis, (n, count) in enumerate(zip(weight.shape, (rows, columns), strict=True)):
            if count > 1:
                wide = wide.repeat_interleave(sizes[axis], axis).narrow(axis, 0, n)
        return wide

    def read() -> Tensor:
        values = weight.read().float()
        if zeros is not None:
            values -= spread(zeros.read())
        return values * spread(scales.read())

    return weight.shape, scales.dtype, read


def mxfp4(parts: Parts, _: Scheme) -> Made:
    """MXFP4 as gpt-oss stores experts: blocks [experts, out, groups, 16], exponents as scales.

    The result is [experts, in, out], as its checkpoints in bfloat16 have it, and made an expert at
    a time.
    """
    experts, out, groups, half = parts.check(parts.first, None, rank=4).shape
    exponents = parts.take("scales", shape=(experts, out, groups))
    if half != 16:
        raise UnsupportedError(f"tensor {parts.first.name!r} has groups of {2 * half}, not 32")

    def read() -> Tensor:
        values = torch.tensor(_FP4)
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)  # of a byte
        made = torch.empty(experts, out, groups * 32, dtype=torch.bfloat16)
        for expert, blocks, powers in zip(made, parts.first.read(), exponents.read(), strict=True):
            numbers = functional.embedding(blocks.int(), pairs).flatten(-2)
            scales = torch.ldexp(torch.ones(powers.shape), powers.int() - 127)
            expert.copy_(numbers.mul_(scales[..., None]).flatten(-2))
        return made.transpose(1, 2)

    return (experts, groups * 32, out), torch.bfloat16, read

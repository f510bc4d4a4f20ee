"""Weights that a checkpoint stores as integers or 8-bit floats with scales, restored as floats.

A restored weight is a `StoredTensor` made of several, and is computed when it is read: one weight
at a time is in memory. Formats, by `quantization_config` in config.json:

    gptq                qweight, qzeros, scales, g_idx?              4 or 8 bits
    awq                 qweight, qzeros, scales ("gemm" packing)     4 bits
    compressed-tensors  weight_packed, weight_scale, weight_shape    4 or 8 bits
                        weight, weight_scale, weight_zero_point?     int8 or FP8
    fp8, fbgemm_fp8     weight, weight_scale or weight_scale_inv     FP8, per tensor, row or block
    mxfp4               …_blocks, …_scales                           FP4 in groups of 32

A weight gets the type of its scales if that has 16 bits, or else the type that config.json names,
whose rounding is finer than the first. Symmetric 4-bit integers in groups of 32, or of a multiple,
become float32: in it integer · scale is exact, so that an int4 export finds the same integers and
scales again (`export.rounding.formulas.quantize_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.quantized_formats import (
    FP8,
    QUANTIZATION_KEYS,
    Made,
    Parts,
    Scheme,
    awq,
    gptq,
    mxfp4,
    packed,
    scaled,
)
from kvasir.model.platform.suggestions import first_problem
from kvasir.model.tensor_files import FLOATS, StoredTensor, dtype_name

# Scales of activations and of the KV cache, which stay floats here.
_UNUSED = (
    *("input_scale", "activation_scale", "output_scale", "input_scale_ub"),
    *("q_scale", "k_scale", "v_scale"),
)


def restore(
    tensors: Iterable[StoredTensor], config: dict[str, Any], notes: list[str]
) -> list[StoredTensor]:
    """Return a checkpoint's tensors with its quantised weights as floats.

    config: the values of config.json, of its text_config where the model also sees images.

    Raises UnsupportedError for a format that is not supported, and for tensors that do not fit it.
    """
    held = {tensor.name: tensor for tensor in tensors}
    key = next((key for key in QUANTIZATION_KEYS if config.get(key) is not None), None)
    if key is not None:
        scheme, made = _scheme(key, config[key]), []
        held = {
            name: tensor for name, tensor in held.items() if name.rpartition(".")[2] not in _UNUSED
        }
        for name in list(held):
            if (tensor := held.get(name)) and (weight := _restored(tensor, held, scheme, config)):
                held[weight.name] = weight
                made.append(weight.dtype)
        kinds = " and ".join(sorted({dtype_name(dtype) for dtype in made})) or "none"
        notes.append(
            f"{len(made)} weights were rounded before ({scheme.quant_method}) and are now {kinds}; "
            "export rounds them again"
        )
    for tensor in held.values():
        if tensor.dtype not in FLOATS:
            supported = ", ".join(map(dtype_name, FLOATS))
            kind = dtype_name(tensor.dtype)
            raise UnsupportedError(f"{tensor} is {kind}; supported are {supported}")
    return list(held.values())


def _scheme(key: str, values: object) -> Scheme:
    try:
        return Scheme.model_validate(values)
    except ValidationError as error:
        problem = first_problem(error)
        place = "" if QUANTIZATION_KEYS[0] in problem else f"{key}: "
        raise UnsupportedError(
            f"config.json's {place}{problem}; use the checkpoint that it was made from"
        ) from None


def _restored(
    tensor: StoredTensor, held: dict[str, StoredTensor], scheme: Scheme, config: dict[str, Any]
) -> StoredTensor | None:
    """Return the weight of which `tensor` holds the integers; its parts are taken from `held`."""
    module, dot, kind = tensor.name.rpartition(".")
    stem, name = module + dot, f"{module}{dot}weight"
    make: Callable[[Parts, Scheme], Made] | None = None
    if kind == "qweight":
        make = {"awq": awq}.get(scheme.quant_method, gptq)
    elif kind == "weight_packed":
        make = packed
    elif kind == "weight" and tensor.dtype in (torch.int8, *FP8):
        make = scaled
    elif kind.endswith("_blocks") and tensor.dtype == torch.uint8:
        stem, name = tensor.name[: -len("blocks")], tensor.name[: -len("_blocks")]
        make = mxfp4
    if make is None:
        return None
    del held[tensor.name]
    parts = Parts(tensor, stem, held)
    shape, dtype, read = make(parts, scheme)
    if name in held:
        raise UnsupportedError(f"tensors {name!r} and {tensor.name!r} are the same parameter")
    if dtype not in FLOATS:
        raise UnsupportedError(f"the scales of {tensor.name!r} are {dtype_name(dtype)}, not floats")
    if dtype == torch.float32 and not parts.exact:
        named = config.get("dtype") or config.get("torch_dtype")
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(named), dtype)

    def restored() -> Tensor:
        return read().to(dtype)

    return replace(tensor, name=name, shape=shape, dtype=dtype, read=restored)

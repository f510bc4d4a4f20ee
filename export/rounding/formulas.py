"""Matrices rounded to integers and scales: by rows, in pairs, in blocks."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

BITS = {"int8": 8, "int4": 4}  # of the precisions that round weights
BLOCK = 32
SMALLEST_SCALE = 1e-12  # for zeros
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-24, 65504.0  # of float16
_NOISE = 0.05  # of a step: what bfloat16 makes of numbers that were rounded to 4 bits before
_MOST_OF_PAIR = 128  # 255 · 128 < 2^15
_PAIR_SCALES = (1.0, 1.1, 1.2, 1.35, 1.6, 2.0)  # to try, relative to that of eight bits


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows of a matrix [out, in], which is nearly int8 [out, in] · scales [out].

    The matrix is overwritten.
    """
    least, most = matrix.aminmax(dim=1)
    scales = (torch.maximum(most, -least) / 127.0).clamp(min=SMALLEST_SCALE)
    return matrix.div_(scales[:, None]).round_().to(torch.int8), scales


def quantize_pairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows of a matrix [out, in], so that x86 without VNNI multiplies them exactly and fast.

    It adds the products of inputs 2 i and 2 i + 1 in 16 bits. They fit if two such weights of one
    sign sum to 128 at most; larger pairs are reduced. A row gets the scale that changes it least.
    """
    n_in = matrix.shape[1]
    pairs = functional.pad(matrix, (0, n_in % 2)).unflatten(1, (-1, 2))  # [out, pairs, 2]
    largest = (matrix.abs().amax(dim=1) / 127.0).clamp(min=SMALLEST_SCALE)
    integers, scales = torch.empty_like(pairs), largest.clone()
    least = torch.full_like(largest, torch.inf)
    for factor in _PAIR_SCALES:
        scale = (largest * factor)[:, None, None]
        rounded = (pairs / scale).round_()
        has_one_sign = rounded[..., 0] * rounded[..., 1] > 0
        excess = (rounded.abs().sum(dim=2) - _MOST_OF_PAIR).clamp(min=0) * has_one_sign
        half = (excess / 2).floor()
        rounded -= rounded.sign() * torch.stack((half, excess - half), dim=2)
        error = (rounded * scale - pairs).square().sum(dim=(1, 2))
        better = error < least
        least[better], scales[better] = error[better], scale[better, 0, 0]
        integers[better] = rounded[better]
    return integers.flatten(1)[:, :n_in].to(torch.int8), scales


def quantize_blocks(matrix: Tensor, bits: int = 4) -> tuple[Tensor, Tensor]:
    """Round blocks of BLOCK numbers of each row to symmetric integers, as MatMulNBits stores them.

    matrix [out, in] → uint8 [out, blocks, BLOCK · bits / 8], of two halves the lower first, each
    2^(bits - 1) more than its integer; and scales [out, blocks]. bits: 4 or 8. A block's value of
    largest magnitude, the first of equals, becomes -2^(bits - 1): the side that reaches further.
    Scales of 4 bits are numbers of float16. A block that was rounded to 4 bits before gets its
    integers again, and its scale, if that is one (`_earlier_scales`).
    """
    reach = 2 ** (bits - 1)
    blocks = functional.pad(matrix, (0, -matrix.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))
    scales = (largest / -reach).masked_fill_(largest == 0.0, SMALLEST_SCALE)
    if bits == 4:
        sizes, some = largest.abs(), slice(None, None, -(-len(blocks) // 16))
        earlier = _earlier_scales(blocks[some], sizes[some], scales[some])
        if not torch.equal(earlier, scales[some]):  # a matrix was rounded as a whole, or not at all
            scales = _earlier_scales(blocks, sizes, scales)
        scales = in_float16(scales)
    integers = (blocks / scales).round_().clamp_(-reach, reach - 1).add_(reach).to(torch.uint8)
    packed = integers if bits == 8 else integers[..., ::2] | integers[..., 1::2] << 4
    return packed, scales[..., 0]


def in_float16(scales: Tensor) -> Tensor:
    """Return scales as float16 holds them, within its range and none of them 0."""
    sizes = scales.abs().clamp(_SMALLEST_HALF, _LARGEST_HALF)
    return sizes.copysign(scales).half().float()


def restore_blocks(packed: Tensor, scales: Tensor, bits: int = 4) -> Tensor:
    """Return the matrix [out, blocks · BLOCK] that `quantize_blocks` has rounded."""
    halves = packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=-1).flatten(2)
    return ((halves - 2.0 ** (bits - 1)) * scales[..., None]).flatten(1)


def was_rounded_before(matrix: Tensor, packed: Tensor, scales: Tensor) -> bool:
    """Tell whether 4 bits, of `quantize_blocks`, hold a matrix, but for rounding to bfloat16."""
    n_in = matrix.shape[1]
    errors = (restore_blocks(packed, scales)[:, :n_in] - matrix).abs()
    steps = scales.abs().repeat_interleave(BLOCK, dim=1)[:, :n_in]
    return bool((errors <= _NOISE * steps).all())


def _earlier_scales(blocks: Tensor, largest: Tensor, scales: Tensor) -> Tensor:
    """Return scales [out, blocks, 1] of which a block's values are multiples, where there are any.

    Such a block was rounded before, to symmetric integers of which the largest need not be -8: GPTQ
    often has 7. The scale is then largest / n for that n from 8 to 1, a number of float16 if one
    will do. In float32 a product of four bits and a scale of at most 20 is exact, and so is the
    quotient.
    """
    is_done, scales = torch.zeros(scales.numel(), dtype=torch.bool), scales.clone()
    rows, flat = blocks.reshape(-1, BLOCK), scales.view(-1)
    for has_16_bits, n in product((True, False), range(8, 0, -1)):
        scale = flat if n == 8 else (largest / n).clamp(min=SMALLEST_SCALE).view(-1)
        scale = in_float16(scale) if has_16_bits else scale
        exact = ~is_done
        for part in (slice(0, 4), slice(4, None)):  # few blocks get past the first
            chosen = exact.nonzero()[:, 0]
            values, steps = rows[chosen, part], scale[chosen, None]
            integers = (values / steps).round_().clamp_(-8, 7)
            exact[chosen] = (integers * steps == values).all(dim=1)
        flat[exact] = scale[exact]
        is_done |= exact
    return scales

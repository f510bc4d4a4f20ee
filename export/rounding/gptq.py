"""4 bits by what they do to outputs: the error of each column is made up for by those after it.

With inputs x and H = E[x xᵀ], a row of weights changes an output by (w - q)ᵀ H (w - q). Columns are
rounded in turn; what one loses is taken from the later ones in the way that changes outputs least,
which a Cholesky factor of H⁻¹ tells (Frantar et al., "GPTQ", 2022). A block of columns is rounded
with several scales, and each row keeps the one that changes its output least.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kvasir.export.rounding.formulas import (
    BLOCK,
    SMALLEST_SCALE,
    in_float16,
    quantize_blocks,
    restore_blocks,
    was_rounded_before,
)

_DAMPING = 0.3
_HELD_OUT = 8  # one token of so many tells whether outputs change less
_STRONGER = 10.0  # times as much, where H is still not positive
# Steps that the largest number of a block is worth, up or down. Of 8 the largest is an integer, of
# 7 upwards too, and of more it is cut.
_STEPS = (8.0, 7.0, 7.4, 7.7, 8.3, 8.7, 9.2)


def inverse_factor(x: Tensor) -> Tensor:
    """Return the upper triangular U with Uᵀ U = H⁻¹, of whole blocks of channels.

    x: inputs [tokens, n_in], of finite squares. A channel that is always 0 depends on no other.
    Raises ValueError where sums of squares are not finite.
    """
    x = functional.pad(x, (0, -x.shape[1] % BLOCK))
    moments = x.t() @ x / len(x)
    diagonal = moments.diagonal()
    diagonal += (diagonal == 0.0).to(x.dtype) * diagonal.mean().clamp(min=SMALLEST_SCALE)
    damping = _DAMPING * diagonal.mean().item()
    failed = True
    while failed:
        if not math.isfinite(damping):
            raise ValueError("what a product reads is too large for int4; export int8 or fp32")
        diagonal += damping
        damping *= _STRONGER
        lower, failed = torch.linalg.cholesky_ex(moments)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    result: Tensor = upper
    return result


def column_rounder(x: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return what rounds rows [out, in] of a matrix that reads x [tokens, n_in].

    Rows stay as `quantize_blocks` rounds them if they were rounded so before, or if that is better
    for tokens that had no part in H, as it may be where these are few.
    """
    is_held_out = torch.arange(len(x)) % _HELD_OUT == _HELD_OUT - 1
    held_out, upper = x[is_held_out], inverse_factor(x[~is_held_out])

    def round_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
        alone, n_in = quantize_blocks(matrix), matrix.shape[1]
        if was_rounded_before(matrix, *alone):
            return alone
        by_columns = quantize_columns(matrix, upper)
        errors = (restore_blocks(*of)[:, :n_in] - matrix for of in (by_columns, alone))
        lost, lost_alone = ((held_out @ of.t()).square().sum(dim=0) for of in errors)
        is_better = lost < lost_alone
        packed, scales = (
            torch.where(is_better.view(-1, *[1] * (of_columns.dim() - 1)), of_columns, of_alone)
            for of_columns, of_alone in zip(by_columns, alone, strict=True)
        )
        return packed, scales

    return round_rows


def quantize_columns(matrix: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [out, in] to 4 bits, in the form of `quantize_blocks`, column by column.

    upper: of `inverse_factor`.
    """
    rest = functional.pad(matrix, (0, len(upper) - matrix.shape[1])).t().contiguous()  # [in, out]
    integers, scales = torch.empty_like(rest), rest.new_empty(len(rest) // BLOCK, len(matrix))
    steps = -torch.tensor([*_STEPS, *(-step for step in _STEPS)])[:, None]
    rows = torch.arange(len(matrix))
    for block, start in enumerate(range(0, len(rest), BLOCK)):
        end = start + BLOCK
        columns, within = rest[start:end], upper[start:end, start:end]
        largest = columns.gather(0, columns.abs().argmax(dim=0, keepdim=True))
        scale = in_float16(largest / steps).ravel()
        columns = columns.repeat(1, len(steps))  # [BLOCK, steps · out]
        rounded, errors = torch.empty_like(columns), torch.empty_like(columns)
        for i in range(BLOCK):
            rounded[i] = (columns[i] / scale).round_().clamp_(-8.0, 7.0)
            errors[i] = (columns[i] - rounded[i] * scale) / within[i, i]
            columns[i + 1 :].addr_(within[i, i + 1 :], errors[i], alpha=-1.0)
        lost = errors.square().sum(dim=0).view(len(steps), -1)
        chosen = lost.argmin(dim=0) * len(rows) + rows
        rest[end:].addmm_(upper[start:end, end:].t(), errors[:, chosen], alpha=-1.0)
        integers[start:end], scales[block] = rounded[:, chosen], scale[chosen]
    halves = integers.t().add_(8.0).to(torch.uint8)
    packed = halves[:, ::2] | halves[:, 1::2] << 4
    return packed.unflatten(1, (-1, BLOCK // 2)), scales.t().contiguous()

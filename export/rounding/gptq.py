"""4 bits by what they do to outputs: the error of each column is made up for by those after it.

With inputs x and H = E[x xᵀ], a row of weights changes an output by (w - q)ᵀ H (w - q). Columns are
rounded in turn; what one loses is taken from the later ones in the way that changes outputs least,
which a Cholesky factor of H⁻¹ tells (Frantar et al., "GPTQ", 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvasir.export.rounding.formulas import BLOCK, SMALLEST_SCALE, quantize_blocks, restore_blocks

_DAMPING = 0.01  # of the mean of H's diagonal, which is added to it
_STRONGER = 10.0  # times as much, where H is still not positive


def inverse_factor(x: Tensor) -> Tensor:
    """Return the upper triangular U [n_in, n_in] with Uᵀ U = H⁻¹; x: inputs [tokens, n_in].

    A channel that is always 0 counts as one of its own.
    """
    moments = x.t() @ x / len(x)
    diagonal = moments.diagonal()
    diagonal += (diagonal == 0.0).to(x.dtype) * diagonal.mean().clamp(min=SMALLEST_SCALE)
    damping = _DAMPING * diagonal.mean().item()
    failed = True
    while failed:
        diagonal += damping
        damping *= _STRONGER
        lower, failed = torch.linalg.cholesky_ex(moments)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    result: Tensor = upper
    return result


def quantize_columns(matrix: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [out, in] to 4 bits as `quantize_blocks` does, column by column.

    upper: of `inverse_factor`. What was rounded to 4 bits before stays as it is.
    """
    packed, scales = quantize_blocks(matrix)
    n_in = matrix.shape[1]
    if torch.equal(restore_blocks(packed, scales)[:, :n_in], matrix):
        return packed, scales
    padding = -n_in % BLOCK
    rest = functional.pad(matrix, (0, padding)).t().contiguous()  # [in, out]
    factor = functional.pad(upper, (0, padding, 0, padding))
    factor.diagonal()[n_in:] = 1.0
    integers, scales = torch.empty_like(rest), torch.empty_like(scales.t())
    for block, start in enumerate(range(0, len(rest), BLOCK)):
        end = start + BLOCK
        columns, within = rest[start:end], factor[start:end, start:end]
        largest = columns.gather(0, columns.abs().argmax(dim=0, keepdim=True))[0]
        scale = (largest / -8.0).masked_fill_(largest == 0.0, SMALLEST_SCALE)
        errors = torch.empty_like(columns)
        for i in range(BLOCK):
            rounded = (columns[i] / scale).round_().clamp_(-8.0, 7.0)
            errors[i] = (columns[i] - rounded * scale) / within[i, i]
            columns[i + 1 :].addr_(within[i, i + 1 :], errors[i], alpha=-1.0)
            integers[start + i] = rounded
        rest[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1.0)
        scales[block] = scale
    halves = integers.t().add_(8.0).to(torch.uint8)
    packed = halves[:, ::2] | halves[:, 1::2] << 4
    return packed.unflatten(1, (-1, BLOCK // 2)), scales.t().contiguous()

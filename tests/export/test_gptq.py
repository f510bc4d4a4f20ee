"""4 bits by their effect on outputs, against the definition: one column after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.export.rounding.formulas import BLOCK, quantize_blocks, restore_blocks
from kvasir.export.rounding.gptq import inverse_factor, quantize_columns

Doubles = NDArray[np.float64]


def inputs(n_in: int, n_tokens: int, seed: int = 0) -> Tensor:
    """Tokens [n_tokens, n_in] whose channels depend on one another, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(n_in, n_in, generator=generator) / n_in**0.5 + torch.eye(n_in)
    sizes = torch.rand(n_in, generator=generator) * 3 + 0.1
    mixture: Tensor = torch.randn(n_tokens, n_in, generator=generator) @ mixed * sizes
    return mixture


def by_definition(row: Doubles, moments: Doubles) -> Doubles:
    """Round a row; after each column, move the rest to where outputs change least.

    Of the scales that are tried for a block, the one whose columns cost least is kept.
    """
    inverse = np.linalg.inv(moments).astype(np.float64)
    rounded = np.zeros_like(row)
    for start in range(0, len(row), BLOCK):
        block = row[start : start + BLOCK]
        largest = block[np.abs(block).argmax()]
        tries = [
            round_block(row, inverse, start, float(np.float16(largest / steps)))
            for step in (7.0, 7.4, 7.7, 8.0, 8.3, 8.7, 9.2)
            for steps in (-step, step)
        ]
        _, found, row, inverse = min(tries, key=lambda tried: tried[0])
        rounded[start : start + BLOCK] = found
    return rounded


def round_block(
    row: Doubles, inverse: Doubles, start: int, scale: float
) -> tuple[float, Doubles, Doubles, Doubles]:
    """Return what rounding a block costs, the block rounded, the row's rest and the inverse."""
    row, inverse, cost, rounded = row.copy(), inverse.copy(), 0.0, np.zeros(BLOCK)
    for i in range(start, start + BLOCK):
        rounded[i - start] = np.clip(np.rint(row[i] / scale), -8, 7) * scale
        error = row[i] - rounded[i - start]
        cost += error**2 / inverse[i, i]
        row -= error / inverse[i, i] * inverse[i]
        row[: i + 1] = 0.0
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]  # without column i
        inverse[i, :] = inverse[:, i] = 0.0
        inverse[i, i] = 1.0
    return cost, rounded, row, inverse


@pytest.mark.parametrize("n_in", [BLOCK, 3 * BLOCK])
def test_columns_are_rounded_as_the_paper_says(n_in: int) -> None:
    x = inputs(n_in, 500)
    matrix = torch.randn(7, n_in, generator=torch.Generator().manual_seed(1))
    moments = (x.T @ x / len(x)).double().numpy()
    moments += np.eye(n_in) * 0.3 * np.diag(moments).mean()
    rounded = restore_blocks(*quantize_columns(matrix, inverse_factor(x)))
    wanted = np.stack([by_definition(row, moments) for row in matrix.double().numpy()])
    np.testing.assert_allclose(rounded, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("n_in", "n_tokens"), [(64, 400), (40, 400), (96, 20)])
def test_outputs_change_less_than_with_each_weight_for_itself(n_in: int, n_tokens: int) -> None:
    """Also where the last block is not full, and where there are fewer tokens than channels."""
    x, other = inputs(n_in, n_tokens), inputs(n_in, 400)
    matrix = torch.randn(50, n_in, generator=torch.Generator().manual_seed(1))

    def error(rounded: tuple[Tensor, Tensor], of: Tensor) -> float:
        restored = restore_blocks(*rounded)[:, :n_in]
        return (of @ (restored - matrix).T).square().mean().item()

    by_columns, alone = quantize_columns(matrix, inverse_factor(x)), quantize_blocks(matrix)
    assert [part.shape for part in by_columns] == [part.shape for part in alone]
    assert [part.dtype for part in by_columns] == [part.dtype for part in alone]
    assert error(by_columns, x) < 0.8 * error(alone, x)
    if n_tokens > n_in:
        assert error(by_columns, other) < 0.9 * error(alone, other)


def test_independent_channels_are_rounded_each_for_itself() -> None:
    """And with the scale that changes their block least."""
    matrix = torch.randn(9, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
    by_columns = quantize_columns(matrix, inverse_factor(torch.eye(2 * BLOCK)))
    scales = by_columns[1].repeat_interleave(BLOCK, dim=1)
    rounded = restore_blocks(*by_columns)
    assert torch.equal(rounded, (matrix / scales).round().clamp(-8, 7) * scales)
    errors, alone = (
        (of - matrix).square().unflatten(1, (-1, BLOCK)).sum(dim=2)
        for of in (rounded, restore_blocks(*quantize_blocks(matrix)))
    )
    assert (errors <= alone * 1.0001).all()
    assert errors.sum() < 0.9 * alone.sum()


def test_silent_channels_and_zeros_are_no_trouble() -> None:
    x, matrix = inputs(2 * BLOCK, 300), torch.zeros(3, 2 * BLOCK)
    x[:, 5] = 0.0
    matrix[0] = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(1))
    for tokens in (x, torch.zeros_like(x)):
        restored = restore_blocks(*quantize_columns(matrix, inverse_factor(tokens)))
        assert restored.isfinite().all()
        assert not restored[1:].any()
        assert (restored[0] - matrix[0]).abs().max() < 1.5


def test_inputs_whose_squares_have_no_sum_are_refused() -> None:
    x = torch.full((40, BLOCK), 1.5e19)
    assert x.square().isfinite().all()
    with pytest.raises(ValueError, match="too large for int4"):
        inverse_factor(x)


def test_what_was_rounded_before_stays_as_it_is() -> None:
    matrix = torch.randn(9, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
    rounded = restore_blocks(*quantize_blocks(matrix))
    again = quantize_columns(rounded, inverse_factor(inputs(2 * BLOCK, 300)))
    assert torch.equal(restore_blocks(*again), rounded)

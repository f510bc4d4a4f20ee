"""Matrices rounded to integers and scales, against what they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from kvasir.export.rounding.formulas import (
    BLOCK,
    quantize_blocks,
    quantize_pairs,
    quantize_rows,
    restore_blocks,
)
from kvasir.export.rounding.mixing import mix, mix_weights


def test_rows_are_symmetric_and_within_half_a_step() -> None:
    matrix = np.random.default_rng(1).standard_normal((20, 50), dtype=np.float32)
    matrix[4] = 0.0
    steps, scales = (of.numpy() for of in quantize_rows(torch.tensor(matrix)))
    assert steps.dtype == np.int8
    assert (np.abs(steps).max(axis=1) == [0 if i == 4 else 127 for i in range(20)]).all()
    assert (np.abs(steps * scales[:, None] - matrix) <= scales[:, None] / 2 * 1.001).all()


def test_a_row_of_pairs_gets_the_scale_that_changes_it_least() -> None:
    """Of those from eight bits to twice as much, each tried with the pairs cut as they must be.

    255 times a pair then fits in 16 bits.
    """
    matrix = np.random.default_rng(2).standard_normal((30, 15)) ** 3
    matrix[4], matrix[5] = 0.0, 1.0
    steps, scales = (of.numpy() for of in quantize_pairs(torch.tensor(matrix)))
    assert steps.dtype == np.int8
    matrix, steps = (np.pad(of, ((0, 0), (0, 1))) for of in (matrix, steps))
    for of_sign in (np.maximum(sign * steps.astype(int), 0) for sign in (1, -1)):
        assert (255 * (of_sign[:, ::2] + of_sign[:, 1::2]) < 2**15).all()
    assert not steps[4].any()
    for row, integers, scale in zip(matrix, steps.astype(float), scales, strict=True):
        if not row.any():
            continue
        eight = np.abs(row).max() / 127
        factors = (1.0, 1.1, 1.2, 1.35, 1.6, 2.0)
        assert min(abs(scale / eight - factor) for factor in factors) < 1e-6
        least = min(np.square(cut_pairs(row, eight * factor) - row).sum() for factor in factors)
        assert np.square(integers * scale - row).sum() == pytest.approx(least)


def cut_pairs(row: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """Round a row, and take the excess over 128 of a pair of one sign from both, one at a time."""
    integers = np.rint(row / scale)
    for pair in integers.reshape(-1, 2):  # a view
        while pair[0] * pair[1] > 0 and np.abs(pair).sum() > 128:
            excess = np.abs(pair).sum() - 128
            pair[int(excess % 2)] -= np.sign(pair[int(excess % 2)])
    return integers * scale


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_within_a_step_and_are_found_again(bits: int) -> None:
    """A step, since the largest value of a block may be cut by one."""
    matrix = torch.randn(5, 3 * BLOCK - 7, generator=torch.Generator().manual_seed(0))
    packed, scales = quantize_blocks(matrix, bits)
    assert packed.shape == (5, 3, BLOCK * bits // 8)
    restored = restore_blocks(packed, scales, bits)
    steps = scales.abs().repeat_interleave(BLOCK, dim=1)
    assert ((restored - nn.functional.pad(matrix, (0, 7))).abs() <= 1.001 * steps).all()
    assert torch.equal(restore_blocks(*quantize_blocks(restored, bits), bits), restored)


@pytest.mark.parametrize("largest", range(1, 9))
def test_blocks_that_were_rounded_before_are_found_again(largest: int) -> None:
    """Whatever their largest integer; with scales of 16 bits, as they are stored."""
    generator = np.random.default_rng(largest)
    integers = generator.integers(-largest, min(largest, 7) + 1, size=(6, BLOCK)).astype(np.float32)
    integers[:, 3] = -largest
    scales = generator.uniform(0.01, 2.0, size=(6, 1)).astype(np.float16).astype(np.float32)
    scales[0], scales[1] = 0.0, 1.0 / 2 ** math.ceil(math.log2(largest))  # zeros, and up to one
    matrix = torch.tensor(integers * scales)
    assert torch.equal(restore_blocks(*quantize_blocks(matrix)), matrix)


def test_mixing_leaves_products_as_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(n, 48, generator=generator) for n in (5, 7))
    assert torch.allclose(mix(x) @ mix_weights(weights).t(), x @ weights.t(), atol=1e-4)
    spike = torch.zeros(1, 48).index_fill_(1, torch.tensor([11]), 100.0)
    assert mix_weights(spike).abs().max() == 100 / 8  # of eight channels

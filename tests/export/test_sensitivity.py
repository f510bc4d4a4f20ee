"""Which matrices of int4 keep 8 bits: what each costs, and what fits."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir.export.rounding.formulas import quantize_blocks, restore_blocks
from kvasir.export.rounding.weights import Weights
from kvasir.export.verification import sensitivity
from kvasir.export.verification.layers import LayeredDecoder
from kvasir.export.verification.sensitivity import (
    check_bits,
    choose_kept,
    in_4_bits,
    keep_in_8_bits,
    notes_on_bits,
)
from kvasir.model.platform.progress import no_progress
from tests.kit.random_models import make_config, make_decoder
from tests.model.variants import VARIANTS

# Layers' matrices that int4 does not round end so.
_OTHERS = ("query_norm.weight", "key_norm.weight", "router.weight", "shared_gate.weight", "bias")


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3 mixture", "lfm2"])
def test_costs_are_those_of_one_matrix_rounded_alone(name: str) -> None:
    """After its own layer: the oracle is another decoder."""
    config = make_config(**VARIANTS[name])
    weights = make_decoder(config).state_dict()
    row = np.random.default_rng(0).integers(config.vocab_size, size=40)
    decoder = LayeredDecoder(config, weights)
    scaled = Weights(weights)
    output = "blocks.1.attention.output.weight"
    columns = np.random.default_rng(0).uniform(0.1, 9, weights[output].shape[1]).astype(np.float32)
    scaled.scale(output, columns[None])
    scaled.scale(output, np.full((len(weights[output]), 1), 2.0, dtype=np.float32))
    costs = decoder.changes(row, partial(in_4_bits, scaled), no_progress)
    exact = list(decoder.states(row))
    matrices = {n for n, of in weights.items() if n.startswith("blocks.") and of.dim() == 2}
    assert costs.keys() == {n for n in matrices if not n.endswith(_OTHERS)}
    for weight in costs:
        layer = int(weight.split(".")[1])
        factors = torch.from_numpy(columns) if weight == output else torch.ones(1)
        rounded = restore_blocks(*quantize_blocks(weights[weight] * factors))
        changed = weights | {weight: rounded[:, : weights[weight].shape[1]] / factors}
        after = list(LayeredDecoder(config, changed).states(row))[layer + 1]
        moved = (after - exact[layer + 1]).square().sum(dim=-1)
        expected = (moved / exact[layer + 1].square().sum(dim=-1)).mean().item()
        assert costs[weight] == pytest.approx(expected, rel=1e-3)
        assert 0.0 < costs[weight] < 0.1


def test_vectors_of_zeros_cost_nothing() -> None:
    config = make_config(n_layer=1)
    weights = make_decoder(config).state_dict()
    for name, of in weights.items():
        if of.dim() == 1 or name == "embedding.weight":
            weights[name] = torch.zeros_like(of)
    change = partial(in_4_bits, Weights(weights))
    costs = LayeredDecoder(config, weights).changes(np.arange(9), change, no_progress)
    assert set(costs.values()) == {0.0}


def test_what_was_rounded_before_keeps_its_4_bits() -> None:
    """8 bits would round it again. So does a file in bfloat16, of whose numbers some are off."""
    matrix = torch.randn(9, 70, generator=torch.Generator().manual_seed(1))
    change = partial(in_4_bits, Weights({}), "blocks.0.feed_forward.down.weight")
    rounded = change(matrix)
    assert rounded is not None
    for again in (rounded, rounded.bfloat16().float()):
        assert change(again) is None


def test_rows_are_rounded_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix would else take several times its memory."""
    matrix = torch.randn(9, 70, generator=torch.Generator().manual_seed(1))
    name, sizes = "blocks.0.feed_forward.down.weight", list[int]()
    weights = Weights({})
    weights.scale(name, np.random.default_rng(0).uniform(0.1, 9, (1, 70)).astype(np.float32))
    whole = in_4_bits(weights, name, matrix)
    assert whole is not None

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(rows.numel())
        return quantize_blocks(rows)

    monkeypatch.setattr(sensitivity, "SLICE", 150)
    monkeypatch.setattr(sensitivity, "quantize_blocks", rounded)
    in_slices = in_4_bits(weights, name, matrix)
    assert in_slices is not None
    assert torch.equal(in_slices, whole)
    assert sizes == [140, 140, 140, 140, 70]
    assert in_4_bits(weights, name, whole) is None
    for row in (0, 8):  # only the others were rounded before
        some = whole.clone()
        some[row] = matrix[row]
        assert in_4_bits(weights, name, some) is not None


def test_the_dearest_of_what_fits_are_kept() -> None:
    """By what a weight of theirs costs, and the next one where one is too large."""
    costs = {"wide": 0.5, "dear": 0.3, "cheap": 0.001, "next": 0.1}
    shapes = {"wide": (40, 10), "dear": (10, 10), "cheap": (30, 10), "next": (10, 20), "norm": (9,)}
    assert choose_kept(costs, shapes, 4.5) == []
    assert choose_kept(costs, shapes, 4.86) == ["dear"]  # a tenth of 1,000 weights
    assert choose_kept(costs, shapes, 4.84) == []
    assert choose_kept(costs, shapes, 5.6) == ["dear", "next"]  # the wide one takes 400
    assert choose_kept(costs, shapes, 8.0) == ["cheap", "dear", "next", "wide"]


def test_the_fewest_bits_are_not_measured() -> None:
    scales, row = np.ones(0, dtype=np.float32), np.arange(9)
    assert keep_in_8_bits(make_config(), {}, scales, row, 4.5, no_progress) == []


def test_bits_are_for_int4_and_within_its_range() -> None:
    for bits in (4.5, 4.85, 8.0):
        check_bits(bits, is_calibrated_int4=True)
        with pytest.raises(ValueError, match=r"^--bits is for --precision int4 on cpu, with"):
            check_bits(bits, is_calibrated_int4=False)
    for bits in (4.4, 8.1, float("nan")):
        with pytest.raises(ValueError, match=rf"^--bits must be 4\.5 to 8, not {bits:g}$"):
            check_bits(bits, is_calibrated_int4=True)


def test_bits_that_keep_nothing_have_a_note() -> None:
    """But for those that say so."""
    assert notes_on_bits(None, []) == notes_on_bits(4.5, []) == notes_on_bits(5.0, ["one"]) == ()
    assert len(notes_on_bits(5.0, [])) == 1

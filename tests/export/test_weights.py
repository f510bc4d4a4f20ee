"""Exported initializers against plain formulas over whole parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.export.graphs.decoder import export_graph, load_weights
from kvasir.export.graphs.paged import export_paged_graph
from kvasir.export.rounding import weights as export_weights
from kvasir.export.rounding.formulas import quantize_pairs
from kvasir.export.rounding.mixing import mix_weights
from kvasir.export.rounding.weights import Weights
from kvasir.model.config import TransformerConfig
from kvasir.model.tensor_files import LazyWeights
from tests.kit.random_models import make_config, make_decoder
from tests.model.variants import VARIANTS

Floats = NDArray[np.float32]
CHANGES: dict[str, Any] = {
    "biases, square matrices, untied": {"d_model": 64} | VARIANTS["gpt2"],
    "head norms": {"n_layer": 1, "qk_norm": True, "d_model": 40, "attention_scale": 0.3},
}


def scaled(config: TransformerConfig, stored: dict[str, Tensor], scales: Floats | None) -> Any:
    """Return float32 arrays; scales: of int8 keys and values."""
    arrays = {name: tensor.float().numpy().copy() for name, tensor in stored.items()}
    n_query, d = config.n_head * config.head_dim, config.head_dim
    for layer in range(config.n_layer):
        attention = f"blocks.{layer}.attention."
        for name in ("query_norm.weight",) if config.qk_norm else ("qkv.weight", "qkv.bias"):
            if attention + name in arrays:
                arrays[attention + name][:n_query] *= np.float32(config.query_scale)
        if scales is None:
            continue
        for head in range(config.n_head):
            group = head // config.n_groups
            channels = slice(head * d, (head + 1) * d)
            if config.qk_norm:
                arrays[attention + "query_norm.weight"][head] *= scales[2 * layer, group]
            else:
                for kind in ("weight", "bias"):
                    if (name := f"{attention}qkv.{kind}") in arrays:
                        arrays[name][channels] = (
                            arrays[name][channels].T * scales[2 * layer, group]
                        ).T
            arrays[attention + "output.weight"][:, channels] *= scales[2 * layer + 1, group]
        inverse = 1 / scales[2 * layer : 2 * layer + 2]
        if config.qk_norm:
            arrays[attention + "key_norm.weight"] *= inverse[0]
            inverse[0] = 1
        for kind in ("weight", "bias"):
            if (name := f"{attention}qkv.{kind}") in arrays:
                arrays[name][n_query:] = (arrays[name][n_query:].T * inverse.ravel()).T
    return arrays


def blocks(rows: Floats, bits: int) -> tuple[Any, Floats]:
    """Return unpacked integers [out, blocks, 32], and scales, a block at a time."""
    reach, n_blocks = 2 ** (bits - 1), -(-rows.shape[1] // 32)
    integers = np.full((len(rows), n_blocks, 32), reach)
    scales = np.zeros((len(rows), n_blocks), dtype=np.float32)
    for row, block in np.ndindex(*scales.shape):
        values = rows[row, 32 * block : 32 * block + 32]
        largest = values[np.abs(values).argmax()]
        scales[row, block] = largest / np.float32(-reach)
        if bits == 4:  # before integers are chosen
            scales[row, block] = np.float16(scales[row, block])
        whole = np.clip(np.rint(values / scales[row, block]), -reach, reach - 1)
        integers[row, block, : len(values)] = whole + reach
    return integers, scales


def initializers(path: Path) -> dict[str, Any]:
    """Return arrays by name; float32 in place of bfloat16, which holds it exactly."""
    values = onnx_ir.load(path).graph.initializers.values()
    arrays = {str(value.name): value.const_value.numpy() for value in values if value.const_value}
    wide = {n: a.astype(np.float32) for n, a in arrays.items() if a.dtype.name == "bfloat16"}
    return arrays | wide


def compare(
    found: dict[str, Any],
    name: str,
    whole: Floats,
    bits: int,
    scale_type: torch.dtype = torch.float16,
) -> None:
    """Compare a parameter [out, in] with what the graph has of it."""
    for stem in (name, f"{name}.T"):
        wanted = whole if stem == name else whole.T
        if stem in found:
            assert (found[stem] == wanted).all(), stem
        if f"{stem}.int8" in found and found[f"{stem}.int8"].dtype == np.int8:
            mixed = mix_weights(torch.tensor(whole)) if ".down." in name else torch.tensor(whole)
            if f"{stem}.int4" in found:  # int8 in the branch of prompts
                rounded, steps = (of.numpy() for of in quantize_pairs(mixed))
            else:
                steps = mixed.abs().amax(dim=1).numpy() / np.float32(127)
                rounded = np.rint(mixed.numpy() / steps[:, None]).astype(np.int8)
            assert (found[f"{stem}.int8"] == (rounded if stem == name else rounded.T)).all(), stem
            assert (found[f"{stem}.int8.scales"] == steps).all(), stem
        if f"{stem}.int{bits}" in found and found[f"{stem}.int{bits}"].dtype == np.uint8:
            integers, scales = blocks(whole, bits)
            packed = integers if bits == 8 else integers[..., ::2] + 16 * integers[..., 1::2]
            assert (found[f"{stem}.int{bits}"] == packed).all(), stem
            held = torch.from_numpy(scales).to(scale_type).float().numpy()
            assert (found[f"{stem}.int{bits}.scales"] == held).all(), stem
            kind = {torch.float16: np.float16}.get(scale_type, np.float32)
            assert found[f"{stem}.int{bits}.scales"].dtype == kind
    assert any(key.startswith(name) for key in found), name


@pytest.mark.parametrize(
    ("changes", "dtype"),
    list(zip(CHANGES.values(), (torch.float32, torch.bfloat16), strict=True)),
)
def test_initializers_are_bit_for_bit_what_plain_formulas_make(
    changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters in slices of a few rows; scales of keys and values that differ by channel."""
    monkeypatch.setattr(export_weights, "SLICE", 200)
    config = make_config(**changes)
    stored = {name: of.to(dtype) for name, of in make_decoder(config).state_dict().items()}
    shape = (2 * config.n_layer, config.n_kv_head, config.head_dim)
    scales = np.random.default_rng(0).uniform(0.1, 9, shape).astype(np.float32)
    for precision in ("fp32", "int8", "int4"):
        path = tmp_path / f"{precision}.onnx"
        export_graph(config, stored, path, precision, scales)
        expected = scaled(config, stored, None if precision == "fp32" else scales)
        found = initializers(path)
        for name, whole in expected.items():
            compare(found, name, whole, bits=4)
        if precision == "fp32":
            loaded = load_weights(config, path)
            assert loaded.keys() == stored.keys()
            for name, tensor in stored.items():
                torch.testing.assert_close(loaded[name], tensor.float(), rtol=2e-7, atol=0.0)


@pytest.mark.parametrize(("precision", "bits"), [("bf16", 0), ("int8", 8), ("int4", 4)])
def test_initializers_for_cuda_are_rounded_to_16_bits_first(
    precision: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_weights, "SLICE", 200)
    config = make_config(n_layer=1, d_model=40)
    stored = make_decoder(config).state_dict()
    export_paged_graph(config, stored, tmp_path / "model.onnx", precision)
    found = initializers(tmp_path / "model.onnx")
    for name, tensor in stored.items():
        compare(found, name, tensor.bfloat16().float().numpy(), bits, torch.bfloat16)


def test_one_parameter_at_a_time_is_read_and_none_is_kept(tmp_path: Path) -> None:
    """Whole models would not fit: each is read when it is written, and tracing reads none."""
    config = make_config(n_layer=1)
    decoder, read = make_decoder(config), list[str]()

    def reader(name: str) -> Any:
        def read_it() -> Tensor:
            read.append(name)
            return decoder.get_parameter(name).detach()

        return read_it

    lazy = LazyWeights({name: reader(name) for name in decoder.state_dict()})
    stages: list[tuple[str, int]] = []
    export_graph(
        config,
        lazy,
        tmp_path / "model.onnx",
        progress=lambda what, *_: stages.append((what, len(read))),
    )
    assert dict(reversed(stages))["tracing PyTorch"] == 0
    assert dict(reversed(stages))["writing weights"] == 0
    assert sorted(read) == sorted(decoder.state_dict())


def test_weights_are_those_stored_and_stay_as_they_are() -> None:
    stored = torch.randn(7, 5)
    before, weights = stored.clone(), Weights({"w": stored})
    assert weights.read("w") is stored
    weights.scale("w", np.full((7, 1), 2.0, dtype=np.float32))
    assert torch.equal(weights.read("w"), 2 * before)
    assert torch.equal(weights.read("w", transposed=True), 2 * before.t())
    assert torch.equal(stored, before)

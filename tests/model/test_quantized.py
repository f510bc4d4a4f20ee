"""Checkpoints whose weights were rounded: packed here by plain loops."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvasir.export.rounding.formulas import BLOCK, quantize_blocks
from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.quantized import restore
from kvasir.model.tensor_files import StoredTensor
from tests.kit.huggingface_checkpoints import make_model, save_checkpoint

WEIGHTS = "model.safetensors"
FIRST = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]
# Returns a weight's tensors by suffix, and the weight that they stand for.
Round = Callable[[tuple[int, int]], tuple[Tensors, Tensor]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("theirs"), make_model("llama", num_hidden_layers=1)
    )


def pack(integers: Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Put 32 / bits unsigned integers into each word: the lowest bits hold the order's first."""
    rows = integers.movedim(axis, 0)
    per_word = 32 // bits
    words = np.zeros((-(-len(rows) // per_word), *rows.shape[1:]), dtype=np.uint32)
    for word in range(len(words)):
        for place, offset in enumerate(order or range(per_word)):
            if (row := word * per_word + offset) < len(rows):
                words[word] |= rows[row].numpy().astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32)).movedim(0, axis).contiguous()


def random_scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) * 0.02 + 0.005).to(dtype)


def gptq(
    bits: int = 4, group: int = 32, sym: bool = False, shuffle: bool = False, less: int = 1
) -> Round:
    def make(shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
        n_out, n_in = shape
        groups = -(-n_in // group)
        integers = torch.randint(2**bits, (n_in, n_out))
        zeros = torch.randint(less, 2**bits, (groups, n_out))
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
        scales, of = random_scales(groups, n_out), torch.arange(n_in) // group
        if shuffle:
            of = of[torch.randperm(n_in)]
        parts = {
            "qweight": pack(integers, bits, 0),
            "qzeros": pack(zeros - less, bits, 1),
            "scales": scales,
            "g_idx": of.int(),
        }
        weight = torch.empty(n_out, n_in)
        for i in range(n_in):
            weight[:, i] = (integers[i] - zeros[of[i]]) * scales[of[i]].float()
        return parts, weight if sym and bits == 4 and not shuffle else weight.half()

    return make


def awq(shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
    n_out, n_in = shape
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    integers, zeros = torch.randint(16, (n_in, n_out)), torch.randint(16, (n_in // 32, n_out))
    scales = random_scales(n_in // 32, n_out)
    parts = {
        "qweight": pack(integers, 4, 1, order),
        "qzeros": pack(zeros, 4, 1, order),
        "scales": scales,
    }
    wide, of = scales.float().repeat_interleave(32, 0), zeros.repeat_interleave(32, 0)
    return parts, ((integers - of) * wide).t().half()


def packed(bits: int = 4, zeros: bool = False, reordered: bool = False) -> Round:
    def make(shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
        n_out, n_in = shape
        middle, groups = 2 ** (bits - 1), n_in // 32
        integers = torch.randint(-middle, middle, shape)
        points = torch.randint(-middle, middle, (n_out, groups)) * zeros
        scales = random_scales(n_out, groups, dtype=torch.bfloat16)
        of = torch.arange(n_in) // 32
        of = of[torch.randperm(n_in)] if reordered else of
        parts = {
            "weight_packed": pack(integers + middle, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(shape),
        }
        if zeros:
            parts["weight_zero_point"] = pack(points + middle, bits, 0)
        if reordered:
            parts["weight_g_idx"] = of.int()
        weight = (integers - points[:, of]) * scales.float()[:, of]
        exact = bits == 4 and not zeros and not reordered
        return parts, weight if exact else weight.bfloat16()

    return make


def scaled(
    kind: torch.dtype,
    scale_shape: tuple[int, ...],
    name: str = "weight_scale",
    block: int = 1,
    scale_type: torch.dtype = torch.bfloat16,
) -> Round:
    """Fill -1 in scale_shape with the rows, -2 and -3 with the blocks of rows and of columns."""

    def make(shape: tuple[int, int]) -> tuple[Tensors, Tensor]:
        sizes = {-1: shape[0], -2: -(-shape[0] // block), -3: -(-shape[1] // block)}
        scales = random_scales(*(sizes.get(n, n) for n in scale_shape), dtype=scale_type)
        values = torch.randint(-100, 100, shape).float().to(kind)
        rows, columns = torch.arange(shape[0])[:, None], torch.arange(shape[1])
        wide = scales[rows // block, columns // block] if block > 1 else scales.reshape(-1, 1)
        parts = {"weight": values, name: scales, "input_scale": torch.ones(())}
        return parts, (values.float() * wide.float()).bfloat16()

    return make


FP8 = torch.float8_e4m3fn
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FORMATS: dict[str, tuple[dict[str, Any], Round]] = {
    "gptq": (GPTQ, gptq()),
    "gptq sym": (GPTQ | {"sym": True}, gptq(sym=True)),
    "gptq desc_act": (GPTQ | {"sym": True, "desc_act": True}, gptq(sym=True, shuffle=True)),
    "gptq 8 bits": (GPTQ | {"bits": 8}, gptq(bits=8)),
    "gptq one group": (GPTQ | {"group_size": -1}, gptq(group=10**6)),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(less=0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"}, awq),
    "packed": (COMPRESSED, packed()),
    "packed 8 bits": (COMPRESSED, packed(bits=8)),
    "packed with zero points": (COMPRESSED, packed(zeros=True)),
    "packed in order of activation": (COMPRESSED, packed(reordered=True)),
    "int8 rows": (COMPRESSED | {"format": "int-quantized"}, scaled(torch.int8, (-1, 1))),
    "fp8 tensor": (COMPRESSED | {"format": "float-quantized"}, scaled(FP8, (1,))),
    "fp8 rows": ({"quant_method": "fbgemm_fp8"}, scaled(FP8, (-1, 1), scale_type=torch.float32)),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [40, 40]},  # which end in the middle
        scaled(FP8, (-2, -3), "weight_scale_inv", 40, torch.float32),
    ),
    "compressed blocks": (
        COMPRESSED
        | {"format": "float-quantized"}
        | {"config_groups": {"group_0": {"weights": {"block_structure": [40, 40]}}}},
        scaled(FP8, (-2, -3), block=40),
    ),
}


def write(llama: Path, folder: Path, name: str) -> Path:
    """Write a checkpoint in the format, and the same of floats beside it."""
    torch.manual_seed(0)
    quantization, make = FORMATS[name]
    rounded: Tensors = {}
    floats = load_file(llama / WEIGHTS)
    for key, tensor in list(floats.items()):
        if not re.search(r"(self_attn|mlp)\..*\.weight$", key):
            rounded[key] = tensor
            continue
        parts, floats[key] = make((tensor.shape[0], tensor.shape[1]))
        rounded |= {f"{key.removesuffix('weight')}{part}": one for part, one in parts.items()}
    for where, tensors in ((folder / "rounded", rounded), (folder / "floats", floats)):
        shutil.copytree(llama, where)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, where / WEIGHTS)
    config = json.loads((llama / "config.json").read_text())
    config |= {"quantization_config": quantization, "dtype": "bfloat16"}
    (folder / "rounded" / "config.json").write_text(json.dumps(config))
    return folder / "rounded"


@pytest.fixture(scope="module")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return checkpoints by format, made once; to be read only. `floats` lies beside each."""
    return cache(lambda name: write(llama, tmp_path_factory.mktemp("formats"), name))


@pytest.mark.parametrize("name", FORMATS)
def test_rounded_weights_are_restored(name: str, folders: Callable[[str], Path]) -> None:
    folder = folders(name)
    checkpoint = load_checkpoint(folder)
    ours, expected = checkpoint.weights, load_checkpoint(folder.parent / "floats").weights
    assert "7 weights were rounded before" in checkpoint.notes[0]
    assert {key: tensor.dtype for key, tensor in ours.items()} == {
        key: tensor.dtype for key, tensor in expected.items()
    }
    assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())


def blocks_of(integers: Tensor) -> np.ndarray[Any, Any]:
    """Pack integers [out, in] as MatMulNBits stores them, by its definition."""
    n_out, n_in = integers.shape
    result = np.zeros((n_out, n_in // BLOCK, BLOCK // 2), dtype=np.uint8)
    for row in range(n_out):
        for i, integer in enumerate(integers[row].tolist()):
            shift = 4 * (i % 2)
            result[row, i // BLOCK, i % BLOCK // 2] |= (integer + 8) << shift
    return result


@pytest.mark.parametrize("name", ["gptq sym", "packed"])
def test_an_int4_export_repeats_the_integers_and_scales(
    name: str, folders: Callable[[str], Path]
) -> None:
    folder = folders(name)
    ours = load_checkpoint(folder).weights
    stored = load_file(folder / WEIGHTS)
    module = "model.layers.0.mlp.down_proj"
    if name == "packed":
        words, scales = stored[f"{module}.weight_packed"], stored[f"{module}.weight_scale"]
    else:
        words, scales = stored[f"{module}.qweight"].t(), stored[f"{module}.scales"].t()
    parts = [(words >> shift & 15) - 8 for shift in range(0, 32, 4)]
    integers = torch.stack(parts, dim=-1).flatten(1)
    matrix = ours["blocks.0.feed_forward.down.weight"]
    assert matrix.dtype == torch.float32
    again, scales_again = quantize_blocks(matrix)
    assert np.array_equal(again, blocks_of(integers))
    assert np.array_equal(scales_again, scales.float().numpy())


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    blocks = torch.randint(256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 6, 3), dtype=torch.uint8)
    given = {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}
    stored = [
        StoredTensor(Path("x"), name, tuple(tensor.shape), tensor.dtype, tensor.clone)
        for name, tensor in given.items()
    ]
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (made,) = restore(stored, config, [])
    # It takes a second, which every worker would spend on collection.
    mxfp4 = import_module("transformers.integrations.mxfp4")
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert (made.name, made.dtype, made.shape) == (
        *("mlp.experts.down_proj", torch.bfloat16),
        tuple(expected.shape),
    )
    assert torch.equal(made.read(), expected)


def test_tensors_that_change_nothing_are_left_out(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Scales of activations, and AutoGPTQ's biases of zeros."""
    folder = shutil.copytree(folders("gptq"), tmp_path / "copy")
    expected = load_checkpoint(folder).weights.keys()
    with_parts(bias=torch.zeros(64).half(), activation_scale=torch.ones(()))(folder)
    changed(transform_config={}, dynamic=None)(folder)
    assert load_checkpoint(folder).weights.keys() == expected


def test_the_older_name_of_the_key_is_read(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("packed"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    notes = load_checkpoint(folder).notes
    assert "7 weights were rounded before (compressed-tensors)" in notes[0]


def changed(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= values
        (folder / "config.json").write_text(json.dumps(config))

    return change


def with_parts(**parts: Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        for part, tensor in parts.items():
            tensors.pop(f"{FIRST}.{part}", None)
            tensors |= {} if tensor is None else {f"{FIRST}.{part}": tensor}
        save_file(tensors, folder / WEIGHTS)

    return change


ROTATED: dict[str, Any] = {"config_groups": {"R1": {}}}
TWO = torch.full((64,), 2, dtype=torch.int32)
SPARSE = {"format": "2:4"}
ALMOST_ZERO = torch.tensor([0.0] * 63 + [1e-3])
# A format, how it is broken, and what a message says of it.
REFUSALS: list[tuple[str, Callable[[Path], None], str]] = [
    ("gptq", changed(quant_method="x"), r"quantization_config: quant_method .* not 'x'; use the"),
    ("gptq", changed(bits=3), r"bits must be 4 or 8, not 3"),
    ("awq", changed(version="gemv"), r"version must be 'gemm', not 'gemv'"),
    ("packed", changed(format="nvfp4-pack-quantized"), r"format must be .*, not 'nvfp4"),
    ("packed", changed(transform_config=ROTATED), r"transform_config"),
    ("gptq", changed(dynamic={"-:.*down": {}}), r"dynamic"),
    ("packed", changed(sparsity_config=SPARSE), r"sparsity_config.format"),
    ("packed", with_parts(weight_shape=torch.ones(2)), r"weight_shape' .* is F32, not I64"),
    ("gptq", with_parts(bias=ALMOST_ZERO), rf"unknown tensor '{FIRST}\.bias'"),
    ("gptq", with_parts(scales=None), rf"'{FIRST}\.scales', which '{FIRST}\.qweight'"),
    ("gptq", with_parts(scales=torch.ones(3, 64)), r"scales' .* \[3, 64\], not \[2, 64\]"),
    ("gptq", with_parts(qzeros=torch.ones(2, 8)), rf"'{FIRST}\.qzeros' .* is F32, not I32"),
    ("gptq desc_act", with_parts(g_idx=TWO), rf"'{FIRST}\.g_idx' .* names no group"),
    ("gptq", with_parts(weight=torch.ones(64, 64)), r"\.qweight' are the same parameter"),
    ("packed", with_parts(weight_shape=torch.tensor([64, 48])), r"not \[64, 48\] in 4 or 8 bits"),
    ("fp8 blocks", changed(weight_block_size=[128, 128]), r"\[2, 3\], which does not fit \[64, 96"),
    ("int8 rows", with_parts(weight_scale=torch.ones(0)), r"\[0\], which does not fit \[64, 64\]"),
    ("int8 rows", with_parts(weight_scale=None), rf"it lacks the tensor '{FIRST}\.weight_scale'"),
    ("int8 rows", with_parts(weight_scale=torch.ones(64, 1).char()), r"weight' are I8, not floats"),
]


@pytest.mark.parametrize(("name", "break_it", "message"), REFUSALS)
def test_what_does_not_fit_is_refused_in_one_line(
    name: str,
    break_it: Callable[[Path], None],
    message: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(folders(name), tmp_path / "copy")
    break_it(folder)
    with pytest.raises((CheckpointError, UnsupportedError), match=message) as caught:
        assert load_checkpoint(folder).decoder
    assert "\n" not in str(caught.value)

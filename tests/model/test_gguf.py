"""GGUF files: the same model as its folder."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers.integrations.gguf.dequant import dequantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvasir.export.rounding.formulas import quantize_blocks
from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from kvasir.model.configuration.parts import RopeScaling
from kvasir.model.importing.gguf.file import read_gguf
from kvasir.model.tensor_files import StoredTensor
from tests.kit.families import rope
from tests.kit.gguf_files import ARCHITECTURES, write_gguf
from tests.kit.huggingface_checkpoints import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    make_model,
    save_checkpoint,
)

Array = NDArray[Any]


@cache
def small_llama() -> Any:
    """Return a model of one layer, to be read only."""
    return make_model("llama", num_hidden_layers=1)


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
IN_THREE_OF_FOUR = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
# Name: a model of FAMILIES, and changes that GGUF can say. llama.cpp answers as transformers does,
# but for phi3, whose windows it leaves out, exaone4, whose windows it finds by 64 layers, gpt_oss,
# whose yarn it rounds to whole pairs, olmo3, whose factor of attention it applies twice, longrope,
# whose factors it chooses by the context, gemma3 without windows, and cohere with norms of heads.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential": ("gpt_neox sequential", {"attention_bias": True}),
    "llama": ("llama", {}),
    "llama with biases": ("llama3", rope("default")),
    "llama3": ("llama3", rope("llama3", **LLAMA3, original_max_position_embeddings=8192)),
    "yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "linear": ("llama", rope("linear", factor=4.0)),
    "mistral": ("mistral", {"sliding_window": None}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "longrope": ("longrope", {}),
    "phi3 partial": ("phi3 partial", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 32, "num_hidden_layers": 6}
        | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    "granite": ("granite", {}),
    "gemma3 without windows": (
        "gemma3",
        {"query_pre_attn_scalar": 32, "layer_types": ["full_attention"] * 2},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", IN_THREE_OF_FOUR),
    "phi": ("phi", {}),
    "stablelm": ("stablelm", {}),
    "stablelm parallel": ("stablelm parallel", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    **{
        name: (name, {})
        for name in (
            *("glm4", "exaone4", "exaone4 without windows", "cohere", "cohere with norms of heads"),
            *("seed_oss", "hunyuan_v1_dense", "olmo clipped", "qwen2_moe", "granitemoe"),
            *("granitemoeshared", "glm4_moe", "glm4_moe in groups", "hunyuan_v1_moe", "minimax_m2"),
        )
    },
    "cohere2": ("cohere2", IN_THREE_OF_FOUR),
    "gpt_oss": (
        "gpt_oss",
        rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
    ),
    "ernie4_5": ("ernie4_5", {"use_bias": False}),
    "arcee": ("arcee", {"mlp_bias": False}),
    "olmo": ("olmo", {"attention_bias": False}),
    "nemotron": ("nemotron", {"head_dim": 16}),
    "olmoe": ("olmoe", {"num_key_value_heads": 4}),
    "dots1": ("dots1", {"sliding_window": None, "num_key_value_heads": 4}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen3_moe": ("qwen3_moe with shares of all experts", {"norm_topk_prob": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_its_folder(name: str, tmp_path: Path) -> None:
    """Compare the configuration and every weight; other tests compare those with transformers."""
    family, changes = MODELS[name]
    model: Any = make_model(family, **changes)
    expected = load_checkpoint(save_checkpoint(tmp_path / "folder", model))
    found = load_checkpoint(write_gguf(tmp_path / "x.gguf", model))
    assert found.weights.keys() == expected.weights.keys()
    for key, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[key], tensor, rtol=1e-6, atol=1e-7)
    # The models have no special tokens. <|endoftext|> is 0, and ends an answer too.
    tokens: dict[str, Any] = {"bos_token_id": 300, "eos_token_ids": (301, 0)}
    if name in ("longrope", "olmo3"):  # the factor of attention is a float32
        scaling, ours_of = expected.config.rope_scaling, found.config.rope_scaling
        assert scaling is not None
        assert ours_of is not None
        assert ours_of.attention_factor == pytest.approx(scaling.attention_factor)
        tokens["rope_scaling"] = replace(scaling, attention_factor=ours_of.attention_factor)
    if name == "hunyuan_v1_dense":  # so is theta, which alpha multiplies
        assert found.config.rope_theta == pytest.approx(expected.config.rope_theta)
        tokens["rope_theta"] = found.config.rope_theta
    assert found.config == replace(expected.config, **tokens)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "phi3", "gemma2", "gemma3"])
def test_the_files_of_these_tests_are_what_transformers_reads(name: str, tmp_path: Path) -> None:
    """The order of rows in queries and keys, above all."""
    family, changes = MODELS[name]
    model: Any = make_model(family, **changes)
    path = write_gguf(tmp_path / "x.gguf", model)
    load: Any = load_gguf_checkpoint
    theirs = load(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert theirs.keys() <= model.state_dict().keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(torch.as_tensor(tensor), model.state_dict()[key])


BLOCK_TYPES = ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
SCALES = {  # of a block: the places of its float16 numbers
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
}


def write_tensor(path: Path, data: Array, kind: str) -> StoredTensor:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = read_gguf(path).tensors
    return tensor


def random_blocks(kind: str, rows: int, columns: int) -> Array:
    """Return a matrix of random integers, with scales that are no NaN."""
    generator = np.random.default_rng(0)
    _, width = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = generator.integers(256, size=(rows * columns, width), dtype=np.uint8)
    for place in SCALES[kind]:
        scales = generator.uniform(0.001, 0.02, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, columns * width)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_are_restored_as_transformers_restores_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir.model.importing.gguf.file._AT_ONCE", 600)  # in several parts
    data = random_blocks(kind, rows=5, columns=2)
    tensor = write_tensor(tmp_path / "x.gguf", data, kind)
    expected = dequantize(torch.from_numpy(data).flatten(), Kind[kind].value)
    assert tensor.dtype == (torch.float32 if kind == "Q4_0" else torch.float16)
    assert torch.equal(tensor.read(), expected.reshape(tensor.shape).to(tensor.dtype))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_five_bits_are_restored(kind: str, tmp_path: Path) -> None:
    data = random_blocks(kind, rows=2, columns=1)
    tensor = write_tensor(tmp_path / "x.gguf", data, kind)
    offset = 4 if kind == "Q5_1" else 2
    for row, block in zip(tensor.read(), data, strict=True):
        scale, least = block[:2].view(np.float16)[0], block[2:4].view(np.float16)[0]
        high = int.from_bytes(block[offset : offset + 4].tobytes(), "little")
        halves = block[offset + 4 :]
        for i in range(32):
            integer = int(halves[i % 16] >> 4 * (i // 16) & 15) | (high >> i & 1) << 4
            value = np.float32(scale) * (integer if kind == "Q5_1" else integer - 16)
            value += np.float32(least) if kind == "Q5_1" else 0
            assert row[i].item() == np.float16(value)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0])
def test_matrices_of_a_type_are_what_the_values_were_rounded_to(kind: Kind, tmp_path: Path) -> None:
    model = small_llama()
    checkpoint = load_checkpoint(write_gguf(tmp_path / "x.gguf", model, kind))
    ours = checkpoint.weights["blocks.0.feed_forward.down.weight"]
    matrix = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    error = {Kind.F16: 2**-11, Kind.BF16: 2**-8, Kind.Q8_0: 2**-7, Kind.Q4_0: 2**-3}[kind]
    types = {Kind.BF16: torch.bfloat16, Kind.Q4_0: torch.float32}
    assert ours.dtype == types.get(kind, torch.float16)
    assert (ours.float() - matrix).abs().max() <= error * matrix.abs().max()
    rounded = [note for note in checkpoint.notes if "were rounded before" in note]
    assert len(rounded) == (kind in (Kind.Q8_0, Kind.Q4_0))


@pytest.mark.parametrize("least", [0, 1])
def test_an_int4_export_repeats_the_integers_and_scales_of_q4_0(least: int, tmp_path: Path) -> None:
    """Also of blocks without the lowest integer, as an importance matrix leaves many."""
    matrix = np.random.default_rng(0).standard_normal((48, 96), dtype=np.float32)
    blocks = gguf.quants.quantize(matrix, Kind.Q4_0).reshape(48, 3, 18)
    halves = blocks[..., 2:]  # the first 16 numbers are the lower halves
    integers = np.maximum(np.concatenate([halves & 15, halves >> 4], axis=-1), least)
    blocks[..., 2:] = integers[..., :16] | integers[..., 16:] << 4
    tensor = write_tensor(tmp_path / "x.gguf", blocks.reshape(48, 54), "Q4_0").read()
    packed, scales = (part.numpy() for part in quantize_blocks(tensor))
    ours = np.stack([packed & 15, packed >> 4], axis=-1).reshape(integers.shape).astype(int) - 8
    stored = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    assert np.array_equal(ours * scales[..., None], (integers.astype(int) - 8) * stored)
    if least == 0:
        assert np.array_equal(ours + 8, integers)


def test_what_files_of_mixtures_leave_out_or_add(tmp_path: Path) -> None:
    """Older ones have a vector for the gate of a shared expert; some have layers that predict."""
    model: Any = make_model("qwen2_moe", num_hidden_layers=1)
    gates = [name for name in model.state_dict() if name.endswith("shared_expert_gate.weight")]
    expected = load_checkpoint(write_gguf(tmp_path / "x.gguf", model)).weights
    for name in gates:
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight = torch.nn.Parameter(module.weight[0])
    found = load_checkpoint(write_gguf(tmp_path / "y.gguf", model)).weights
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    model = make_model("glm4_moe", num_hidden_layers=3)
    more = write_gguf(tmp_path / "z.gguf", model, glm4moe__nextn_predict_layers=1)
    assert load_checkpoint(more).config.n_layer == 2


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    whole = load_checkpoint(write_gguf(tmp_path / "x.gguf", small_llama()))
    write_gguf(tmp_path / "y.gguf", small_llama(), split_max_tensors=4)
    parts = sorted(tmp_path.glob("y-*-of-*.gguf"))
    assert len(parts) == 3
    split = load_checkpoint(parts[0])
    assert (split.config, split.extra_files) == (whole.config, whole.extra_files)
    assert all(torch.equal(split.weights[key], whole.weights[key]) for key in whole.weights)
    named = load_checkpoint((tmp_path / "x.gguf").rename(tmp_path / "x-00001-of-00000.gguf"))
    assert named.config == whole.config  # a name of no parts is that of a whole file
    parts[2].rename(tmp_path / "y.gguf")
    with pytest.raises(CheckpointError, match=r"3 parts, and y-00003-of-00003\.gguf is not"):
        load_checkpoint(parts[0])
    with pytest.raises(CheckpointError, match="it is one of 3 parts, named NAME-00001-of-0000N"):
        load_checkpoint(parts[0].rename(tmp_path / "z.gguf"))


def test_what_travels_with_the_weights(tmp_path: Path) -> None:
    more: dict[str, Any] = {"general__sampling__temp": 0.5, "general__sampling__top_k": 20}
    path = write_gguf(tmp_path / "x.gguf", small_llama(), **more)
    files = load_checkpoint(path).extra_files
    assert files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    special = json.loads(files["special_tokens_map.json"])
    assert special == {"bos_token": BOS, "eos_token": EOS}
    defaults = json.loads(files["generation_config.json"])
    assert defaults == {"temperature": 0.5, "top_k": 20}


def test_a_chat_template_may_lie_beside_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", small_llama(), chat_template=None)
    assert "chat_template.jinja" not in load_checkpoint(path).extra_files
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert load_checkpoint(path).extra_files["chat_template.jinja"] == b"beside"


WIDTHS = {"llama__attention__key_length": 16, "llama__attention__value_length": 32}
# Keys of the metadata, and what a message says of them.
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"general__architecture": "mamba"}, r"architecture 'mamba'; supported are arcee, cohere2,"),
    ({"llama__expert_count": 8}, "a model of this shape has at least 126,976 weights"),
    ({"llama__expert_gating_func": 2}, "expert_gating_func is 2, and Kvasir computes only None"),
    ({"llama__leading_dense_block_count": 1}, "leading_dense_block_count is 1, and Kvasir"),
    ({"llama__rope__other": 1e6}, r"its key llama\.rope\.other is unknown, and may change"),
    ({"tokenizer__ggml__pre": "x"}, r"pre is 'x'; supported are llama-bpe,.* with tokenizer"),
    ({"tokenizer__ggml__model": "t5"}, r"model is 't5'; supported are 'gpt2' and 'llama'"),
    ({"tokenizer__ggml__bos_token_id": 999}, "bos_token_id is 999, and it has 320 tokens"),
    ({"llama__attention__sliding_window": 64}, "is 64, and Kvasir computes only None or 0"),
    (WIDTHS, r"attention\.value_length is 32, and Kvasir computes only the key_length, 16"),
    ({"llama__rope__scaling__type": "longrope"}, "'longrope', and Kvasir computes only default"),
    ({"llama__attention__head_count": 0}, "head_count must be a positive number, not 0"),
    ({"llama__block_count": 2**31 - 1}, "block_count must be a whole number from 1 to 10000"),
    ({"tokenizer__chat_template": 1}, r"tokenizer\.chat_template is not a text"),
    ({"split__count": [*range(99)]}, r"it is one of \[ 0 +1 +2"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS)
def test_what_is_not_supported_is_refused_in_one_line(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "x.gguf", small_llama(), **values)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "pattern", "message"),
    [
        ("gemma2", 3, "sliding_window_pattern is 3, and Kvasir computes only None or 2"),
        ("olmo3", 5, "sliding_window_pattern is 5, and Kvasir computes only None or 4"),
        ("gemma3", [True, False, True], "sliding_window_pattern has 3 values for 2 layers"),
        ("gemma3", "x", "sliding_window_pattern must be a whole number"),
    ],
)
def test_windows_in_other_layers_are_refused(
    family: str, pattern: Any, message: str, tmp_path: Path
) -> None:
    model: Any = make_model(family)
    architecture = ARCHITECTURES[model.config.model_type].name.lower()
    values = {f"{architecture}__attention__sliding_window_pattern": pattern}
    path = write_gguf(tmp_path / "x.gguf", model, **values)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("key", ["rope__scale_linear", "rope__scaling__factor"])
def test_a_factor_without_a_kind_of_scaling_is_linear(key: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {f"llama__{key}": 4.0}
    path = write_gguf(tmp_path / "x.gguf", small_llama(), **values)
    config = load_checkpoint(path).config
    assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)


def test_other_rotary_factors_are_refused(tmp_path: Path) -> None:
    other = rope("llama3", **LLAMA3, original_max_position_embeddings=4096)
    path = write_gguf(tmp_path / "x.gguf", make_model("llama3", num_hidden_layers=1, **other))
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' .* as Llama 3\.1 does"):
        load_checkpoint(path)


def header(*parts: bytes | int | str, counts: tuple[int, int] = (0, 1)) -> bytes:
    """Join a header: a number takes 4 bytes, a text its length before it."""
    result = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    for part in parts:
        if isinstance(part, str):
            result += struct.pack("<Q", len(part)) + part.encode()
        else:
            result += struct.pack("<I", part) if isinstance(part, int) else part
    return result


HUGE = struct.pack("<Q", 2**63)
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "x.gguf is empty"),
    "another file": (b"PK\x03\x04" + bytes(100), "x.gguf is not a GGUF file"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(100), "is of GGUF version 50331648; supported are 2"),
    "cut": (b"GGUF\3\0", "it ends in the middle of its header"),
    "huge counts": (header(counts=(2**63, 2**63)), r"number of tensors is 9,223,372"),
    "huge number of keys": (header(counts=(0, 2**40)), "number of keys is 1,099,511,627,776"),
    "huge text": (header(HUGE), "the length of a key is 9,223,372,036,854,775,808, more than"),
    "text beyond the end": (header(struct.pack("<Q", 1000)), "ends in the middle"),
    "huge array": (header("a", 9, 8, HUGE), "length of the key 'a' is 9,223"),
    "array beyond the end": (header("a", 9, 4, struct.pack("<Q", 10**6)), "ends in the middle"),
    "array of arrays": (header("a", 9, 9, struct.pack("<Q", 1)), "is an array of arrays"),
    "unknown type": (header("a", 99), "the key 'a' is of the unknown type 99"),
    "key twice": (header("a", 4, 1, "a", 4, 1, counts=(0, 2)), "it has the key 'a' twice"),
    "zeros": (header(bytes(10**6), counts=(0, 2**15)), "it has the key '' twice"),
    "no text": (header(struct.pack("<Q", 1) + b"\xff"), "a key is not UTF-8 text"),
    "alignment": (header("general.alignment", 4, 0), "general.alignment is 0"),
    "rank": (header("x", 99, counts=(1, 0)), "the rank of 'x' is 99, more than 4"),
    "tensor beyond the end": (
        header("x", 2, struct.pack("<QQ", 64, 64), 0, bytes(8), counts=(1, 0)),
        "tensor 'x' ends at 16,",
    ),
    "tensor far beyond the end": (
        header("x", 2, HUGE, HUGE, 0, b"\xff" * 8, counts=(1, 0)),
        "tensor 'x' ends at",
    ),
    "part of a block": (
        header("x", 1, struct.pack("<Q", 33), 2, bytes(8), counts=(1, 0)),
        r"tensor 'x' of Q4_0 has shape \[33\]",
    ),
    "type of a tensor": (
        header("x", 1, struct.pack("<Q", 256), 16, bytes(8), counts=(1, 0)),
        r"tensor 'x' in x\.gguf is of ggml's type 16; supported are F32",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)


def test_whatever_a_file_holds_ends_in_a_checkpoint_or_in_one_line(tmp_path: Path) -> None:
    """Cut a file and change bytes of its header at random."""
    content = write_gguf(tmp_path / "x.gguf", small_llama()).read_bytes()
    end = content.index(b"token_embd.weight") + 1000
    generator = random.Random(0)
    outcomes = set()
    for i in range(150):
        broken = bytearray(content)
        for _ in range(generator.choice((1, 1, 3))):
            broken[generator.randrange(end)] = generator.choice((0, 1, 127, 255))
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(broken[: generator.choice((len(broken), generator.randrange(end)))])
        try:
            load_checkpoint(path)
            outcomes.add("opened")
        except CheckpointError as error:
            outcomes.add(f"refused in {len(str(error).splitlines())} line")
        path.unlink()
    assert outcomes == {"opened", "refused in 1 line"}

"""The graph that is exported for CUDA, run by numpy, against the decoder that it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch

from kvasir.export.graphs.paged import DTYPES, RUN_INPUTS, export_paged_graph, speed_notes
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.directory import INVERSE_TEMPERATURES_INPUT, KV_BLOCK_SIZE, PRECISIONS
from kvasir.model.network.transformer import Transformer
from tests.kit import paged_reference
from tests.kit.random_models import make_config, make_decoder, measure_scales
from tests.model.variants import VARIANTS

# By precision: most of the mean error, in deviations of the logits.
ERRORS = {"fp16": 0.005, "bf16": 0.03, "int8": 0.03, "int4": 0.4}
# Operators that ran in bfloat16 on an H200. There are no kernels of Clip, Greater, Min and Where.
RUNS_IN_BFLOAT16 = {
    *("Add", "Cast", "Concat", "Div", "Gather", "GatherND", "Gelu", "Gemm", "LayerNormalization"),
    *("Mul", "PagedAttention", "Pow", "RMSNormalization", "Relu", "Reshape", "Sigmoid", "Split"),
    *("Sub", "Tanh", "Unsqueeze"),
}


# Enough for a second block. gpt2 has no rotary embeddings either.
ONE_LAYER = {"n_layer": 1, "layers_without_rotary": (), "max_model_len": 300}


def test_every_precision_has_a_type() -> None:
    assert tuple(DTYPES) == PRECISIONS["cuda"]
    assert set(PRECISIONS["webgpu"]) < DTYPES.keys()


def run(
    path: Path, chunks: list[tuple[list[int], int]], caches: dict[str, Any], blocks: list[list[int]]
) -> Any:
    """Logits of every token. chunks: new tokens of each sequence, and how many came before."""
    places = [past + np.arange(len(ids)) for ids, past in chunks]
    size = KV_BLOCK_SIZE
    slots = [np.array(b)[p // size] * size + p % size for p, b in zip(places, blocks, strict=True)]
    tokens = np.concatenate([ids for ids, _ in chunks])
    feeds: dict[str, Any] = {
        "input_ids": tokens.astype(np.int64),
        "position_ids": np.concatenate(places),
        "cumulative_sequence_length": np.cumsum([0, *map(len, places)]).astype(np.int32),
        "past_seqlens": np.array([past for _, past in chunks], dtype=np.int32),
        "block_table": np.array(blocks, dtype=np.int32),
        "slot_mapping": np.concatenate(slots).astype(np.int32),
        "attention_metadata": np.array([max(map(len, places)), 500, 1], dtype=np.int32),
        "logits_indices": np.arange(len(tokens)),
    }
    assert list(feeds) == list(RUN_INPUTS)
    feeds[INVERSE_TEMPERATURES_INPUT] = np.ones((len(tokens), 1), dtype=np.float32)
    graph = paged_reference.load(path)
    feeds = {name: value for name, value in feeds.items() if name in graph.input_names}
    outputs: Any = graph.run(["logits"], feeds | caches)
    return outputs[0]


def operators_of_16_bits(path: Path) -> set[str]:
    """Return the operators that read or make floats of 16 bits, of either type."""
    return {
        node.op_type
        for node in onnx_ir.load(path).graph
        for value in (*node.inputs, *node.outputs)
        if value is not None
        and value.dtype in (onnx_ir.DataType.BFLOAT16, onnx_ir.DataType.FLOAT16)
    }


def make_caches(path: Path, n_blocks: int) -> dict[str, Any]:
    """Full of large numbers, in the graph's own type."""
    caches = {}
    for value in onnx_ir.load(path).graph.inputs:
        if str(value.name).startswith("past_key_values"):
            assert value.shape is not None
            assert value.dtype is not None
            shape = (n_blocks, *(int(str(size)) for size in value.shape[1:]))
            caches[str(value.name)] = np.full(shape, 100, dtype=value.dtype.numpy())
    return caches


def error(decoder: Transformer, path: Path, caches: dict[str, Any]) -> float:
    """Return the mean error of the graph's logits, in deviations of PyTorch's.

    Of a prompt beside a chunk, then a decode beside the rest, in blocks that are not in order.
    """
    generator, blocks = np.random.default_rng(1), [[1, 0], [3, 2]]
    short, long = (
        generator.integers(decoder.config.vocab_size, size=n).tolist() for n in (12, 262)
    )
    first = run(path, [(short[:11], 0), (long[:255], 0)], caches, blocks)
    second = run(path, [(short[11:], 11), (long[255:], 255)], caches, blocks)
    assert first.dtype == second.dtype == np.float32
    found = np.concatenate((first[:11], second[:1], first[11:], second[1:]))
    with torch.inference_mode():
        expected = [decoder(torch.tensor([ids]))[0].numpy() for ids in (short, long)]
    pairs = zip(np.split(found, [12]), expected, strict=True)
    return max(float(np.abs(a - b).mean() / b.std()) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp16") for name in ("qwen", "qwen3", "gemma", "persimmon")),
        *(("gpt2", "bf16"), ("olmo2", "bf16"), ("phi", "int8"), ("gpt2", "int4")),
    ],
)
def test_the_graph_computes_what_pytorch_does(name: str, precision: str, tmp_path: Path) -> None:
    """CUDA has a kernel of every operator. Nodes are the same in both types of 16 bits."""
    decoder = make_decoder(make_config(**VARIANTS[name] | ONE_LAYER))
    path = tmp_path / "model.onnx"
    export_paged_graph(decoder.config, decoder.state_dict(), path, precision)
    if precision in ("bf16", "fp16"):
        assert operators_of_16_bits(path) <= RUNS_IN_BFLOAT16
    assert 0.0 < error(decoder, path, make_caches(path, 4)) < ERRORS[precision]


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_the_graph_for_webgpu_has_no_slots_and_no_bfloat16(precision: str, tmp_path: Path) -> None:
    """Its PagedAttention takes no slots, which follow from the table; the results are the same."""
    decoder = make_decoder(make_config(max_model_len=300))
    path = tmp_path / "model.onnx"
    export_paged_graph(decoder.config, decoder.state_dict(), path, precision, device="webgpu")
    graph = onnx_ir.load(path).graph
    assert [value.name for value in graph.inputs][: len(RUN_INPUTS) - 1] == [
        name for name in RUN_INPUTS if name != "slot_mapping"
    ]
    caches = make_caches(path, 4)
    assert {cache.dtype for cache in caches.values()} == {np.dtype(np.float16)}
    # Its plugin has no Reshape of int64, and nothing may run on the CPU.
    assert "Reshape" not in {node.op_type for node in graph}
    assert 0.0 < error(decoder, path, caches) < ERRORS[precision]


@pytest.mark.parametrize(
    ("changes", "kv_cache"), [({}, "fp8"), ({"qk_norm": True, "qkv_bias": True}, "int8")]
)
def test_keys_and_values_of_8_bits_stay_near(
    kv_cache: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Scales are in the weights: nothing overflows, and what is rounded is far from lost."""
    decoder = make_decoder(make_config(**changes, max_model_len=300))
    path, scales = tmp_path / "model.onnx", measure_scales(decoder)
    export_paged_graph(decoder.config, decoder.state_dict(), path, "fp16", kv_cache, scales)
    caches = make_caches(path, 4)
    assert {cache.dtype.itemsize for cache in caches.values()} == {1}
    assert 0.001 < error(decoder, path, caches) < {"int8": 0.03, "fp8": 0.1}[kv_cache]
    written = caches["past_key_values.0.key"][3].astype(np.float32)  # the first block of the longer
    assert 60 < np.abs(written).max() < 500


def test_head_norms_that_all_heads_share_go_into_the_operator(tmp_path: Path) -> None:
    """As published ones do, not as those of variants. The graph computes what PyTorch does."""
    decoder = make_decoder(make_config(qk_norm=True, max_model_len=300))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "query_norm" in name or "key_norm" in name:
                parameter.copy_(parameter[:1].expand_as(parameter).clone())
    path = tmp_path / "model.onnx"
    export_paged_graph(decoder.config, decoder.state_dict(), path, "fp16")
    operators = [node.op_type for node in onnx_ir.load(path).graph]
    assert operators.count("RMSNormalization") == 5
    assert error(decoder, path, make_caches(path, 4)) < ERRORS["fp16"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bloom", "alibi positions bias scores"),
        ("relative", "relative positions bias scores"),
        ("qwen3 mixture", "n_experts 5 is exported for the CPU only"),
    ],
)
def test_what_the_operator_does_not_compute_is_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_paged_graph(make_config(**VARIANTS[name]), {}, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_large_heads_have_a_note() -> None:
    assert not speed_notes(make_config(head_dim=256))
    assert "head_dim 320" in speed_notes(make_config(head_dim=320))[0]

"""Model FLOPs utilisation: the formula against PyTorch's count of products, and the peak."""

from __future__ import annotations

import time
from itertools import accumulate, chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kvasir.model.network.transformer import Transformer
from kvasir.model.training import flops
from kvasir.model.training.flops import flops_per_token, flops_per_translation, peak_flops
from tests.kit.random_models import make_config, make_decoder

CONTEXT = 32
CPU = torch.device("cpu")


def counted(decoder: Transformer, *inputs: Tensor, **more: Tensor) -> int:
    """Return what PyTorch counts of a run forwards."""
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.inference_mode(),
    ):
        decoder(*inputs, **more)
    n: int = counter.get_total_flops()
    return n


def n_in_vectors(module: nn.Module) -> int:
    """Return the number of parameters that are in no product."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": False, "qkv_bias": True, "d_ff": 80},
        {"position": "learned", "norm": "layernorm", "feed_forward": "gelu", "n_kv_head": 4},
        {"d_model": 64, "d_expert": 32, "dense_layers": (1,)}
        | {"n_experts": 6, "n_experts_per_token": 2},
    ],
)
def test_a_token_costs_three_times_what_pytorch_counts_forwards(changes: dict[str, Any]) -> None:
    """Embedding tables counted as if they were multiplied would flatter small models most."""
    decoder = make_decoder(make_config(**changes))
    products = 3 * counted(decoder, torch.zeros(1, CONTEXT, dtype=torch.int64)) // CONTEXT
    assert flops_per_token(decoder, CONTEXT) == products + 6 * n_in_vectors(decoder)


@pytest.mark.parametrize("shared", [True, False])
def test_a_translation_costs_three_times_what_pytorch_counts_forwards(shared: bool) -> None:
    """Counting every token in both halves would double what was computed."""
    encoder = make_config(causal=False, n_layer=3)
    config = make_config(encoder=encoder, target_prefix=(0,), shared_embedding=shared)
    decoder = make_decoder(config)
    sources, lengths = torch.zeros(1, 24, dtype=torch.int64), torch.tensor([24])
    products = counted(decoder, sources[:, :10], lengths, source_ids=sources)
    assert decoder.encoder is not None
    of_encoder = n_in_vectors(decoder.encoder)
    vectors = 24 * of_encoder + 10 * (n_in_vectors(decoder) - of_encoder)
    assert flops_per_translation(decoder, 24, 10) == 3 * products + 6 * vectors


def test_a_known_gpu_has_the_peak_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == 989e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40",
        "NVIDIA RTX A1000",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_a_gpu_with_a_like_name_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An L40 was held to the peak of an L4, and a slice of a GPU to that of the whole."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(flops, "_measure", lambda *_: 1.0)
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == 1.0


def test_another_device_is_measured_once() -> None:
    peak = peak_flops(CPU, torch.float32)
    assert peak > 1e6
    assert peak_flops(CPU, torch.float32) == peak


def test_the_peak_is_not_what_others_left_of_the_first_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock is a fake: the first five products are slowed by another process."""
    seconds = chain([0.05] * 5, repeat(0.01))
    clock = chain.from_iterable((now, now) for now in accumulate(seconds))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    flops._measure.cache_clear()
    assert peak_flops(CPU, torch.float32) == pytest.approx(2 * 1024**3 / 0.01)
    flops._measure.cache_clear()

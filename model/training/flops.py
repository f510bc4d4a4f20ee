"""Model FLOPs utilisation: how much of what a device could compute goes into the model (Chowdhery et al. 2022)."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import nn

from model.network.decoder import Decoder

# FLOP/s of dense bfloat16 products, by the name that CUDA gives a GPU: NVIDIA's data sheets. The whole name, because
# those that begin alike (L40, H100 NVL, a slice by MIG) have other peaks.
_PEAKS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}
_SECONDS = 0.5  # of products to measure: a few milliseconds may all fall into others' time


def flops_per_token(decoder: Decoder, context: int) -> int:
    """6 N + 12 · n_layer · n_head · head_dim · context: forward and backward pass (Chowdhery et al. 2022, appendix B).

    N is the number of parameters without embedding tables, which are looked up and not multiplied; a tied embedding
    counts, once, as the output projection that it also is. Attention counts as if it were not causal, as in the paper.
    """
    config = decoder.config
    looked_up = sum(
        table.weight.numel() for table in decoder.modules() if isinstance(table, nn.Embedding)
    )
    output = decoder.embedding.weight.numel() if config.tied_embeddings else 0
    multiplied = decoder.n_parameters - looked_up + output
    return 6 * multiplied + 12 * config.n_layer * config.n_head * config.head_dim * context


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the device: a known GPU's by its data sheet, in bfloat16; otherwise those of a large matrix product in
    this precision, measured now.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        peak = _PEAKS.get(torch.cuda.get_device_name(device))
        if peak is not None:
            return peak
    return _measure(device, dtype)


@cache
def _measure(device: torch.device, dtype: torch.dtype) -> float:
    """The fastest of many square products: what the library makes of this machine, threads included."""
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    fastest, until = float("inf"), time.perf_counter() + _SECONDS
    n_done = 0
    while (started := time.perf_counter()) < until or n_done < 2:  # the first one warms up
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest, n_done = min(fastest, time.perf_counter() - started), n_done + 1
    return 2 * size**3 / fastest

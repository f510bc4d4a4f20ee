"""Model FLOPs utilisation (MFU): the share of a device's peak that goes into the model."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import nn

from kvasir.model.network.feed_forward import ExpertLinear
from kvasir.model.network.transformer import Transformer
from kvasir.model.training.low_rank import adapter_parameters

# FLOP/s of dense bfloat16 products by CUDA's name of a GPU (NVIDIA's data sheets). The name has to
# match as a whole, because similar ones (L40, H100 NVL, a MIG slice) have other peaks.
# fmt: off
_PEAKS = {
    "NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "NVIDIA A10": 125e12, "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}
# fmt: on
_SECONDS = 0.5  # to measure products; a few milliseconds may all be slowed by other processes


def flops_per_token(decoder: Transformer, context: int, *, has_logits: bool = True) -> int:
    """Return the FLOPs of forward and backward pass (Chowdhery et al. 2022, appendix B).

    They are 6 N + 12 · layers of attention · n_head · head_dim · context. N is the number of
    parameters without embedding tables, which are looked up and not multiplied; a tied embedding
    counts once, as the output projection if there are logits. As in the paper, attention counts as
    if it were not causal. Of a mixture the experts count that a token goes through. What a
    recurrence computes beside its matrices is left out. Beside an adapter nothing else has
    gradients of its own: 2 of the 6 are of the adapter alone.
    """
    config = decoder.config
    tables = [module for module in decoder.modules() if isinstance(module, nn.Embedding)]
    looked_up = sum(table.weight.numel() for table in tables)
    output = decoder.embedding.weight.numel() if config.tied_embeddings and has_logits else 0
    of_experts = sum(
        parameter.numel()
        for module in decoder.modules()
        if isinstance(module, ExpertLinear)
        for parameter in module.parameters()
    )
    skipped = of_experts - of_experts * (config.n_experts_per_token or 0) // (config.n_experts or 1)
    multiplied = decoder.n_parameters - looked_up + output - skipped
    updates = adapter_parameters(decoder).values()
    trained = sum(update.numel() for update in updates) if updates else multiplied
    attended = config.n_attention_layer * config.n_head * config.head_dim * context
    return 4 * multiplied + 2 * trained + 12 * attended


def flops_per_translation(decoder: Transformer, n_source: int, n_target: int) -> int:
    """Return the same of a source in an encoder and its target in the decoder.

    A target's token attends to the source too, whose keys and values come from the source's tokens.
    """
    encoder = decoder.encoder
    assert encoder is not None, "a model without an encoder has no sources"
    unattended = flops_per_token(encoder, 0, has_logits=False)
    of_target = flops_per_token(decoder, n_target + n_source) - unattended
    keys_values = 6 * sum(
        parameter.numel()
        for name, parameter in decoder.blocks.named_parameters()
        if "cross_attention.key_value" in name
    )
    of_source = flops_per_token(encoder, n_source, has_logits=False)
    return n_source * (of_source + keys_values) + n_target * (of_target - keys_values)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the device's FLOP/s: the data sheet's for bfloat16 on a known GPU, else measured."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        if name in _PEAKS:
            return _PEAKS[name]
    return _measure(device, dtype)


@cache
def _measure(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of many square products, with all threads."""
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

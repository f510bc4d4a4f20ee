"""Recurrences over matrices in chunks of tokens, each by a few products of matrices.

It is for training and for what PyTorch verifies; in a graph an operator runs token after token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK = 64  # tokens; as much work inside chunks as between them for heads of 64
_FEWER = 4  # times fewer of them where decays, which have channels, are what takes memory


def run_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor,
    decay: Tensor,
    rate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what queries read [batch, sequence, heads, d_v], and the matrices after all tokens.

    A token decays a head's matrix, S = exp(decay) S, and adds its value under its key, S += k ⊗ v;
    with a `rate` a share of the difference to what is there, S += k ⊗ rate (v - k S). It then reads
    q S.

    query, key: [batch, sequence, heads, d_k]. value: [batch, sequence, heads, d_v]. past: [batch,
    heads, d_k, d_v]. decay, rate: [batch, sequence, heads]; a decay may also be of each channel of
    keys, [batch, sequence, heads, d_k]. All becomes float32 that is not float64.

    Without rates this is section 6 of "Transformers are SSMs" (Dao & Gu, 2024). With them the
    values u that are really added solve a triangular system within a chunk, (I + L) u =
    rate (v - decayed k S), with L[t, s] = rate[t] (k[t] · k[s]) decay from s to t for s < t
    ("Gated Delta Networks", Yang et al., 2024, section 3.3). Decays of channels are within that
    product of keys ("Kimi Linear", 2025, section 3).
    """
    with torch.autocast(query.device.type, enabled=False):
        sequence, by_channel = query.shape[1], decay.dim() == query.dim()
        size = min(sequence, _CHUNK // _FEWER if by_channel else _CHUNK)
        query, key, value = (_cut(part, size) for part in (query, key, value))
        decays = _cut(decay if by_channel else decay[..., None], size)
        # [..., t, s, 1 or d_k], the decay of what s added by t. Each sum is of its own tokens: a
        # difference of two sums from a chunk's start would have the error of the greater.
        ones = torch.ones(size, size, device=query.device, dtype=decays.dtype)
        later = decays[..., None, :] * ones.tril(-1)[..., None]
        between = later.cumsum(dim=-3).exp() * ones.tril()[..., None]
        columns = key.transpose(-1, -2)  # [batch, heads, chunks, d_k, size]
        faded = key[..., None, :, :] * between if by_channel else None  # as each token finds keys

        def found(x: Tensor) -> Tensor:
            """Return what x [..., t, d_k] has of each decayed key, [..., t, s]."""
            if faded is None:
                return x @ columns * between[..., 0]
            return (faded @ x[..., None])[..., 0]

        scores = found(query)
        from_start = decays.cumsum(dim=-2).exp()
        read_keys = query * from_start
        kept_keys = columns * between[..., -1, :, :].transpose(-1, -2)
        whole = from_start[..., -1:, :].transpose(-1, -2)
        known_keys = None
        if rate is not None:
            rates = _cut(rate[..., None], size)
            earlier = (rates * found(key)).tril(-1)
            both = torch.cat((value, key * from_start), dim=-1) * rates
            both = torch.linalg.solve_triangular(earlier, both, upper=False, unitriangular=True)
            value, known_keys = both.split((value.shape[-1], key.shape[-1]), dim=-1)
        matrix, reads = _wide(past), []
        for i in range(query.shape[2]):  # chunks
            known = 0.0 if known_keys is None else known_keys[:, :, i] @ matrix
            added = value[:, :, i] - known
            reads.append(scores[:, :, i] @ added + read_keys[:, :, i] @ matrix)
            matrix = whole[:, :, i] * matrix + kept_keys[:, :, i] @ added
        read = torch.cat(reads, dim=2)[:, :, :sequence]
        return read.transpose(1, 2), matrix


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _cut(x: Tensor, size: int) -> Tensor:
    """Return x [batch, sequence, heads, …] as [batch, heads, chunks, size, …], padded and wide."""
    padded = functional.pad(_wide(x), (0, 0, 0, 0, 0, -x.shape[1] % size))
    cut: Tensor = padded.transpose(1, 2).unflatten(2, (-1, size))
    return cut

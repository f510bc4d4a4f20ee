"""The decoder a layer at a time against the whole decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

from kvasir.export.verification import layers
from kvasir.export.verification.layers import LayeredDecoder
from tests.kit.random_models import make_config, make_decoder
from tests.model.variants import VARIANTS


class Counted(Mapping[str, torch.Tensor]):
    """Tensors in bfloat16, made on access, that notes the names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.read = tensors, list[str]()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.tensors[name].bfloat16()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


# One of each kind of head, positions and state: test_parity.py verifies all variants by a layer at
# a time, and generates with the whole decoder.
CUT = ["phi", "gemma", "bloom", "relative", "qwen3 mixture", "deepseek", "falcon h1", "jamba"]


@pytest.mark.parametrize("name", CUT)
def test_a_layer_at_a_time_computes_what_the_decoder_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths, in groups, with the head in slices of its vocabulary."""
    config = make_config(**VARIANTS[name])
    decoder = make_decoder(config)
    monkeypatch.setattr(layers, "_TOKENS", 60)
    monkeypatch.setattr(layers, "_WEIGHTS", 70 * config.d_model)
    generator = np.random.default_rng(0)
    rows = [generator.integers(config.vocab_size, size=n) for n in (20, 20, 20, 20, 1, 96, 20)]
    layered = LayeredDecoder(config, decoder.state_dict())
    for row, hidden in zip(rows, layered.run(rows), strict=True):
        with torch.inference_mode():
            expected = decoder(torch.from_numpy(row)[None])[0]
        assert torch.allclose(layered.logits(hidden), expected, rtol=1e-5, atol=1e-5)


def test_each_tensor_is_read_once_in_the_order_of_the_layers() -> None:
    config = make_config(n_layer=3, tied_embeddings=False)
    decoder = make_decoder(config)
    weights = Counted(decoder.state_dict())
    decoder.load_state_dict(dict(weights))
    weights.read.clear()
    layered = LayeredDecoder(config, weights)
    hidden = layered.run([np.arange(5), np.arange(5), np.arange(7)])
    blocks = [name for name in weights.read if name.startswith("blocks.")]
    assert blocks == [name for name in weights if name.startswith("blocks.")]
    logits = torch.cat([layered.logits(rows) for rows in hidden])
    assert weights.read[-1] == "head.weight"
    assert len(set(weights.read)) == len(weights.read)
    with torch.inference_mode():
        expected = decoder(torch.arange(5)[None])[0]
    assert torch.allclose(logits[:5], expected, rtol=1e-5, atol=1e-5)

"""Factors move from activations into weights, and the function stays as it is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvasir.export.rounding.places import Place, places
from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import Mamba, Mamba2
from kvasir.model.network.feed_forward import ExpertLinear
from kvasir.model.network.skeleton import parameter_shapes
from kvasir.model.network.transformer import Transformer
from tests.kit.encoders import BERT, MODERN, MPNET
from tests.kit.fake_seq2seq import small_config
from tests.kit.random_models import make_config, make_decoder
from tests.model.variants import VARIANTS


def with_last_norms(config: TransformerConfig) -> TransformerConfig:
    """Return an encoder-decoder with norms after the sublayers, and a head of its own."""
    assert config.encoder is not None
    encoder = replace(config.encoder, norm_placement="post")
    return replace(config, norm_placement="post", tied_embeddings=False, encoder=encoder)


DECODERS = {name: make_config(**changes) for name, changes in VARIANTS.items()}
ENCODERS = {"bert": BERT, "mpnet": MPNET, "modernbert": MODERN}
MODELS = {**DECODERS, **{name: make_config(**shape) for name, shape in ENCODERS.items()}}
MODELS["encoder-decoder"] = small_config()
MODELS["bloom, untied"] = replace(MODELS["bloom"], tied_embeddings=False)
MODELS["bart"] = with_last_norms(small_config())


def outputs(model: Transformer, seed: int = 1, n_rows: int = 2) -> Tensor:
    """Return what a model makes of random tokens."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (n_rows, 18), generator=generator)
    lengths = torch.tensor([18, 11]).repeat(n_rows // 2)
    with torch.inference_mode():
        source = model.read(ids[:, :12], lengths.clamp(max=12)) if model.encoder else None
        if config.pooling is not None:
            return model.encode(ids, lengths)
        logits: Tensor = model(ids, source=source)
        return logits


def random_factors(place: Place, i: int) -> np.ndarray[Any, Any]:
    """Powers of four: a product with them, and with their roots, is exact."""
    exponents = np.random.default_rng(i).integers(-3, 4, size=place.shape) * 2
    return np.ldexp(np.ones(place.shape, dtype=np.float32), exponents)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_answers_stay_what_they_are(config: TransformerConfig) -> None:
    model, shapes = make_decoder(config).double(), parameter_shapes(config)
    expected, read = outputs(model), list[str]()
    parameters = dict(model.named_parameters())
    for i, place in enumerate(places(config)):
        scaled = place.multipliers(random_factors(place, i), shapes)
        assert set(scaled) == {*place.readers, *(maker.name for maker in place.makers)}
        with torch.no_grad():
            for name, multiplier in scaled.items():
                assert not (multiplier == 1.0).all()
                parameters[name].mul_(torch.from_numpy(multiplier))
        read += place.readers
    torch.testing.assert_close(outputs(model), expected, rtol=1e-9, atol=1e-11)
    assert len(read) == len(set(read))
    assert set(read) == read_after_a_norm_or_a_product(model)


def read_after_a_norm_or_a_product(model: Transformer) -> set[str]:
    """Return the matrices whose inputs a norm makes for them alone, or a product linearly."""
    matrices = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | ExpertLinear) and not name.startswith("pooler")
    }
    alone = set[str]()
    for name in matrices:
        config = model.config
        if name.startswith("encoder."):
            assert config.encoder is not None
            config = config.encoder
        block = re.search(r"blocks\.(\d+)", name)
        is_normed = block and config.placement_of(int(block[1])) in ("pre", "both")
        match name.split("."):
            case [*_, "recurrence", part, _] if isinstance(config.recurrence, Mamba):
                alone |= {name} if part in ("input", "step_up") else set()
            case [*_, "recurrence", "output", _] if isinstance(config.recurrence, Mamba2):
                alone |= {name} if config.recurrence.normed else set()
            case [*_, "attention" | "cross_attention", "output", _]:
                alone.add(name)
            case [*_, "key_value", _] | ["norm", "1", "linear", _] | ["head", _]:
                alone.add(name)
            case [*_, "down" | "expert_down", _]:
                gated = "glu" in config.feed_forward and config.feed_forward != "swiglu_clamped"
                alone |= {name} if gated or config.feed_forward in ("relu", "relu2") else set()
            case [*_, "blocks", layer, "attention", "qkv", _] if is_normed:
                alone |= {name} if int(layer) not in config.layers_without_attention_norm else set()
            case _ if is_normed:
                alone.add(name)
    return alone

"""Rounded graphs lose as much with outliers as without, since these move into the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvasir.export.graphs.decoder import export_graph
from kvasir.export.graphs.encoder import export_encoder_graph
from kvasir.export.graphs.source import export_source_graph
from kvasir.export.rounding.activations import Activations
from kvasir.export.rounding.formulas import BLOCK, quantize_blocks, restore_blocks
from kvasir.export.rounding.kv_cache import KVScales, scale_kv_channels
from kvasir.export.rounding.places import Place
from kvasir.export.rounding.smoothing import Change, choose_factors, roundings, smooth
from kvasir.export.rounding.weights import Weights
from kvasir.export.verification.pair_plan import SamplePairs
from kvasir.export.verification.segments import SegmentedGraph
from kvasir.export.verification.vectors import observe_vectors, verify_vectors
from kvasir.export.verification.verify import Verifier
from kvasir.kernels.library import FILE
from kvasir.loadtest.random_model import dummy_tokenizer
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import ENCODER_GRAPH_FILE, GRAPH_FILE
from kvasir.model.network.feed_forward import ExpertLinear
from kvasir.model.network.transformer import Transformer
from tests.export.test_places import MODELS, outputs
from tests.kit.encoders import BERT, LAST_TOKEN, MODERN
from tests.kit.outliers import make_outliers
from tests.kit.random_models import SHAPE, make_config, make_decoder
from tests.kit.short_samples import shorten_samples

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)


def divergence(network: Transformer, folder: Path, precision: str = "int8") -> float:
    """Export a decoder, smoothed, and return its mean KL from PyTorch."""
    folder.mkdir()
    config, weights, sample = network.config, network.state_dict(), None
    if config.encoder is not None:
        ids = np.random.default_rng(0).integers(config.vocab_size, size=(40, 2, 12))
        sample = SamplePairs("random tokens", [(source, target) for source, target in ids])
    activations, scales = Activations(), KVScales(config)
    verifier = Verifier(config, weights, sample)
    verifier.compute(observe=scales.observe, activations=activations)
    keeps_values = config.encoder is None
    smoothed = smooth(config, weights, activations, "cpu", precision, keeps_values=keeps_values)
    export_graph(config, smoothed, folder / GRAPH_FILE, precision, scales.steps())
    if config.encoder is not None:
        export_source_graph(config, smoothed, folder / ENCODER_GRAPH_FILE, precision)
    figures = verifier.verify(SegmentedGraph(folder / GRAPH_FILE, config).logits)
    assert figures.mean_kl is not None
    return figures.mean_kl


def with_outliers(config: TransformerConfig) -> Transformer:
    network = make_decoder(config)
    make_outliers(network, config)
    return network


@contextmanager
def rounded_products(network: Transformer, precision: str) -> Iterator[None]:
    """Round what every product reads and its weights, in PyTorch."""
    with ExitStack() as hooks, torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear | ExpertLinear) and "router" not in name:
                of_inputs, of_weights = roundings(
                    "cpu", precision, f"{name}.weight", module.weight.shape[-1]
                )[0]
                rows = module.weight.flatten(0, -2)
                module.weight.copy_(of_weights(rows).view_as(module.weight))

                def round_inputs(
                    _: nn.Module, inputs: tuple[Tensor, ...], change: Change = of_inputs
                ) -> tuple[Tensor, ...]:
                    x, *others = inputs
                    return (change(x.flatten(0, -2)).view_as(x), *others)

                hooks.enter_context(module.register_forward_pre_hook(round_inputs))
        yield


def loss(network: Transformer, precision: str, *, smooths: bool = True) -> float:
    """Return the mean square of a token's errors over its outputs' variance: of tokens the median.

    Where a router chooses another expert, one token's error says nothing of rounding.
    """
    expected, activations = outputs(network), Activations()

    def note_head(_: nn.Module, _inputs: object, normed: Tensor) -> None:
        activations.add("head.weight", normed)

    with activations.watch(network, ""), network.norm.register_forward_hook(note_head):
        outputs(network, seed=2, n_rows=40)
    weights = {name: weight.clone() for name, weight in network.state_dict().items()}
    if smooths:
        smoothed = smooth(network.config, weights, activations, "cpu", precision)
        network.load_state_dict({name: smoothed[name] for name in weights})
    with rounded_products(network, precision):
        errors = outputs(network) - expected
    return (errors.square().mean(dim=-1) / expected.var(dim=-1)).median().item()


@pytest.mark.parametrize(
    ("name", "precision"), list(zip(MODELS, cycle(["int8", "int4"]), strict=False))
)
def test_outliers_cost_at_most_half_as_much_again(name: str, precision: str) -> None:
    """With products rounded in PyTorch, for every layout; they take turns in both precisions."""
    config, seed = MODELS[name], int(precision == "int4")
    plain, outliers = make_decoder(config, seed), make_decoder(config, seed)
    make_outliers(outliers, config, seed)
    assert loss(outliers, precision) <= 1.5 * loss(plain, precision)


@pytest.mark.parametrize(
    ("name", "precision"), [("llama", "int8"), ("gpt2", "int4"), ("qwen3", "int4"), ("phi", "int8")]
)
def test_a_token_with_massive_activations_does_not_spoil_the_others(
    name: str, precision: str
) -> None:
    """As first tokens of published models have: they say nothing of the channels' other tokens."""

    def massive() -> Transformer:
        network = make_decoder(replace(MODELS[name], tied_embeddings=False))
        with torch.no_grad():
            network.embedding.weight[torch.arange(5), 3] = 1000.0
        return network

    assert loss(massive(), precision) <= 1.2 * loss(massive(), precision, smooths=False)


@pytest.mark.parametrize(("name", "precision"), [
    ("gemma", "int4"),
    ("qwen3 mixture", "int4"),
    ("encoder-decoder", "int8"),
])  # fmt: skip
def test_outliers_cost_a_graph_at_most_half_as_much_again(
    name: str, precision: str, tmp_path: Path
) -> None:
    config = MODELS[name]
    plain = divergence(make_decoder(config), tmp_path / "plain", precision)
    assert divergence(with_outliers(config), tmp_path / "outliers", precision) <= 1.5 * plain


def cost_of_vectors(
    config: TransformerConfig, weights: Mapping[str, Tensor], folder: Path
) -> list[float]:
    """Return what int8 costs, calibrated: by stock operators, and by our own where they are."""
    activations, tokenizer = Activations(), dummy_tokenizer(config.vocab_size)
    observe_vectors(config, weights, tokenizer, activations)
    smoothed = smooth(config, weights, activations, "cpu", "int8")
    export_encoder_graph(config, smoothed, folder / GRAPH_FILE, "int8")
    figures = verify_vectors(config, weights, folder / GRAPH_FILE, tokenizer, "int8")
    return [1.0 - (of.mean_cosine or 0.0) for of in (figures, figures.own) if of is not None]


def balance_wrongly(config: TransformerConfig, weights: dict[str, Tensor]) -> None:
    """Make a pair of channels large in queries and small in keys: the same scores."""
    channels, factor = [3, 3 + SHAPE["head_dim"] // 2], 64.0
    for layer in range(config.n_layer):
        attention, n_head = f"blocks.{layer}.attention", config.n_head
        if config.qk_norm:
            weights[f"{attention}.query_norm.weight"][:, channels] *= factor
            weights[f"{attention}.key_norm.weight"][:, channels] /= factor
            continue
        for kind in ("weight", "bias")[: 1 + config.qkv_bias]:
            heads = weights[f"{attention}.qkv.{kind}"].unflatten(0, (-1, config.head_dim))
            heads[:n_head, channels] *= factor
            heads[n_head : n_head + config.n_kv_head, channels] /= factor


@pytest.mark.parametrize("shape", [BERT, MODERN, LAST_TOKEN], ids=["bert", "modernbert", "qwen3"])
def test_outliers_cost_vectors_at_most_half_as_much_again(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    """In what matrices read, and in queries and keys, both of which our own operators round."""
    config = make_config(**shape)
    plain = cost_of_vectors(config, make_decoder(config).state_dict(), tmp_path)
    assert len(plain) == 1 + FILE.exists()
    outliers = with_outliers(config).state_dict()
    balance_wrongly(config, outliers)
    for cost, least in zip(cost_of_vectors(config, outliers, tmp_path), plain, strict=True):
        assert cost <= 1.5 * least


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma", "qwen3 mixture"])
def test_inputs_are_divided_as_columns_are_multiplied(name: str, tmp_path: Path) -> None:
    """By factors, and by the scales of keys and values: products are what they were, but scaled."""
    config, network = MODELS[name], with_outliers(MODELS[name])
    before, activations, scales = network.state_dict(), Activations(tmp_path), KVScales(config)
    Verifier(config, before).compute(observe=scales.observe, activations=activations)
    smoothed = smooth(config, before, activations, "cpu", "int4", keeps_values=True)
    assert activations.report["smoothed"]
    weights = Weights(smoothed, inputs=activations.inputs)
    scale_kv_channels(weights, config, scales.steps())
    products = [module for module in before if weights.inputs(module) is not None]
    assert len(products) >= 4 * config.n_layer
    for product in products:
        x, raw = weights.inputs(product), Activations.inputs(undivided(activations), product)
        assert x is not None
        assert raw is not None
        n_out, n_in = before[product].shape[-2:]
        matrices = (m.view(-1, n_out, n_in) for m in (weights.read(product), before[product]))
        for i, (after, prior) in enumerate(zip(*matrices, strict=True)):
            own = activations.experts(product) == i
            made, expected = x[own] @ after.T, raw[own] @ prior.T
            of_rows = (made * expected).sum(dim=0) / expected.square().sum(dim=0)
            torch.testing.assert_close(made, expected * of_rows, rtol=1e-3, atol=1e-4)


def undivided(activations: Activations) -> Activations:
    plain = copy(activations)
    plain.columns = {}
    return plain


def place_of(matrix: Tensor, x: Tensor) -> tuple[Place, Mapping[str, Tensor], Activations]:
    place = Place((), ("reader.weight",), matrix.shape[1])
    activations = Activations()
    activations.add("reader.weight", x)
    return place, {"reader.weight": matrix}, activations


def test_a_matrix_that_was_rounded_before_stays_as_it_is() -> None:
    """Blocks of 4 bits are found again, which no factors could improve."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 2 * BLOCK, generator=generator)
    rounded = restore_blocks(*quantize_blocks(matrix))
    x = torch.randn(640, 2 * BLOCK, generator=generator) * torch.linspace(0.1, 9.0, 2 * BLOCK)
    assert choose_factors(*place_of(rounded, x), "cuda", "int4") is None
    assert choose_factors(*place_of(matrix, x), "cuda", "int4") is not None


def test_silent_channels_stay_as_they_are() -> None:
    x = torch.randn(640, 32, generator=torch.Generator().manual_seed(0))
    x[:, 3], x[:, 5], x[:, 7] = 0.0, 40.0, 1e-9
    matrix = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    matrix[:, 9] = 0.0
    factors = choose_factors(*place_of(matrix, x), "cpu", "int8")
    assert factors is not None
    assert np.isfinite(factors).all()
    assert factors[[3, 7, 9]].tolist() == [1.0, 1.0, 1.0]
    assert factors[5] > 2.0


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
def test_activations_that_are_not_finite_are_refused(value: float) -> None:
    """Wherever they are: here before a product that no factors could be moved to."""
    network = make_decoder(MODELS["gpt2"])
    with torch.no_grad():
        network.get_parameter("blocks.0.feed_forward.up.bias")[0] = value
    activations = Activations()
    with activations.watch(network, ""):
        outputs(network)
    with pytest.raises(ValueError, match=r"what blocks\.0\.feed_forward\.down\.weight reads"):
        smooth(network.config, network.state_dict(), activations, "cpu", "int8")

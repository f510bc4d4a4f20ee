"""What verification says of graphs that are nearly right: docs/checkpoints.md lists it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from kvasir.export.graphs.decoder import export_graph
from kvasir.export.rounding.activations import Activations
from kvasir.export.rounding.kv_cache import KVScales
from kvasir.export.rounding.smoothing import smooth
from kvasir.export.verification.paged_session import PagedSession
from kvasir.export.verification.segments import SegmentedGraph
from kvasir.export.verification.verify import MAX_KL, VerificationError, Verifier, check
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import GRAPH_FILE
from kvasir.model.records import LayerFigures, Verification
from tests.export.test_places import MODELS
from tests.kit.outliers import make_outliers
from tests.kit.random_models import make_decoder

Weights = dict[str, Tensor]
Damage = Callable[[Weights, Weights], None]


def scale_a_layer(weights: Weights, _: Weights) -> None:
    weights["blocks.1.feed_forward.down.weight"] *= 1.01


def flip_a_channel(weights: Weights, _: Weights) -> None:
    weights["blocks.1.attention.output.weight"][:, 3] *= -1.0


def flip_an_output(weights: Weights, _: Weights) -> None:
    weights["blocks.1.feed_forward.up.weight"][3] *= -1.0


def forget_a_factor(weights: Weights, unsmoothed: Weights) -> None:
    """What a matrix reads is as large as before, and its columns are multiplied."""
    weights["blocks.1.attention_norm.weight"] = unsmoothed["blocks.1.attention_norm.weight"]


def swap_experts(weights: Weights, _: Weights) -> None:
    for name in ("expert_up", "expert_down"):
        matrices = weights[f"blocks.1.feed_forward.{name}.weight"]
        matrices[[0, 1]] = matrices[[1, 0]]


def measure(
    config: TransformerConfig, folder: Path, precision: str, damage: Damage | None = None
) -> tuple[list[Verification], list[LayerFigures]]:
    """Return figures of a graph of damaged weights, with outliers, of both kinds of operators."""
    folder.mkdir()
    network = make_decoder(config)
    make_outliers(network, config)
    right = network.state_dict()
    activations, scales, verifier = Activations(), KVScales(config), Verifier(config, right)
    verifier.compute(observe=scales.observe, activations=activations)
    smoothed: Mapping[str, Tensor] = right
    if precision != "fp32":
        smoothed = smooth(config, right, activations, "cpu", precision, keeps_values=True)
    damaged = {name: weight.clone() for name, weight in smoothed.items()}
    if damage is not None:
        damage(damaged, right)
    path = folder / GRAPH_FILE
    export_graph(config, damaged, path, precision, scales.steps())
    graph, packed = SegmentedGraph(path, config), None
    if precision != "fp32":
        packed = PagedSession.find(path, config)
    figures = [verifier.verify(of.logits) for of in (graph, packed) if of is not None]
    return figures, verifier.by_layer(graph) if config.n_experts is None else []


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[LayerFigures]:
    figures, layers = measure(MODELS["llama"], tmp_path_factory.mktemp("right") / "int8", "int8")
    assert all((of_operators.mean_kl or 1.0) < MAX_KL["int8"] for of_operators in figures)
    return layers


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("llama", scale_a_layer),
        ("llama", flip_a_channel),
        ("llama", flip_an_output),
        ("qwen3 mixture", swap_experts),
    ],
)
def test_an_fp32_graph_is_refused(name: str, damage: Damage, tmp_path: Path) -> None:
    (figures,), _ = measure(MODELS[name], tmp_path / "fp32", "fp32", damage)
    with pytest.raises(VerificationError, match="logits differ from PyTorch's"):
        check(figures, "fp32")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_missing_factor_is_refused(precision: str, tmp_path: Path) -> None:
    figures, _ = measure(MODELS["llama"], tmp_path / precision, precision, forget_a_factor)
    for of_operators in figures:
        with pytest.raises(VerificationError, match="next tokens diverge"):
            check(of_operators, precision)


@pytest.mark.parametrize("damage", [scale_a_layer, flip_a_channel, flip_an_output])
def test_int8_loses_more_where_a_layer_is_wrong(
    damage: Damage, right: list[LayerFigures], tmp_path: Path
) -> None:
    """Next tokens may hardly change, so the graph is served; the layer's own figures tell."""
    _, layers = measure(MODELS["llama"], tmp_path / "int8", "int8", damage)
    *others, wrong = layers
    assert others == right[:-1]
    assert wrong.mean_kl > right[-1].mean_kl
    if damage is scale_a_layer:
        assert wrong.gain - right[-1].gain == pytest.approx(0.0036, rel=0.1)
    else:
        assert wrong.error > 5 * right[-1].error

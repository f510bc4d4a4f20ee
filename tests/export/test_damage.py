"""What verification says of graphs that are nearly right: docs/checkpoints.md lists it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
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
from kvasir.model.directory import GRAPH_FILE
from kvasir.model.records import Verification
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


class Model:
    """A model with outliers that PyTorch has computed once, whose graphs may then be damaged."""

    def __init__(self, name: str, precision: str) -> None:
        self.config, self.precision = MODELS[name], precision
        network = make_decoder(self.config)
        make_outliers(network, self.config)
        self.right = network.state_dict()
        activations, scales = Activations(), KVScales(self.config)
        self.verifier = Verifier(self.config, self.right)
        self.verifier.compute(observe=scales.observe, activations=activations)
        self.smoothed: Mapping[str, Tensor] = self.right
        if precision != "fp32":
            self.smoothed = smooth(
                self.config, self.right, activations, "cpu", precision, keeps_values=True
            )
        self.scales = scales.steps()

    def export(self, folder: Path, damage: Damage | None = None) -> SegmentedGraph:
        """Export a graph of damaged weights."""
        folder.mkdir(exist_ok=True)
        damaged = {name: weight.clone() for name, weight in self.smoothed.items()}
        if damage is not None:
            damage(damaged, self.right)
        export_graph(self.config, damaged, folder / GRAPH_FILE, self.precision, self.scales)
        return SegmentedGraph(folder / GRAPH_FILE, self.config)

    def figures(self, graph: SegmentedGraph, folder: Path) -> Iterator[Verification]:
        """Yield what verification says of both kinds of operators."""
        packed = None
        if self.precision != "fp32":
            packed = PagedSession.find(folder / GRAPH_FILE, self.config)
        for of_operators in (graph, packed):
            if of_operators is not None:
                yield self.verifier.verify(of_operators.logits)


model_of = cache(Model)


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
    model = model_of(name, "fp32")
    (figures,) = model.figures(model.export(tmp_path, damage), tmp_path)
    with pytest.raises(VerificationError, match="logits differ from PyTorch's"):
        check(figures, "fp32")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_missing_factor_is_refused(precision: str, tmp_path: Path) -> None:
    model = model_of("llama", precision)
    for of_operators in model.figures(model.export(tmp_path, forget_a_factor), tmp_path):
        with pytest.raises(VerificationError, match="next tokens diverge"):
            check(of_operators, precision)


def test_int8_loses_more_where_a_layer_is_wrong(tmp_path: Path) -> None:
    """Next tokens may hardly change, so the graph is served; the layer's own figures tell."""
    model = model_of("llama", "int8")
    graph = model.export(tmp_path)
    for of_operators in model.figures(graph, tmp_path):
        assert (of_operators.mean_kl or 1.0) < MAX_KL["int8"]
    right = model.verifier.by_layer(graph)
    for damage in (scale_a_layer, flip_a_channel, flip_an_output):
        *others, wrong = model.verifier.by_layer(model.export(tmp_path / damage.__name__, damage))
        assert others == right[:-1]
        assert wrong.mean_kl > right[-1].mean_kl
        if damage is scale_a_layer:
            assert wrong.gain - right[-1].gain == pytest.approx(0.0036, rel=0.1)
        else:
            assert wrong.error > 5 * right[-1].error

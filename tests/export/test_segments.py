"""The graph a layer at a time against the graph in one session."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

from kvasir.export.evaluation import measure
from kvasir.export.verification.own_operators import open_own
from kvasir.export.verification.plan import SampleText
from kvasir.export.verification.segments import Case, SegmentedGraph, Step, open_stock
from kvasir.export.verification.verify import Verifier
from kvasir.kernels.library import FILE, Library
from kvasir.loadtest.random_model import dummy_tokenizer
from kvasir.model.checkpoint import Checkpoint
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.model.platform.machine import usable_cpus
from kvasir.server.engine.session import open_session
from tests.kernels.graphs import needs_library
from tests.kit.random_models import RandomModel
from tests.kit.whole_graph import GraphSession


def make_cases(vocab_size: int, longest: int) -> list[Case]:
    """Whole prompts, odd chunks, ragged rows, decoding, and runs that want no logits."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=(3, longest))
    whole = Case(tokens[:1, :37], [Step(37, [37], range(37))])
    odd = Case(tokens[:1, :37], [Step(12, [12], [5]), Step(2, [14]), Step(23, [37], [22])])
    ragged = Case(
        tokens[:, :38],
        [
            Step(37, [37, 18, 3], [*range(37), *range(37, 55), 74, 75, 76]),
            Step(1, [38, 19, 4], range(3), decode=True),
            Step(1, [38, 20, 5], [2], decode=True),
        ],
    )
    steps = [Step(1, [n] * 3, range(3), decode=True) for n in range(longest - 4, longest + 1)]
    full = Case(tokens, [Step(longest - 5, [longest - 5] * 3), *steps])
    return [whole, odd, Case(tokens[:1, :1], [Step(1, [1], [0])]), ragged, full]


def check_segments(model: RandomModel, library: Library | None = None) -> None:
    """Would catch a cut that runs another computation, or keeps another step's values."""
    cases = make_cases(model.config.vocab_size, model.config.max_model_len)
    opens = partial(open_session, threads=usable_cpus(), library=library)
    whole = GraphSession(model.graph, model.config, opens)
    opens_part = open_stock if library is None else partial(open_own, library)
    segmented = SegmentedGraph(model.graph, model.config, opens_part)
    assert len(segmented._segments) == model.config.n_layer + 2
    steps = [step for case in cases for step in case.steps]
    expected = [logits for case in cases for logits in whole.run_case(case)]
    for step, logits, wanted in zip(steps, segmented.logits(cases), expected, strict=True):
        assert logits.shape == (len(step.wanted), model.config.vocab_size)
        if library is None:
            assert np.array_equal(logits, wanted)
        else:  # sums are in another order where layers are cut
            np.testing.assert_allclose(logits, wanted, atol=0.05)


@pytest.mark.parametrize(
    "name", ["model", "int4_model", "int4_mixture_model", "windowed_model", "biased_model"]
)
def test_segments_compute_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    check_segments(request.getfixturevalue(f"random_{name}"))


@needs_library
@pytest.mark.parametrize("name", ["int8_model", "int4_mixture_model"])
def test_segments_compute_the_same_by_our_own_operators(
    name: str, request: pytest.FixtureRequest
) -> None:
    check_segments(request.getfixturevalue(f"random_{name}"), Library(FILE).resolved())


@needs_library
def test_what_serves_recurrent_layers_is_measured(random_delta_model: RandomModel) -> None:
    """Their rows are in no blocks, and the products are by our own operators."""
    config, graph = random_delta_model.config, random_delta_model.graph
    weights, tokenizer = random_delta_model.decoder.state_dict(), dummy_tokenizer(config.vocab_size)
    token_ids = np.random.default_rng(0).integers(config.vocab_size, size=4000)
    verifier = Verifier(config, weights, SampleText("random", token_ids))
    checkpoint = Checkpoint(graph, config, weights, tokenizer, {})
    figures, _ = measure(checkpoint, verifier, graph, "cpu", "int8")
    assert figures.own is not None
    assert figures.own.mean_kl != figures.mean_kl
    assert figures.own.mean_kl == pytest.approx(figures.mean_kl, rel=0.5)


def test_a_segment_opens_its_own_weights_only(
    random_int4_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that only nodes inside branches read."""
    opened: list[set[str]] = []

    def open_session(content: bytes, *args: Any, **options: Any) -> onnxruntime.InferenceSession:
        opened.append({of.name for of in onnx.load_from_string(content).graph.initializer})
        return make_session(content, *args, **options)

    make_session = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", open_session)
    config = random_int4_model.config
    cases = [Case(np.array([[5, 6, 7]]), [Step(3, [3], [2])])]
    list(SegmentedGraph(random_int4_model.graph, config).logits(cases))
    of_layers = [{name for name in names if "blocks." in name} for names in opened]
    assert [len(names) for names in of_layers[1:-1]] == [len(of_layers[1])] * config.n_layer
    for layer, names in enumerate(of_layers[1:-1]):
        assert {name.split(".")[1] for name in names} == {str(layer)}
        assert f"blocks.{layer}.feed_forward.down.weight.T.int4" in names
        assert f"blocks.{layer}.feed_forward.down.weight.T.int8" in names
    assert not of_layers[0]
    assert not of_layers[-1]

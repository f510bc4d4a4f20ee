"""Answers to `Questions`, against PyTorch with hooks: every kind of decoder, and encoders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from kvasir.export.graphs.attention import write_attention_graph
from kvasir.model.directory import ATTENTION_GRAPH_FILE, HEAD_MASK_INPUT, ModelDirectory
from kvasir.model.network.attention import Attention, split_heads
from kvasir.model.network.block import Block
from kvasir.model.network.positions import Positions, rotate
from kvasir.model.network.transformer import Transformer
from kvasir.server.errors import InvalidRequestError
from kvasir.server.explain.behaviour import measure_behaviours
from kvasir.server.explain.explainer import Explainer
from kvasir.server.explain.explanation import Explanation, Head, Questions
from tests.api.test_explain import TEXT, eager_weights, make_directory
from tests.kit.encoders import BERT, MODERN, MPNET, export_encoder
from tests.kit.fake_encoder import encoder_model_dir
from tests.model.variants import VARIANTS

OFF = (Head(0, 1), Head(0, 3), Head(2, 0))
POSITION = 9


@contextmanager
def without(network: Transformer, heads: tuple[Head, ...]) -> Iterator[None]:
    """Switch heads off: their part of what the output projection reads becomes 0."""
    hooks = []
    for layer, block in enumerate(network.blocks):
        assert isinstance(block, Block)
        off = [one.head for one in heads if one.layer == layer]

        def switch(_: nn.Module, inputs: tuple[Tensor], off: list[int] = off) -> tuple[Tensor]:
            apart = inputs[0].unflatten(-1, (network.config.n_head, -1)).clone()
            apart[..., off, :] = 0.0
            return (apart.flatten(-2),)

        hooks.append(block.attention.output.register_forward_pre_hook(switch))
    yield
    for hook in hooks:
        hook.remove()


def logits_of(network: Transformer, token_ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        logits: np.ndarray[Any, Any] = network(torch.tensor([token_ids]))[0].numpy()
    return logits


def distribution(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.tensor(logits).double().softmax(-1).numpy()


def lens_of(network: Transformer, token_ids: list[int]) -> list[np.ndarray[Any, Any]]:
    """Return the logits after each layer [n_tokens, vocab_size]."""
    found: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda *call: found.append(call[2])) for block in network.blocks
    ]
    logits_of(network, token_ids)
    for hook in hooks:
        hook.remove()
    with torch.inference_mode():
        return [network._logits(network.norm(x))[0].numpy() for x in found]


def head_of(network: Transformer, token_ids: list[int], of: Head) -> list[Tensor]:
    """Return a head's queries, keys and values [n_tokens, head_dim]."""
    found: list[Tensor] = []

    def listen(attention: Attention, inputs: tuple[Tensor, Positions]) -> None:
        positions = attention._own(inputs[1])
        query, key, value = split_heads(attention.project(inputs[0], positions), attention.config)
        place = torch.arange(query.shape[2])[None]
        if table := positions.rotary:
            query, key = rotate(query, table, place), rotate(key, table, place)
        shared = of.head // attention.config.n_groups
        found.extend([query[0, of.head], key[0, shared], value[0, shared]])

    block = network.blocks[of.layer]
    assert isinstance(block, Block)
    hook = block.attention.register_forward_pre_hook(listen)
    with torch.inference_mode():
        network.hidden(torch.tensor([token_ids]))
    hook.remove()
    return found


def check_head(found: Explanation, network: Transformer, of: Head) -> None:
    """Compare a head's values with PyTorch's, and its weights with what its values make."""
    values, config = found.head_values, network.config
    assert values is not None
    expected = head_of(network, found.token_ids, of)
    for own, theirs in zip((values.queries, values.keys, values.values), expected, strict=True):
        np.testing.assert_allclose(own, theirs.numpy(), atol=2e-5)
    scores = values.scores.astype(np.float64) * values.scale
    np.testing.assert_allclose(values.scores, values.queries @ values.keys.T, atol=1e-5)
    if (cap := config.attention_softcap) is not None:
        scores = cap * np.tanh(scores / cap)
    assert (values.bias is not None) is (config.position == "alibi" or config.has_relative_bias)
    scores += 0 if values.bias is None else values.bias
    n = len(found.token_ids)
    apart = np.subtract.outer(np.arange(n), np.arange(n))
    seen = abs(apart) < (config.window_of(of.layer) or n)
    scores[~(seen & (apart >= 0) if config.causal else seen)] = -np.inf
    assert (values.sink is not None) is config.attention_sinks
    beside = 0 if values.sink is None else np.exp(values.sink)
    weights = np.exp(scores) / (np.exp(scores).sum(-1, keepdims=True) + beside)
    np.testing.assert_allclose(found.weights[of.layer][of.head], weights, atol=1e-5)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"alibi", "post-norm rotary", "qwen"}))
def test_heads_lens_and_values_are_pytorchs(name: str, tmp_path: Path) -> None:
    changes = VARIANTS[name] | {"n_layer": 3}
    decoder, model_dir = make_directory(tmp_path / "model", "fp32", **changes)
    explainer, of = Explainer(model_dir, threads=1), Head(1, 2)
    asked = Questions(3, POSITION, OFF, lens=2, entropies=True, values_of=of)
    found = explainer.explain(TEXT, [0, 1, 2], asked)
    ids = found.token_ids
    whole = logits_of(decoder, ids)[POSITION]
    with without(decoder, OFF):
        edited, lens = logits_of(decoder, ids)[POSITION], lens_of(decoder, ids)
        weights = eager_weights(decoder, ids)
        check_head(found, decoder, of)
    after, before = distribution(edited), distribution(whole)
    assert [one.token_id for one in found.next_tokens] == np.argsort(-after)[:3].tolist()
    assert found.effect is not None
    expected_bits = (before * np.log2(before / after)).sum()
    assert expected_bits > 1e-4  # the heads do something
    assert found.effect.kl_divergence == pytest.approx(expected_bits, rel=1e-2)
    likeliest = {*np.argsort(-after)[:3].tolist(), *np.argsort(-before)[:3].tolist()}
    assert {one.token_id for one in found.effect.tokens} == likeliest
    for one in found.effect.tokens:
        figures = one.probability, one.whole_probability, one.logit, one.whole_logit
        places = after, before, edited, whole
        expected = [of_all[one.token_id] for of_all in places]
        np.testing.assert_allclose(figures, expected, rtol=1e-3, atol=1e-4)
    for shown, expected_logits in zip(found.lens, lens, strict=True):
        shares = distribution(expected_logits[POSITION])
        assert [one.token_id for one in shown] == np.argsort(-shares)[:2].tolist()
        np.testing.assert_allclose(
            [one.probability for one in shown], np.sort(shares)[:-3:-1], rtol=1e-3
        )
    assert found.entropies is not None
    for layer, expected_weights in enumerate(weights):
        np.testing.assert_allclose(found.weights[layer], expected_weights, atol=1e-5)
        rows = expected_weights[:, POSITION].double()
        entropies = -(rows * rows.clamp(min=1e-300).log2()).sum(-1)
        np.testing.assert_allclose(found.entropies[layer], entropies, atol=1e-3)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_models_answer_as_well(precision: str, tmp_path: Path) -> None:
    decoder, model_dir = make_directory(tmp_path / "model", precision, n_layer=3)
    explainer = Explainer(model_dir, threads=1)
    found = explainer.explain(TEXT, [0], Questions(3, None, OFF, lens=2))
    with without(decoder, OFF):
        edited = distribution(logits_of(decoder, found.token_ids)[-1])
    assert found.effect is not None
    error = max(abs(one.probability - edited[one.token_id]) for one in found.effect.tokens)
    change = max(abs(one.probability - one.whole_probability) for one in found.effect.tokens)
    assert error < change / 2
    assert found.lens[-1] == found.next_tokens[:2]


@pytest.mark.parametrize(
    ("changes", "precision"), [(BERT, "fp32"), (BERT, "int8"), (MPNET, "fp32"), (MODERN, "fp32")]
)
def test_weights_of_an_encoder_are_pytorchs(
    changes: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    """Over the full square, special tokens included, with heads switched off or without."""
    model_dir = encoder_model_dir()
    size = {"vocab_size": model_dir.config.vocab_size, "max_model_len": 64, "n_layer": 3}
    model = export_encoder(tmp_path / "model", precision, **changes | size)
    write_attention_graph(tmp_path / "model")
    own = replace(model_dir, path=tmp_path / "model", config=model.config)
    explainer, of = Explainer(own, threads=1), Head(1, 3)
    for text, off in ((TEXT, OFF), (TEXT, ()), ("", ())):
        found = explainer.explain(text, [0, 1, 2], Questions(without=off, values_of=of))
        assert len(found.tokens) == len(found.token_ids) >= 2
        assert (found.effect, found.next_tokens) == (None, [])
        with without(model.decoder, off):
            if precision == "fp32":
                check_head(found, model.decoder, of)
            for layer, weights in enumerate(eager_weights(model.decoder, found.token_ids)):
                tolerance = 2e-2 if precision == "int8" else 1e-5
                np.testing.assert_allclose(found.weights[layer], weights, atol=tolerance)
                np.testing.assert_allclose(found.weights[layer].sum(-1), 1.0, atol=1e-5)
    for asked in (Questions(lens=1), Questions(position=0), Questions(entropies=True)):
        with pytest.raises(InvalidRequestError, match="this is an encoder"):
            explainer.explain(TEXT, [0], asked)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return make_directory(tmp_path_factory.mktemp("lab") / "model", "fp32")[1]


def test_an_older_graph_explains_and_refuses_the_rest(
    model_dir: ModelDirectory, tmp_path: Path
) -> None:
    """Before `head_mask` the graph had logits and attention alone."""
    model = ir.load(model_dir.path / ATTENTION_GRAPH_FILE)
    mask = next(value for value in model.graph.inputs if value.name == HEAD_MASK_INPUT)
    ones = ir.tensor(np.ones((2, 4, 1), np.float32), name=HEAD_MASK_INPUT)
    model.graph.inputs.remove(mask)
    mask.const_value = ones
    model.graph.register_initializer(mask)
    kept = ("logits", "attention.0", "attention.1")
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name in kept]
    folder = shutil.copytree(model_dir.path, tmp_path / "older")
    ir.save(model, folder / ATTENTION_GRAPH_FILE)
    older = Explainer(replace(model_dir, path=folder), threads=1)
    newer = Explainer(model_dir, threads=1)
    asked = Questions(position=3)
    assert (
        older.explain(TEXT, [0], asked).next_tokens == newer.explain(TEXT, [0], asked).next_tokens
    )
    for new in (Questions(without=OFF[:1]), Questions(lens=1), Questions(values_of=OFF[0])):
        with pytest.raises(InvalidRequestError, match="older Kvasir"):
            older.explain(TEXT, [0], new)


IDS = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@pytest.mark.parametrize(
    ("label", "keys"),
    [
        ("previous token", lambda query: [query - 1]),
        ("first token", lambda _: [0]),
        ("same token", lambda query: [key for key in range(query + 1) if IDS[key] == IDS[query]]),
        (
            "induction",
            lambda query: [
                key for key in range(1, query + 1) if IDS[key - 1] == IDS[query] and key - 1 < query
            ],
        ),
    ],
)
def test_a_head_is_labelled_by_what_it_attends_to(label: str, keys: Any) -> None:
    """Heads give 60 % to keys of one kind, where there are any, and the rest evenly."""
    n = len(IDS)
    visible = np.tril(np.ones((n, n), dtype=bool))
    even = visible / visible.sum(-1, keepdims=True)
    weights = even.copy()
    for query in range(n):
        if chosen := [key for key in keys(query) if key >= 0]:
            weights[query] *= 0.4
            weights[query, chosen] += 0.6 / len(chosen)
    of_kind, of_even = measure_behaviours(IDS, np.stack([weights, even]), visible)
    assert of_kind.label == label
    assert of_kind.shares[label] >= 0.6
    assert of_even.label is None
    short = measure_behaviours([5, 6, 7], np.stack([even[:3, :3]]), visible[:3, :3])[0]
    assert "induction" not in short.shares  # no token repeats

"""Explanations against PyTorch with hooks, of decoders and encoders; `kvasir explain`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.export.directory import make_manifest
from kvasir.export.graphs.attention import write_attention_graph
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import (
    ATTENTION_GRAPH_FILE,
    HEAD_MASK_INPUT,
    ModelDirectory,
    load_model_dir,
)
from kvasir.model.network.attention import Attention, attention_weights, split_heads, visible_keys
from kvasir.model.network.block import Block
from kvasir.model.network.positions import Positions, rotate
from kvasir.model.network.recurrent import mixer
from kvasir.model.network.recurrent.chunks import run_chunks
from kvasir.model.network.transformer import Transformer
from kvasir.model.records import Verification
from kvasir.server.errors import InvalidRequestError, NotFoundError
from kvasir.server.explain.explainer import Explainer
from kvasir.server.explain.explanation import Explanation, Head, Questions, measure_behaviours
from tests.kit.encoders import BERT, MODERN, MPNET, export_encoder
from tests.kit.fake_encoder import encoder_model_dir
from tests.kit.random_models import export_decoder, make_config, make_decoder
from tests.kit.recurrences import run_by_token
from tests.kit.serving import small_tokenizer
from tests.kit.whole_graph import GraphSession
from tests.model.variants import VARIANTS

TEXT = "The studious student graduated with honors."
OFF = (Head(0, 1), Head(0, 3), Head(1, 0))
POSITION = 9
# Each kind of positions, biases, norms and residuals once, and what changes scores or the head.
# Most are the networks of other tests, which trace them as well.
DECODERS: dict[str, dict[str, Any]] = {
    "windows": VARIANTS["gemma"],
    "output norm": VARIANTS["olmo2"],
    "post norm, sinks": VARIANTS["qwen"] | {"n_layer": 2, "attention_sinks": True},
    "parallel": VARIANTS["phi"] | {"n_layer": 2},
    "alibi": VARIANTS["bloom"],
    "relative": VARIANTS["relative"],
    "shared experts": VARIANTS["hunyuan mixture"],
}
ROUNDED = {"int8": VARIANTS["llama"], "int4": VARIANTS["gpt2"] | {"d_model": 64}}
LARGEST_ERROR = {"int8": 0.15, "int4": 0.6}  # of a weight


def make_directory(
    folder: Path, precision: str, **changes: Any
) -> tuple[Transformer, ModelDirectory]:
    """A model directory of a random decoder, as `kvasir export` leaves it."""
    decoder = make_decoder(make_config(**changes))
    export_decoder(decoder, folder, precision)
    return decoder, completed(folder, decoder.config, small_tokenizer(), precision)


def completed(
    folder: Path, config: TransformerConfig, tokenizer: Tokenizer, precision: str = "fp32"
) -> ModelDirectory:
    """Add what a model directory has beside the model's graph."""
    write_attention_graph(folder)
    config.save(folder / "config.json")
    tokenizer.save(str(folder / "tokenizer.json"))
    figures = Verification(max_logit_error=0.0, greedy_agreement=1.0)
    make_manifest(config, folder, precision, {}, figures).save(folder / "manifest.json")
    return load_model_dir(folder)


def eager_weights(decoder: Transformer, token_ids: list[int]) -> list[torch.Tensor]:
    """Return each layer's weights [n_head, n_tokens, n_tokens], from its attention's inputs."""
    found: list[torch.Tensor] = []

    def listen(attention: Attention, inputs: tuple[torch.Tensor, Positions]) -> None:
        x, positions = inputs[0], attention._own(inputs[1])
        place = torch.arange(x.shape[1])
        query, key, _ = split_heads(attention.project(x, positions), attention.config)
        if table := positions.rotary:
            query, key = (rotate(part, table, place[None]) for part in (query, key))
        causal = attention.config.causal
        visible = visible_keys(place[None], place, attention.window, causal=causal)
        settings = positions.bias, attention.config, attention.sinks
        found.append(attention_weights(query, key, visible, *settings)[0])

    attentions = [module for module in decoder.modules() if isinstance(module, Attention)]
    hooks = [attention.register_forward_pre_hook(listen) for attention in attentions]
    with torch.inference_mode():
        read = decoder if decoder.pooler is None else decoder.hidden
        read(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return found


@contextmanager
def switched_off(
    projections: Sequence[nn.Module], n_head: int, heads: tuple[Head, ...]
) -> Iterator[None]:
    """Switch heads off: their part of what a layer's output projection reads becomes 0."""
    hooks = []
    for layer, head in heads:

        def switch(_: nn.Module, inputs: tuple[Tensor], head: int = head) -> tuple[Tensor]:
            apart = inputs[0].unflatten(-1, (n_head, -1)).clone()
            apart[..., head, :] = 0.0
            return (apart.flatten(-2),)

        hooks.append(projections[layer].register_forward_pre_hook(switch))
    yield
    for hook in hooks:
        hook.remove()


def without(network: Transformer, heads: tuple[Head, ...]) -> AbstractContextManager[None]:
    """Switch heads of a network off."""
    attentions = [block.attention for block in network.blocks if isinstance(block, Block)]
    return switched_off([one.output for one in attentions], network.config.n_head, heads)


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


@pytest.mark.parametrize("name", DECODERS)
def test_weights_heads_lens_and_values_are_pytorchs(name: str, tmp_path: Path) -> None:
    decoder, model_dir = make_directory(tmp_path / "model", "fp32", **DECODERS[name])
    n_layer = decoder.config.n_layer
    explainer, of = Explainer(model_dir, threads=1), Head(n_layer - 1, 2)
    off = tuple(one for one in OFF if one.layer < n_layer)
    asked = Questions(3, POSITION, off, lens=2, entropies=True, values_of=of)
    found = explainer.explain(TEXT, [*range(n_layer)], asked)
    ids = found.token_ids
    whole = logits_of(decoder, ids)[POSITION]
    with without(decoder, off):
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


HYBRIDS = ("qwen3.5", "kimi", "bamba", "lfm2", "without attention", "mamba", "jamba", "falcon h1")


@contextmanager
def heard(
    network: Transformer, heads: tuple[Head, ...], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[Tensor, ...]]]:
    """Listen to what recurrences over matrices get, with heads switched off."""
    inputs: list[tuple[Tensor, ...]] = []
    layers = [i for i in network.config.recurrent_layers if network.config.heads_of(i)]

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        off = [one.head for one in heads if one.layer == layers[len(inputs) % len(layers)]]
        inputs.append(tuple(part for part in given if part is not None))
        read, matrix = run_chunks(*given)
        read[:, :, off] = 0.0
        return read, matrix

    with monkeypatch.context() as patch:
        patch.setattr(mixer, "run_chunks", run)
        yield inputs


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_layers_show_what_their_matrices_hold(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's output is linear in its values: one for each token alone gives the map."""
    decoder, model_dir = make_directory(tmp_path / "model", "fp32", **VARIANTS[name])
    config, explainer = decoder.config, Explainer(model_dir, threads=1)
    layers = [*range(config.n_layer)]
    recurrent = [i for i in layers if not config.attends(i) and config.heads_of(i)]
    off = tuple(Head(layer, 1) for layer in recurrent)
    asked = Questions(3, POSITION, off, lens=2, entropies=True)
    found, n = explainer.explain(TEXT, layers, asked), len(explainer.explain(TEXT, []).tokens)
    with heard(decoder, off, monkeypatch) as inputs:
        edited, weights = (
            logits_of(decoder, found.token_ids),
            eager_weights(decoder, found.token_ids),
        )
    assert [*found.memories] == recurrent
    for layer, (query, key, _, past, decay, *rate) in zip(recurrent, inputs, strict=False):
        heads, memory = query.shape[2], found.memories[layer]
        value = torch.eye(n)[None, :, None].expand(1, n, heads, n)
        empty = past[..., :1].expand(*past.shape[:3], n)
        read, _ = run_by_token(query, key, value, empty, decay, *rate)
        of_tokens = read[0].transpose(0, 1)  # up to 30
        np.testing.assert_allclose(memory.weights, of_tokens, rtol=1e-5, atol=1e-5)
        # Nothing is taken away where keys have nothing in common, so decays alone are left.
        ones = torch.ones(1, n, heads, 1)
        channels = decay.unbind(-1) if decay.dim() == 4 else [decay]
        every = [run_by_token(ones, ones, value, empty[:, :, :1], one)[0] for one in channels]
        left = torch.stack(every).mean(dim=0)
        np.testing.assert_allclose(memory.decays, left[0].transpose(0, 1), atol=1e-5)
    for layer, expected in zip(config.attention_layers, weights, strict=True):
        np.testing.assert_allclose(found.weights[layer], expected, atol=1e-5)
    assert [*found.weights] == [*config.attention_layers]
    shares = distribution(edited[POSITION])
    assert [one.token_id for one in found.next_tokens] == np.argsort(-shares)[:3].tolist()
    assert found.lens[-1] == found.next_tokens[:2]
    assert found.entropies is not None
    assert [len(of) for of in found.entropies] == [
        config.n_head if layer in config.attention_layers else 0 for layer in layers
    ]
    shown = found.as_json(0, [0] if config.heads_of(0) else [])
    assert [*shown.get("memory", {})] == (["0"] if 0 in recurrent else [])
    if not config.heads_of(0):  # channels alone
        for asked in (Questions(without=(Head(0, 0),)), Questions(values_of=Head(0, 0))):
            with pytest.raises(InvalidRequestError, match="layer 0 has no heads"):
                explainer.explain(TEXT, [], asked)


@pytest.mark.parametrize("precision", ROUNDED)
def test_rounded_models_show_what_is_served(precision: str, tmp_path: Path) -> None:
    """Close to PyTorch's weights, and the served graph's own probabilities."""
    decoder, model_dir = make_directory(tmp_path / "model", precision, **ROUNDED[precision])
    explainer = Explainer(model_dir, threads=1)
    whole = explainer.explain(TEXT, [1, 0], Questions(top_k=4))
    ids, n = whole.token_ids, len(whole.token_ids)
    assert sorted(whole.weights) == [0, 1]
    for layer, expected in enumerate(eager_weights(decoder, ids)):
        weights = whole.weights[layer]
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-5)
        assert not np.triu(weights, k=1).any()
        assert np.abs(weights - expected.numpy()).max() < LARGEST_ERROR[precision]
        # Heads differ, so a wrong one would be noticed.
        assert np.abs(weights - weights[::-1]).max() > 0.1
    served = GraphSession(model_dir.graph_path, model_dir.config)
    served.clear(1, n)
    shares = distribution(served.run(np.array([ids]), [n])[0, -1])
    assert [one.token_id for one in whole.next_tokens] == np.argsort(-shares)[:4].tolist()
    probabilities = [one.probability for one in whole.next_tokens]
    np.testing.assert_allclose(probabilities, np.sort(shares)[:-5:-1], rtol=1e-6)
    found = explainer.explain(TEXT, [], Questions(3, None, OFF, lens=2))
    with without(decoder, OFF):
        edited = distribution(logits_of(decoder, ids)[-1])
    assert found.effect is not None
    error = max(abs(one.probability - edited[one.token_id]) for one in found.effect.tokens)
    change = max(abs(one.probability - one.whole_probability) for one in found.effect.tokens)
    assert error < change / 2
    assert found.lens[-1] == found.next_tokens[:2]


@pytest.mark.parametrize(
    ("changes", "precision"), [(BERT, "int8"), (MPNET, "fp32"), (MODERN, "fp32")]
)
def test_weights_of_an_encoder_are_pytorchs(
    changes: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    """Over the full square, special tokens included, with heads switched off or without."""
    model_dir = encoder_model_dir()
    model = export_encoder(tmp_path / "model", precision, **changes)
    write_attention_graph(tmp_path / "model")
    own = replace(model_dir, path=tmp_path / "model", config=model.config)
    explainer, of = Explainer(own, threads=1), Head(1, 3)
    for text, off in ((TEXT, OFF), (TEXT, ()), ("", ())):
        found = explainer.explain(text, [0, 1], Questions(without=off, values_of=of))
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
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained") / "model"
    make_directory(folder, "int8")
    return folder


def test_parts_of_characters_are_named_by_their_bytes(directory: Path) -> None:
    explanation = Explainer(load_model_dir(directory)).explain(
        "a \u2603", [0], Questions(top_k=256)
    )
    assert explanation.tokens == ["a", " ", *(rf"bytes:\x{byte:x}" for byte in "\u2603".encode())]
    assert {rf"bytes:\x{byte:x}" for byte in range(0x80, 0x100)} & {
        token.text for token in explanation.next_tokens
    }


def test_texts_and_layers_that_cannot_be_explained(directory: Path, tmp_path: Path) -> None:
    explainer = Explainer(load_model_dir(directory))
    refused: list[tuple[str, list[int], Questions | None, str]] = [
        (TEXT, [0, 2], None, "there is no layer 2"),
        (TEXT, [0], Questions(without=(Head(2, 0),)), "there is no layer 2"),
        (TEXT, [0], Questions(without=(Head(0, 4),)), "there is no head 4"),
        (TEXT, [0], Questions(values_of=Head(0, 9)), "there is no head 9"),
        (TEXT, [0], Questions(position=99), "there is no position 99; the text has 0 to"),
        ("", [0], None, "token"),
        (TEXT * 9, [0], None, "at most 96"),
    ]
    for text, layers, asked, message in refused:
        with pytest.raises(InvalidRequestError, match=message):
            explainer.explain(text, layers, asked)
    older = replace(explainer._model_dir, path=tmp_path)
    with pytest.raises(NotFoundError, match=r"attention\.onnx"):
        Explainer(older)


def run_explain(directory: Path, *options: str | Path) -> Any:
    """Return what the command prints of TEXT as JSON."""
    command = ["explain", str(directory), TEXT, "--top-k", "3", "--json", *map(str, options)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_command_draws_and_prints_what_it_found(directory: Path, tmp_path: Path) -> None:
    expected = Explainer(load_model_dir(directory)).explain(TEXT, [1])
    every = run_explain(directory, "--layer", "1", "--out", tmp_path / "map.png")
    one = run_explain(directory, "--layer", "1", "--head", "2")
    assert ([*every["heads"]], [*one["heads"]]) == (["0", "1", "2", "3"], ["2"])
    assert "".join(every["tokens"]) == TEXT
    for name, weights in (*every["heads"].items(), *one["heads"].items()):
        assert (np.array(weights, dtype=np.float32) == expected.weights[1][int(name)]).all()
    assert len(every["next_tokens"]) == 3
    shown = CliRunner().invoke(app, ["explain", str(directory), TEXT]).stdout
    assert str(every["next_tokens"][0]["token_id"]) in shown
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.format == "PNG"
        colours = picture.convert("RGB").getcolors(maxcolors=2**24)
    assert colours is not None
    assert len(colours) > 50  # a map, not an empty frame


def test_the_command_switches_heads_off(directory: Path) -> None:
    asked = Questions(3, None, (Head(1, 0), Head(0, 2)))
    expected = Explainer(load_model_dir(directory)).explain(TEXT, [0], asked).effect
    assert expected is not None
    assert run_explain(directory, "--without", "1.0,0.2")["effect"] == asdict(expected)
    command = ["explain", str(directory), TEXT, "--top-k", "3"]
    shown = CliRunner().invoke(app, [*command, "--without", "1.0,0.2"]).stdout
    assert f"{expected.kl_divergence:.3f} bits" in shown
    assert str(expected.tokens[-1].token_id) in shown
    refused = CliRunner().invoke(app, [*command, "--without", "1"])
    assert (refused.exit_code, "'1' is not a list of heads" in refused.output) == (2, True)
    refused = CliRunner().invoke(app, [*command, "--head", "4"])
    assert refused.exit_code == 1
    assert refused.output == "kvasir: there is no head 4; layer 0 has heads 0 to 3\n"


def test_an_older_graph_explains_and_refuses_the_rest(directory: Path, tmp_path: Path) -> None:
    """Before `head_mask` the graph had logits and attention alone."""
    model_dir = load_model_dir(directory)
    model = ir.load(directory / ATTENTION_GRAPH_FILE)
    mask = next(value for value in model.graph.inputs if value.name == HEAD_MASK_INPUT)
    ones = ir.tensor(np.ones((2, 4, 1), np.float32), name=HEAD_MASK_INPUT)
    model.graph.inputs.remove(mask)
    mask.const_value = ones
    model.graph.register_initializer(mask)
    kept = ("logits", "attention.0", "attention.1")
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name in kept]
    folder = shutil.copytree(directory, tmp_path / "older")
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

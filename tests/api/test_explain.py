"""`kvasir explain`: the exported model's attention against PyTorch's, and its picture."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.export.directory import make_manifest
from kvasir.export.graphs.attention import write_attention_graph
from kvasir.model.config import RopeScaling, TransformerConfig
from kvasir.model.directory import ModelDirectory, load_model_dir
from kvasir.model.network.attention import Attention, attention_weights, split_heads, visible_keys
from kvasir.model.network.positions import Positions, rotate
from kvasir.model.network.transformer import Transformer
from kvasir.model.records import Verification
from kvasir.model.tokenizer import train_tokenizer
from kvasir.server.errors import InvalidRequestError, NotFoundError
from kvasir.server.explain.explainer import Explainer
from kvasir.server.explain.explanation import Head, Questions
from tests.kit.random_models import export_decoder, make_config, make_decoder
from tests.kit.whole_graph import GraphSession

TEXT = "The studious student graduated with honors."
VARIANTS: dict[str, dict[str, Any]] = {
    "rotary": {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
    "biased": {"position": "alibi", "qk_norm": True},
    "windowed": {"sliding_window": 5, "sliding_window_layers": (1,), "attention_softcap": 3.0}
    | {"position": "learned"},
}


def make_directory(
    folder: Path, precision: str, **changes: Any
) -> tuple[Transformer, ModelDirectory]:
    """A model directory of a random decoder, as `kvasir export` leaves it."""
    tokenizer = train_tokenizer([TEXT * 20], 280)
    decoder = make_decoder(
        make_config(vocab_size=tokenizer.get_vocab_size(), max_model_len=64, **changes)
    )
    folder.mkdir(parents=True)
    export_decoder(decoder, folder, precision)
    return decoder, completed(folder, decoder.config, tokenizer, precision)


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


@pytest.mark.parametrize(
    ("variant", "precision"),
    [*((variant, "fp32") for variant in VARIANTS), ("rotary", "int8"), ("windowed", "int4")],
)
def test_the_exported_models_weights_are_pytorchs(
    variant: str, precision: str, tmp_path: Path
) -> None:
    decoder, model_dir = make_directory(tmp_path / "model", precision, **VARIANTS[variant])
    explanation = Explainer(model_dir).explain(TEXT, [1, 0], Questions(top_k=4))
    expected = eager_weights(decoder, explanation.token_ids)
    assert sorted(explanation.weights) == [0, 1]
    for layer, weights in explanation.weights.items():
        n = len(explanation.token_ids)
        assert weights.shape == (4, n, n)
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-5)
        assert not np.triu(weights, k=1).any()
        if model_dir.config.window_of(layer):
            assert not np.tril(weights, k=-5).any()
            assert np.tril(weights, k=-4).any()
        distance = np.abs(weights - expected[layer].numpy()).max()
        assert distance < {"fp32": 1e-5, "int8": 0.15, "int4": 0.6}[precision]
        # Heads differ, so a wrong one would be noticed.
        assert np.abs(weights - weights[::-1]).max() > 0.1

    with torch.inference_mode():
        logits = decoder(torch.tensor([explanation.token_ids]))[0, -1]
    served, n_tokens = (
        GraphSession(model_dir.graph_path, model_dir.config),
        len(explanation.token_ids),
    )
    served.clear(1, n_tokens)
    answered = served.run(np.array([explanation.token_ids]), [n_tokens])[0, -1].astype(np.float64)
    answered = np.exp(answered - answered.max())
    likeliest_served = np.argsort(-answered, kind="stable")[:4]
    ids = [token.token_id for token in explanation.next_tokens]
    probabilities = [token.probability for token in explanation.next_tokens]
    expected_probabilities = (answered / answered.sum())[likeliest_served]
    assert ids == likeliest_served.tolist()
    np.testing.assert_allclose(probabilities, expected_probabilities, rtol=1e-6)
    if precision == "fp32":
        likeliest = logits.softmax(0).topk(4)
        assert ids == likeliest.indices.tolist()
        np.testing.assert_allclose(probabilities, likeliest.values, rtol=1e-4)


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
        (TEXT * 9, [0], None, "at most 64"),
    ]
    for text, layers, asked, message in refused:
        with pytest.raises(InvalidRequestError, match=message):
            explainer.explain(text, layers, asked)
    older = replace(explainer._model_dir, path=tmp_path)
    with pytest.raises(NotFoundError, match=r"attention\.onnx"):
        Explainer(older)


@pytest.mark.parametrize("head", [2, None])
def test_the_command_draws_and_prints_what_it_found(
    directory: Path, head: int | None, tmp_path: Path
) -> None:
    options = [] if head is None else ["--head", str(head)]
    command = ["explain", str(directory), TEXT, "--layer", "1", *options, "--top-k", "3"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "map.png"), "--json"])
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    expected = Explainer(load_model_dir(directory)).explain(TEXT, [1])
    assert "".join(written["tokens"]) == TEXT
    assert list(written["heads"]) == (["0", "1", "2", "3"] if head is None else ["2"])
    for name, weights in written["heads"].items():
        assert (np.array(weights, dtype=np.float32) == expected.weights[1][int(name)]).all()
    assert len(written["next_tokens"]) == 3
    assert str(written["next_tokens"][0]["token_id"]) in CliRunner().invoke(app, command).stdout
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.format == "PNG"
        colours = picture.convert("RGB").getcolors(maxcolors=2**24)
    assert colours is not None
    assert len(colours) > 50  # a map, not an empty frame


def test_the_command_switches_heads_off(directory: Path) -> None:
    command = ["explain", str(directory), TEXT, "--top-k", "3", "--without", "1.0,0.2"]
    written = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    asked = Questions(3, None, (Head(1, 0), Head(0, 2)))
    expected = Explainer(load_model_dir(directory)).explain(TEXT, [0], asked).effect
    assert expected is not None
    assert written["effect"] == asdict(expected)
    shown = CliRunner().invoke(app, command).stdout
    assert f"{expected.kl_divergence:.3f} bits" in shown
    assert str(expected.tokens[-1].token_id) in shown
    refused = CliRunner().invoke(app, [*command[:-1], "1"])
    assert (refused.exit_code, "'1' is not a list of heads" in refused.output) == (2, True)


def test_a_wrong_head_is_one_line(directory: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(directory), TEXT, "--head", "4"])
    assert result.exit_code == 1
    assert result.output == "kvasir: there is no head 4; the model has heads 0 to 3\n"

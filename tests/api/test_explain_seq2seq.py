"""Attention of encoder-decoders: in a target and to its source, against PyTorch's."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.model.directory import ModelDirectory
from kvasir.model.network.cross_attention import CrossAttention, Source
from kvasir.model.reference import generate
from kvasir.server.errors import InvalidRequestError
from kvasir.server.explain.explainer import Explainer
from kvasir.server.explain.explanation import Head, Questions
from tests.api.test_explain import completed, without
from tests.api.test_seq2seq import FR, NETWORK, SOURCE, TOKENIZER, client
from tests.kit.encoder_decoders import export_both
from tests.kit.fake_seq2seq import EOS, read

TARGET = "json.load"
IDS = [*NETWORK.config.target_prefix, *TOKENIZER.encode(TARGET).ids]
SOURCE_IDS = TOKENIZER.encode(SOURCE).ids


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    """A model directory, as `kvasir export` leaves it."""
    folder = tmp_path_factory.mktemp("explained")
    export_both(NETWORK.config, NETWORK.state_dict(), folder)
    return completed(folder, NETWORK.config, TOKENIZER)


def cross_weights(target_ids: list[int], source: Source) -> list[Tensor]:
    """Return each layer's weights [n_head, n_target, n_source]."""
    found: list[Tensor] = []

    def listen(attention: CrossAttention, inputs: tuple[Tensor, Source]) -> None:
        config = attention.config
        query = attention.query(inputs[0]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        keys = attention.keys_and_values(inputs[1].hidden)[0]
        found.append((config.query_scale * query @ keys.mT).softmax(-1)[0])

    modules = [module for module in NETWORK.modules() if isinstance(module, CrossAttention)]
    hooks = [module.register_forward_pre_hook(listen) for module in modules]
    with torch.inference_mode():
        NETWORK(torch.tensor([target_ids]), source=source)
    for hook in hooks:
        hook.remove()
    return found


def test_the_weights_are_pytorchs(model_dir: ModelDirectory) -> None:
    explanation = Explainer(model_dir).explain(SOURCE, [1, 0], target=TARGET)
    assert explanation.token_ids == IDS
    assert explanation.source_ids == SOURCE_IDS
    source = read(NETWORK, SOURCE_IDS)
    expected = cross_weights(IDS, source)
    assert sorted(explanation.source_weights) == [0, 1]
    for layer, weights in explanation.source_weights.items():
        np.testing.assert_allclose(weights, expected[layer].numpy(), atol=1e-5)
        own = explanation.weights[layer]
        assert own.shape == (2, len(IDS), len(IDS))
        assert not np.triu(own, k=1).any()
        np.testing.assert_allclose(own.sum(axis=-1), 1.0, atol=1e-5)
    with torch.inference_mode():
        logits = NETWORK(torch.tensor([IDS]), source=source)[0, -1]
    assert explanation.next_tokens[0].token_id == int(logits.argmax())


def test_own_heads_of_the_decoder_are_switched_off(model_dir: ModelDirectory) -> None:
    off = (Head(0, 0), Head(1, 1))
    found = Explainer(model_dir).explain(
        SOURCE, [0], Questions(3, None, off, lens=1), target=TARGET
    )
    source = read(NETWORK, SOURCE_IDS)
    with without(NETWORK, off), torch.inference_mode():
        edited = NETWORK(torch.tensor([IDS]), source=source)[0, -1].double()
    assert found.effect is not None
    for one in found.effect.tokens:
        assert one.logit == pytest.approx(float(edited[one.token_id]), abs=1e-4)
    assert found.lens[-1] == found.next_tokens[:1]


def test_a_target_is_for_encoder_decoders(model_dir: ModelDirectory) -> None:
    with pytest.raises(InvalidRequestError, match="needs a target"):
        Explainer(model_dir).explain(SOURCE, [0])


async def test_the_route_explains_a_given_target_and_the_likeliest(
    model_dir: ModelDirectory,
) -> None:
    source = read(NETWORK, SOURCE_IDS)
    prefix = list(NETWORK.config.target_prefix)
    likeliest = generate(NETWORK, prefix, max_tokens=18, ending_ids=[EOS], source=source)
    async with client(model_dir) as c:
        body = {"text": SOURCE, "layers": [1], "heads": [0]}
        for fields, ids in ({"target": TARGET}, IDS), ({}, prefix + likeliest):
            answer = (await c.post("/explain", json=body | fields)).json()
            assert answer["token_ids"] == ids
            assert answer["source_token_ids"] == SOURCE_IDS
            assert len(answer["source_tokens"]) == len(SOURCE_IDS)
            (shown,) = answer["source_attention"]
            assert (shown["layer"], shown["head"]) == (1, 0)
            weights = cross_weights(ids, source)[1][0].numpy()
            np.testing.assert_allclose(shown["weights"], weights, atol=1e-5)
            assert np.shape(answer["attention"][0]["weights"]) == (len(ids), len(ids))
        fields = {"target": TARGET, "source_language": "fr_XX"}
        answer = (await c.post("/explain", json=body | fields)).json()
        assert answer["source_token_ids"] == [FR, *SOURCE_IDS]


TOO_LONG = [
    *[("target", 19, 21), ("target", 25, 25), ("target", 5000, 5000)],  # 2 begin a target
    *[("text", 25, 25), ("prompt", 25, 25), ("text", 5000, 5000)],
]


async def test_a_text_that_is_too_long_is_named(model_dir: ModelDirectory) -> None:
    """A long one before it is tokenised."""
    async with client(model_dir) as c:
        for field, n_tokens, named in TOO_LONG:
            given = {} if field == "prompt" else {"text": SOURCE}
            answer = await c.post("/explain", json=given | {field: "a" * n_tokens})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == field
            numbers = [int(number) for number in re.findall(r"\d+", error["message"])]
            assert {named, 20 if field == "target" else 24} <= {*numbers}


def test_an_alignment_is_drawn(model_dir: ModelDirectory, tmp_path: Path) -> None:
    out = tmp_path / "alignment.png"
    arguments = ["explain", str(model_dir.path), SOURCE, "--target", TARGET, "--head", "0"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    with Image.open(out) as drawn:
        assert drawn.size[0] > 100

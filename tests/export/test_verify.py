"""The rows that the exporter measures on begin as served texts do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

from export.directory import sample_text
from export.kv_cache import sample_rows
from export.verify import GraphSession, SampleText, Verifier
from model.checkpoint import Checkpoint
from model.tokenizer import train_tokenizer
from tests.random_models import RandomModel, make_config, make_decoder

TEXT = np.random.default_rng(5).integers(10, 300, size=500)


class Recorded(GraphSession):
    """Keeps the first tokens of every row that is run from empty."""

    begun: list[np.ndarray[Any, Any]]

    def clear(self, batch: int, n_positions: int) -> None:
        super().clear(batch, n_positions)
        self._empty = True
        self.begun = getattr(self, "begun", [])

    def run(self, tokens: Any, *arguments: Any, **options: Any) -> Any:
        if self._empty:
            self.begun += list(tokens)
        self._empty = False
        return super().run(tokens, *arguments, **options)


def perplexity(model: RandomModel, rows: list[list[int]], first: int) -> float:
    """Slowly: a forward for every token from `first` on."""
    losses = []
    with torch.inference_mode():
        for row in rows:
            for i in range(first, len(row)):
                logits = model.decoder(torch.tensor([row[:i]]))[0, -1]
                losses.append(-logits.log_softmax(-1)[row[i]].item())
    return math.exp(np.mean(losses))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("random_model", (7, 9)), ("random_int8_model", (7,)), ("random_int8_model", ())],
)
def test_every_row_begins_with_what_the_tokenizer_puts_before_a_text(
    name: str, prefix: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """A row from the middle has no BOS, unlike the texts that a decoder is trained and used on."""
    model: RandomModel = request.getfixturevalue(name)
    session: Any = Recorded(model.graph, model.config)
    text = SampleText("text", TEXT, prefix)
    figures = Verifier(model.decoder, model.graph, text, session).verify()
    assert len(session.begun) > 8
    for row in session.begun:
        assert row.tolist()[: len(prefix)] == list(prefix)[: len(row)]
    step = 200 - len(prefix)
    rows = [[*prefix, *TEXT[i * step : (i + 1) * step + 1]] for i in range(2)]
    first = max(len(prefix), 100 if name == "random_int8_model" else 0) + 1
    assert figures.perplexity_torch == pytest.approx(perplexity(model, rows, first), rel=1e-4)
    assert figures.perplexity_onnx == pytest.approx(
        figures.perplexity_torch, rel=1e-4 if first < 50 else 0.1
    )


def test_a_prefix_is_cut_where_a_row_cannot_hold_it(random_model: RandomModel) -> None:
    text = SampleText("text", TEXT[:2], tuple(range(300)))
    figures = Verifier(random_model.decoder, random_model.graph, text).verify()
    assert figures.perplexity_torch is not None


def test_the_sample_of_keys_and_values_begins_so_too() -> None:
    rows = sample_rows(make_config(max_model_len=32), TEXT, (7, 9))
    assert rows is not None
    assert rows.shape == (8, 32)
    assert (rows[:, :2] == (7, 9)).all()
    assert rows[:, 2:].flatten().tolist() == TEXT[-8 * 30 :].tolist()
    assert sample_rows(make_config(max_model_len=32), TEXT[:239], (7, 9)) is None


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>", "<s> <s> $A"])
def test_the_prefix_is_found_in_the_tokenizer(template: str, tmp_path: Path) -> None:
    content = "<s> the same text, again and again: " * 20
    tokenizer = train_tokenizer([content], 280)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    plain = tokenizer.encode(content).ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    (tmp_path / "text.txt").write_text(content)
    checkpoint = Checkpoint(tmp_path, make_decoder(make_config()), tokenizer, {})
    sample = sample_text(checkpoint, tmp_path / "text.txt", "int8")
    assert sample is not None
    assert sample.token_ids.tolist() == plain
    assert sample.prefix == (special[0][1],) * template.split("$A", maxsplit=1)[0].count("<s>")

"""`import kvasir`: a model directory in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvasir
from kvasir.__main__ import app
from kvasir.export.directory import export_checkpoint
from kvasir.model.checkpoint import save_checkpoint
from kvasir.model.directory import EMBEDDING_FILE
from kvasir.model.tokenizer import train_tokenizer
from tests.faults.damage import with_file
from tests.kit.encoders import BERT
from tests.kit.random_models import make_config, make_decoder
from tests.kit.serving import CHAT_TEMPLATE
from tests.kit.short_samples import shorten_samples

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)

STDLIB = Path(__file__).parent.parent / "examples/stdlib"
TEXTS = ["def a(): pass", "import os", "x" * 40]
QUERIES = [f"find {text}" for text in TEXTS]


@pytest.fixture(scope="module")
def stdlib() -> Iterator[kvasir.Model]:
    with kvasir.load(STDLIB) as model:
        yield model


def test_a_text_is_the_same_whole_in_pieces_and_from_the_command(stdlib: kvasir.Model) -> None:
    command = ["generate", str(STDLIB), "def ", "--max-tokens", "9", "--seed", "4"]
    text = stdlib.generate("def ", max_tokens=9, seed=4)
    assert "".join(stdlib.stream("def ", max_tokens=9, seed=4)) == text
    assert CliRunner().invoke(app, command).stdout == text + "\n"
    middle = text[3:6]
    for stop in (middle, [middle, "\0"]):
        ended_early = stdlib.generate("def ", max_tokens=9, seed=4, stop=stop)
        assert ended_early == text.partition(middle)[0]


def test_a_reader_may_leave_but_two_cannot_read_at_once() -> None:
    with kvasir.load(STDLIB) as model:
        whole = model.generate("a", max_tokens=20, temperature=0)
        first = model.stream("b", max_tokens=20)
        next(first)
        with pytest.raises(ValueError, match="has not ended"):
            model.generate("a", max_tokens=20, temperature=0)
        first.close()
        assert model.generate("a", max_tokens=20, temperature=0) == whole
    for use in (partial(model.generate, "a"), partial(model.embed, ["a"])):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_temperature_next_to_0_is_0(stdlib: kvasir.Model) -> None:
    """A model's default as well: no float32 is as large as what logits would be multiplied by."""
    texts = {stdlib.generate("def ", max_tokens=9, temperature=of) for of in (0, 1e-40)}
    assert len(texts) == 1


def test_wrong_options_are_named(stdlib: kvasir.Model) -> None:
    wrong: dict[str, Any] = {"temperature": -1, "top_k": "x", "top_p": 2, "max_tokens": 0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} [^\n]*must be [^\n]+$"):
            stdlib.generate("a", **{name: value})
    with pytest.raises(ValueError, match="stop text"):
        stdlib.generate("a", stop=[""])
    with pytest.raises(ValueError, match="makes no vectors"):
        stdlib.embed(["a"])
    with pytest.raises(ValueError, match="no chat template"):
        stdlib.generate([{"role": "user", "content": "a"}])


def test_a_chat_is_its_templates_text(tmp_path: Path) -> None:
    folder = with_file(tmp_path / "model", "chat_template.jinja", CHAT_TEMPLATE.encode())
    with kvasir.load(folder) as model:
        answer = model.generate([{"role": "user", "content": "def"}], max_tokens=9, seed=1)
        assert answer == model.generate("u>def\na>", max_tokens=9, seed=1)


def test_vectors_are_the_networks(tmp_path: Path) -> None:
    config = make_config(**BERT)
    network = make_decoder(config).eval()
    tokenizer = train_tokenizer(TEXTS * 4, config.vocab_size)
    embedding = {"prompts": {"query": "find ", "document": ""}, "default_prompt_name": "query"}
    files = {EMBEDDING_FILE: json.dumps(embedding).encode()}
    save_checkpoint(tmp_path / "run", 1, network, tokenizer, {}, {}, extra_files=files)
    export_checkpoint(tmp_path / "run", tmp_path / "model", precision="fp32")
    with kvasir.load(tmp_path / "model") as model:
        vectors = model.embed(TEXTS, prompt_name="document")
        assert np.array_equal(model.embed(TEXTS), model.embed(QUERIES, prompt_name="document"))
        empty: list[str] = []
        for one in (empty, "a"):
            with pytest.raises(ValueError, match="list of at least one text"):
                model.embed(one)
        with pytest.raises(ValueError, match="no prompt 'passage'; it has query, document"):
            model.embed(["a"], prompt_name="passage")
        with pytest.raises(ValueError, match="vectors"):
            model.generate("a")
        with pytest.raises(ValueError, match="text 1 has 0 tokens"):
            model.embed(["a", ""], prompt_name="document")
    command = ["embed", str(tmp_path / "model"), *TEXTS, "--prompt-name", "document"]
    lines = CliRunner().invoke(app, command).stdout.splitlines()
    assert np.array_equal(np.array([*map(json.loads, lines)], np.float32), vectors)
    refused = CliRunner().invoke(app, ["generate", str(tmp_path / "model"), "a"])
    assert (refused.exit_code, "kvasir embed" in refused.stderr) == (1, True)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        expected = network.encode(ids, torch.tensor([ids.shape[1]]))[0]
        assert vector == pytest.approx(expected.detach().numpy(), abs=1e-5)

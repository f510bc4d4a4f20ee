"""`import kvasir`: a model directory in this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvasir
from kvasir.export.directory import export_checkpoint
from kvasir.model.checkpoint import save_checkpoint
from kvasir.model.config import Pooling
from kvasir.model.tokenizer import train_tokenizer
from tests.random_models import make_config, make_decoder

STDLIB = Path(__file__).parent.parent / "examples/stdlib"
TEXTS = ["def a(): pass", "import os", "x" * 40]


def test_a_text_is_the_same_whole_in_pieces_and_from_the_command() -> None:
    command = [sys.executable, "-m", "kvasir", "generate", str(STDLIB), "def "]
    command += ["--max-tokens", "9", "--seed", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    with kvasir.load(STDLIB) as model:
        text = model.generate("def ", max_tokens=9, seed=4)
        assert "".join(model.stream("def ", max_tokens=9, seed=4)) == text
        assert ended.stdout == text + "\n"
        middle = text[3:6]
        ended_early = model.generate("def ", max_tokens=9, seed=4, stop=[middle])
        assert ended_early == text.partition(middle)[0]


def test_a_reader_may_leave_but_two_cannot_read_at_once() -> None:
    with kvasir.load(STDLIB) as model:
        whole = model.generate("a", max_tokens=20, temperature=0)
        first = model.stream("b", max_tokens=20)
        next(first)
        with pytest.raises(ValueError, match="has not ended"):
            model.generate("a", max_tokens=20, temperature=0)
        first.close()  # type: ignore[attr-defined]
        assert model.generate("a", max_tokens=20, temperature=0) == whole
    with pytest.raises(ValueError, match="closed"):
        model.generate("a")


def test_vectors_are_the_networks(tmp_path: Path) -> None:
    config = make_config(
        causal=False, position="learned", pooling=Pooling(kind="mean", normalize=True)
    )
    network = make_decoder(config).eval()
    tokenizer = train_tokenizer(TEXTS * 4, config.vocab_size)
    save_checkpoint(tmp_path / "run", 1, network, tokenizer, {}, {})
    export_checkpoint(tmp_path / "run", tmp_path / "model", precision="fp32")
    with kvasir.load(tmp_path / "model") as model:
        vectors = model.embed(TEXTS)
        with pytest.raises(ValueError, match="vectors"):
            model.generate("a")
        with pytest.raises(ValueError, match="text 1 has 0 tokens"):
            model.embed(["a", ""])
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        expected = network.encode(ids, torch.tensor([ids.shape[1]]))[0]
        assert vector == pytest.approx(expected.detach().numpy(), abs=1e-5)

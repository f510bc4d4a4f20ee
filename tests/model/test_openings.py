"""Example prompts of a checkpoint: beginnings of what was held out, not of what was learned."""

from __future__ import annotations

import json
from pathlib import Path

from kvasir.model.directory import EXAMPLES_FILE
from kvasir.model.tokenizer import train_tokenizer
from kvasir.model.training.data.corpus import Corpus
from kvasir.model.training.data.openings import example_prompts
from kvasir.model.training.data.tokens import write_tokens

TEXTS = [f"number{i} begins here, and {'goes on ' * 20}until it ends" for i in range(40)]


def test_openings_begin_documents_that_were_held_out(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    tokens = write_tokens(Corpus(TEXTS, 0), tokenizer, tmp_path / "data", 0.2, 8)
    prompts = json.loads(example_prompts(tokens, tokenizer)[EXAMPLES_FILE])
    learned = tokenizer.decode(tokens.tokens[: tokens.n_train].tolist())
    assert len(set(prompts)) == len(prompts) == 3
    for prompt in prompts:
        assert any(text.startswith(f"{prompt} ") for text in TEXTS)
        assert prompt not in learned


def test_a_text_without_an_end_has_openings_too(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    whole = Corpus([" ".join(TEXTS)], 0)
    tokens = write_tokens(whole, tokenizer, tmp_path / "data", 0.2, 8)
    prompts = json.loads(example_prompts(tokens, tokenizer)[EXAMPLES_FILE])
    assert prompts
    assert all(prompt in tokenizer.decode(tokens.held_out.tolist()) for prompt in prompts)

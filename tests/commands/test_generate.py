"""`kvasir generate`: its text, its default length, and the probabilities of its tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import kvasir.model.directory
from kvasir.__main__ import app
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence
from kvasir.server.process.engine_builder import build_engine
from kvasir.server.settings import load_settings

EXAMPLES = Path(__file__).parents[2] / "examples"
STDLIB = str(EXAMPLES / "stdlib")


def generate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], prog_name="kvasir")


def test_a_completion_is_the_same_for_people_and_for_scripts() -> None:
    arguments = [STDLIB, "def main():", "--max-tokens", "6", "--seed", "3"]
    found = json.loads(generate(*arguments, "--json").stdout)
    assert generate(*arguments).stdout == found["text"] + "\n"
    assert (len(found["token_ids"]), found["finish_reason"], found["seed"]) == (6, "length", 3)
    model_dir = kvasir.model.directory.load_model_dir(Path(STDLIB))
    assert (
        model_dir.tokenizer.decode(found["prompt_token_ids"] + found["token_ids"])
        == "def main():" + found["text"]
    )


def test_a_prompt_that_cannot_fit_is_an_error() -> None:
    result = generate(STDLIB, "a", "--max-tokens", "100000")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "100000" in result.stderr


def test_without_a_number_as_many_tokens_come_as_fit() -> None:
    """128 and the token that begins a target were one more than the example's positions."""
    assert generate(str(EXAMPLES / "numbers"), "forty-two").exit_code == 0
    model_dir = kvasir.model.directory.load_model_dir(Path(STDLIB))
    most = model_dir.config.max_model_len
    prompt = model_dir.tokenizer.decode(
        model_dir.tokenizer.encode("import os\n" * most).ids[: most - 3]
    )
    n_prompt = len(model_dir.tokenizer.encode(prompt).ids)
    assert most - 128 < n_prompt < most
    found = json.loads(generate(STDLIB, prompt, "--temperature", "0", "--json").stdout)
    assert (len(found["token_ids"]), found["finish_reason"]) == (most - n_prompt, "length")


def test_probabilities_are_the_models_of_the_tokens() -> None:
    arguments = [STDLIB, "import ", "--max-tokens", "5", "--seed", "1", "--show-probabilities"]
    tokens = json.loads(generate(*arguments, "--json").stdout)["tokens"]
    model_dir = kvasir.model.directory.load_model_dir(Path(STDLIB))
    engine = build_engine(load_settings(model=Path(STDLIB), max_num_seqs=1), model_dir)
    ids = model_dir.tokenizer.encode("import ").ids
    scored = ids + [token["id"] for token in tokens]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    engine.add(Sequence(0, scored, params, frozenset(), 0.0))
    scores = engine.step()[0][0].prompt_logprobs or []
    known = [math.exp(one.logprob) for one in scores[len(ids) - 1 :]]
    assert [token["probability"] for token in tokens] == pytest.approx(known, rel=0.1)
    lines = generate(*arguments).stdout.splitlines()
    assert lines == [f"{t['probability']:6.1%}  {t['text']!r}" for t in tokens]

"""`kvasir generate`: the engine's text, in pieces, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.console.terminal import complete
from model.bundle import GRAPH_FILE, ModelBundle
from model.reference import generate as oracle
from model.tokenizer import train_tokenizer
from server.engine.engine import Engine
from server.engine.sampling import SamplingParams
from tests.random_models import RandomModel

TEXT = "for name, value in zip(names, values): print(f'{name} = {value}')"


@pytest.fixture(scope="module")
def served(random_model: RandomModel) -> tuple[Engine, ModelBundle]:
    tokenizer = train_tokenizer([Path(__file__).read_text()], random_model.config.vocab_size)
    assert tokenizer.get_vocab_size() == random_model.config.vocab_size
    folder = random_model.graph.parent
    bundle = ModelBundle(folder, random_model.config, manifest=None, tokenizer=tokenizer)  # type: ignore[arg-type]
    assert bundle.graph_path == folder / GRAPH_FILE
    return Engine(random_model.runner(max_num_seqs=1), chunk_size=16), bundle


def test_the_pieces_are_the_oracles_text(
    random_model: RandomModel, served: tuple[Engine, ModelBundle]
) -> None:
    engine, bundle = served
    prompt_ids = bundle.tokenizer.encode(TEXT).ids
    params = SamplingParams(max_tokens=20, temperature=0.0)
    *pieces, last = complete(engine, bundle, prompt_ids, params)
    text = "".join(piece.text for piece in [*pieces, last])
    ids = oracle(random_model.decoder, prompt_ids, max_tokens=20)
    assert text == bundle.tokenizer.decode(prompt_ids + ids)[len(TEXT) :]
    assert [piece.token_id for piece in pieces] == ids
    assert last.finish_reason == ("stop" if len(ids) < 20 else "length")

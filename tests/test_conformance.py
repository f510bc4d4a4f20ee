"""Light clients on a fake model. `make conformance` runs these and heavier ones on a real model."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.conformance.server import CAPACITY, Server
from tests.kit.fake_runner import FakeRunner
from tests.kit.live import KEY, live
from tests.kit.serving import MODEL, VOCAB_SIZE

# Imported by their tests: Anthropic's alone takes a second, which every worker would spend.
CLIENTS = [("openai_client", "use_openai"), ("openai_batches", "use_openai_batches")]
CLIENTS += [("anthropic_client", "use_anthropic"), ("huggingface_client", "use_huggingface")]


# The openai package causes this warning with `parsed`.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(("module", "use"), CLIENTS)
def test_a_client_finds_what_it_expects(module: str, use: str, tmp_path: Path) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000, max_num_seqs=CAPACITY)
    with live(runner, max_queue=CAPACITY, batch_dir=tmp_path) as served:
        client = import_module(f"tests.conformance.{module}")
        conformed = getattr(client, use)(Server(served.url, MODEL, KEY, runner.max_model_len))
    assert conformed.calls > 5

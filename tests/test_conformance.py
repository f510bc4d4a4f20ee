"""Light clients on a fake model. `make conformance` runs these and heavier ones on a real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.anthropic_client import use_anthropic
from tests.conformance.huggingface_client import use_huggingface
from tests.conformance.openai_batches import use_openai_batches
from tests.conformance.openai_client import use_openai
from tests.conformance.server import CAPACITY, Conformed, Server
from tests.kit.fake_runner import FakeRunner
from tests.kit.live import KEY, live
from tests.kit.serving import MODEL, VOCAB_SIZE

CLIENTS = (use_openai, use_openai_batches, use_anthropic, use_huggingface)


# The openai package causes this warning with `parsed`.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("use", CLIENTS)
def test_a_client_finds_what_it_expects(use: Callable[[Server], Conformed], tmp_path: Path) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000, max_num_seqs=CAPACITY)
    with live(runner, max_queue=CAPACITY, batch_dir=tmp_path) as served:
        conformed = use(Server(served.url, MODEL, KEY, runner.max_model_len))
    assert conformed.calls > 5

"""Every family against transformers, which shares no line with the decoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.export.graph import export_graph
from kvasir.model.checkpoint import load_checkpoint
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling import SamplingParams
from tests.engine_driver import make_sequence, run_to_end
from tests.huggingface_checkpoints import FAMILIES, LENGTH, make_model, save_checkpoint
from tests.random_models import RandomModel

N_NEW = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute with one thread: the products are too small for more, which would only spin."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, tmp_path: Path) -> None:
    """Compare logits with the original in PyTorch, and greedy tokens with the served graph."""
    model: Any = make_model(name)
    decoder = load_checkpoint(save_checkpoint(tmp_path / "theirs", model)).decoder
    torch.manual_seed(4)
    input_ids = torch.randint(decoder.config.vocab_size, (2, LENGTH))
    with torch.inference_mode():
        theirs, ours = model(input_ids).logits, decoder(input_ids)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.std()

    prompt = input_ids[:1, : LENGTH - N_NEW - 2]
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=N_NEW, do_sample=False
    )
    expected = generated[0, prompt.shape[1] :].tolist()
    # A text of few tokens would hide mistakes. BLOOM's soon repeat themselves.
    assert len(set(expected)) >= (3 if name == "bloom" else 12)
    export_graph(decoder.config, decoder.state_dict(), tmp_path / "model.onnx")
    engine = Engine(
        RandomModel(decoder, tmp_path / "model.onnx").runner(max_num_seqs=1, threads=1),
        chunk_size=16,
    )
    sequence = make_sequence(
        0, prompt[0].tolist(), SamplingParams(max_tokens=N_NEW, temperature=0.0)
    )
    assert run_to_end(engine, [sequence])[0].token_ids == expected

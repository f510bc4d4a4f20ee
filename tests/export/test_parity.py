"""The exported graph against PyTorch, for every kind of decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.export.graphs import layers
from kvasir.export.graphs.decoder import load_weights
from kvasir.export.verification.verify import VerificationError, check
from kvasir.model.reference import generate
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import SamplingParams
from tests.kit.engine_driver import make_sequence, run_to_end
from tests.kit.random_models import (
    RandomModel,
    export_decoder,
    export_random,
    make_config,
    make_decoder,
)
from tests.model.variants import VARIANTS


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_graph_computes_what_pytorch_does(changes: dict[str, Any], tmp_path: Path) -> None:
    """Prefill, chunks, ragged decode, a full row; then the engine against uncached generation."""
    model = export_random(tmp_path, **changes)
    figures = model.verify()
    assert figures.max_logit_error < 2e-5
    assert figures.greedy_agreement == 1.0

    generator = np.random.default_rng(0)
    engine = Engine(model.runner(max_num_seqs=3), chunk_size=7)
    requests = []
    for i in range(7):
        n_prompt, n_new = int(generator.integers(1, 40)), int(generator.integers(1, 20))
        prompt = generator.integers(model.config.vocab_size, size=n_prompt).tolist()
        options: dict[str, Any] = {"max_tokens": n_new, "temperature": 0.0}
        if i % 2:
            options |= {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": i}
        requests.append((prompt, options))
    sequences = [
        make_sequence(i, prompt, SamplingParams(**options))
        for i, (prompt, options) in enumerate(requests)
    ]
    results = run_to_end(engine, sequences)
    for i, (prompt, options) in enumerate(requests):
        assert results[i].token_ids == generate(model.decoder, prompt, **options)

    # The graph carries its decoder, though the exporter keeps one copy of equal weights.
    expected = model.decoder.state_dict()
    loaded = load_weights(model.config, model.graph)
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(loaded[key], value, rtol=2e-7, atol=0.0)


def test_layers_that_are_alike_are_traced_once() -> None:
    decoder = make_decoder(make_config(**VARIANTS["gemma"] | {"n_layer": 3}))
    first, second, third = map(layers.kind_of, decoder.blocks)
    assert first != second == third


def test_a_logit_that_is_no_number_fails_wherever_it_is(tmp_path: Path) -> None:
    """Python's max passes over a NaN that does not come first; only the last position is one."""
    decoder = make_decoder(make_config(**VARIANTS["gpt2"]))
    with torch.no_grad():
        decoder.position_embedding.weight[-1] = torch.nan
    figures = export_decoder(decoder, tmp_path, "int8").verify()
    assert np.isnan(figures.max_logit_error)
    perplexities = {"perplexity_torch": 5.0, "perplexity_onnx": 5.0}
    for precision in ("fp32", "int8"):
        with pytest.raises(VerificationError, match="nan"):
            check(figures.model_copy(update=perplexities), precision)


def test_a_quantised_graph_has_lost_its_decoder(random_int8_model: RandomModel) -> None:
    with pytest.raises(ValueError, match="quantised"):
        load_weights(random_int8_model.config, random_int8_model.graph)

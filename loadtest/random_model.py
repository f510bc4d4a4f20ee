"""Model directories of a preset's shape with random weights: for measuring, as fast as trained ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, models

import export
import model
from export.directory import export_checkpoint
from model.bundle import MANIFEST_FILE, PRECISIONS, Device
from model.checkpoint import save_checkpoint
from model.config import ConfigError, DecoderConfig, preset
from model.network.decoder import Decoder
from model.progress import Progress, unheard
from model.tokenizer import train_tokenizer

_PREFIX = "random"


def make_random_model(
    name: str, precision: str, out: Path, device: Device = "cpu", progress: Progress = unheard
) -> Path:
    """Write a preset's model directory to `out`, unless it is there already; one of an older exporter is replaced.

    Raises ConfigError for an unknown preset or precision, and FileExistsError where `out` holds something else.
    """
    if precision not in PRECISIONS[device]:
        raise ConfigError(
            f"no precision {precision!r} for {device}; there are {', '.join(PRECISIONS[device])}"
        )
    config = preset(name)
    source = f"{_PREFIX}-{name}-{device}-{precision}-{_fingerprint(config)}"
    found = _source(out)
    if found == source:
        return out
    if found.startswith(f"{_PREFIX}-"):
        shutil.rmtree(out)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        run, text = Path(folder) / source, Path(folder) / "text.txt"
        text.write_text(
            str(__doc__), encoding="utf-8"
        )  # int8 is verified on text; to random weights any is the same
        save_checkpoint(run, 0, Decoder(config), dummy_tokenizer(config.vocab_size), {}, {})
        export_checkpoint(
            run, out, device=device, precision=precision, text=text, progress=progress
        )
    return out


def dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """Text is encoded byte by byte; every other id decodes to a word of its own, so each token shows in a stream."""
    tokenizer = train_tokenizer([], 257)
    vocabulary = tokenizer.get_vocab()
    words = product(ascii_lowercase, repeat=4)
    for token_id in range(len(vocabulary), vocab_size):
        vocabulary["Ġ" + "".join(next(words))] = (
            token_id  # how byte-level vocabularies write a space
        )
    tokenizer.model = models.BPE(vocab=vocabulary, merges=[])
    return tokenizer


def _source(directory: Path) -> str:
    """What the directory's manifest says it was made from; empty where there is none."""
    manifest = directory / MANIFEST_FILE
    return str(json.loads(manifest.read_bytes())["source"]["name"]) if manifest.is_file() else ""


def _fingerprint(config: DecoderConfig) -> str:
    """Changes with the shape, and with every source file that decides what the graph looks like."""
    digest = hashlib.sha256(json.dumps(asdict(config)).encode())
    names = ("attention.py", "decoder.py", "norm.py", "paged_attention.py", "positions.py")
    files = [Path(model.__path__[0]) / name for name in names]
    for file in (*files, *sorted(Path(export.__path__[0]).glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]

"""Model directories of a preset's shape with random weights, which run as fast as trained ones."""

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

import kvasir.export
import kvasir.model.network
from kvasir.export.directory import check_precision, export_checkpoint
from kvasir.model.checkpoint import save_checkpoint
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import MANIFEST_FILE, Device
from kvasir.model.network.transformer import Transformer
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.presets import preset
from kvasir.model.tokenizer import train_tokenizer

_PREFIX = "random"


def folder_name(name: str, precision: str, device: Device, **shape: int) -> str:
    """Return the name of a random model's folder among others; shape: as `make_random_model`."""
    of_device = () if device == "cpu" else (device,)
    return "-".join((name, *of_device, precision, *map(str, shape.values())))


def make_random_model(
    name: str,
    precision: str,
    out: Path,
    device: Device = "cpu",
    progress: Progress = no_progress,
    *,
    kv_cache: str | None = None,
    scale: float = 1.0,
    **shape: int,
) -> Path:
    """Write a preset's model directory to `out`, unless the present exporter has written it before.

    kv_cache: see `export_checkpoint`. scale: of all matrices; in a small model only large ones make
    attention matter. shape: replaces what the preset has. Raises ValueError for an unknown preset
    or precision, and FileExistsError if `out` holds anything else.
    """
    check_precision(precision, device)
    config = preset(name, **shape)
    if config.pooling is not None:
        measured = "measure encoders with: kvasir bench serve DIR --workload embed"
        raise ValueError(f"{name} generates no text; {measured}")
    source = f"{_PREFIX}-{name}-{device}-{precision}-{kv_cache}-{scale}-{_fingerprint(config)}"
    manifest = out / MANIFEST_FILE
    written = json.loads(manifest.read_bytes())["source"]["name"] if manifest.is_file() else ""
    if written == source:
        return out
    if written.startswith(f"{_PREFIX}-"):
        shutil.rmtree(out)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        run, text = Path(folder) / source, Path(__file__)  # any text verifies int8's random weights
        decoder = Transformer(config)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.mul_(scale if parameter.dim() > 1 else 1)
        save_checkpoint(run, 0, decoder, dummy_tokenizer(config.vocab_size), {}, {})
        export_checkpoint(
            run, out, device=device, precision=precision, kv_cache=kv_cache, text=text,
            progress=progress,
        )  # fmt: skip
    return out


def dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """Make a tokenizer of bytes and different words, so that every token shows as text."""
    tokenizer = train_tokenizer([], 257)
    vocabulary = tokenizer.get_vocab()
    words = product(ascii_lowercase, repeat=4)
    for token_id in range(len(vocabulary), vocab_size):
        vocabulary["Ġ" + "".join(next(words))] = token_id  # Ġ is a space in byte-level vocabularies
    tokenizer.model = models.BPE(vocab=vocabulary, merges=[])
    return tokenizer


def _fingerprint(config: TransformerConfig) -> str:
    """Hash the shape and every source file that decides the graph."""
    digest = hashlib.sha256(json.dumps(asdict(config)).encode())
    for package in (kvasir.model.network, kvasir.export):
        for file in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]

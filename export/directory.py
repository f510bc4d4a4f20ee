"""Checkpoint → model directory: the graph, the manifest and the proof, all or nothing."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from itertools import takewhile
from operator import itemgetter
from pathlib import Path

import numpy as np
import onnx_ir
import torch
from pydantic import ValidationError

from export.attention_graph import write_attention_graph
from export.graph import export_graph, load_decoder
from export.kv_cache import sample_rows
from export.paged_graph import KV_DTYPES, check_pageable, export_paged_graph
from export.paged_session import PagedSession
from export.verify import MAX_PERPLEXITY_LOSS, SampleText, Verifier, check
from model.bundle import (
    CONFIG_FILE,
    FORMAT_VERSION,
    GENERATION_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    PRECISIONS,
    TOKENIZER_FILE,
    Device,
    GenerationDefaults,
    Manifest,
    Verification,
    hash_files,
    load_bundle,
    sha256,
)
from model.checkpoint import WEIGHTS_FILE, Checkpoint, CheckpointError, load_checkpoint
from model.files import new_directory
from model.network.decoder import Decoder
from model.progress import Progress, unheard
from model.training.data import DATA_FOLDER, open_tokens

_VERSIONS = ("torch", "onnx", "onnxruntime", "kvasir-lm")


class SourceMismatchError(Exception):
    """A checkpoint that is not the one a model directory was made from."""


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    device: Device = "cpu",
    precision: str | None = None,
    kv_cache: str | None = None,
    text: Path | None = None,
    generation: GenerationDefaults | None = None,
    max_model_len: int | None = None,
    progress: Progress = unheard,
) -> Manifest:
    """Export a checkpoint, or a training run's newest, to a model directory.

    device: a graph for cuda is verified on a GPU, so there must be one. precision: None is the device's first.
    kv_cache: on cuda, one of KV_DTYPES; None is the type of activations. text: what perplexity is measured on; None is
    the run's held-out text, or English prose where a precision has to be measured and there is none. generation: how
    requests to the model are sampled unless they say otherwise, over the checkpoint's own advice field by field.
    max_model_len: the longest row; None is the checkpoint's. Written beside `out` and renamed into place, so a failure
    leaves nothing. Raises CheckpointError, VerificationError, FileExistsError when `out` is in use, and ValueError for
    text, a precision, a device or a decoder that cannot be used with the others.
    """
    precision = _check_precision(device, precision)
    if kv_cache is not None and (device != "cuda" or kv_cache not in KV_DTYPES):
        raise ValueError(
            f"no kv cache {kv_cache!r} on {device}; on cuda there are {', '.join(KV_DTYPES)}"
        )
    progress("reading the checkpoint", 0, 0)
    checkpoint = load_checkpoint(source, max_model_len)
    if device == "cuda":
        check_pageable(checkpoint.decoder.config)
        PagedSession.require()
    sample = sample_text(checkpoint, text, precision)
    files = dict(checkpoint.extra_files)
    if advice := _advice(checkpoint, generation):
        files[GENERATION_FILE] = json.dumps(advice, indent=2).encode() + b"\n"
    with new_directory(out) as part:
        checkpoint.decoder.config.save(part / CONFIG_FILE)
        checkpoint.tokenizer.save(str(part / TOKENIZER_FILE))
        for name, content in files.items():
            (part / name).write_bytes(content)
        rows = (
            sample_rows(checkpoint.decoder.config, sample.token_ids, sample.prefix)
            if sample
            else None
        )
        if device == "cuda":
            export_paged_graph(
                checkpoint.decoder, part / GRAPH_FILE, precision, kv_cache, rows, progress
            )
        else:
            export_graph(checkpoint.decoder, part / GRAPH_FILE, precision, rows, progress)
            write_attention_graph(part)
        verification = _verifier(checkpoint.decoder, part / GRAPH_FILE, sample, device).verify(
            progress
        )
        check(verification, precision)
        source_of = _describe_source(checkpoint)
        manifest = make_manifest(
            checkpoint.decoder, part, precision, source_of, verification, device
        )
        manifest.save(part / MANIFEST_FILE)
    return manifest


def verify_directory(
    directory: Path,
    source: Path | None = None,
    text: Path | None = None,
    progress: Progress = unheard,
) -> tuple[Manifest, Verification | None]:
    """A model directory's manifest, whose hashes are right, and its figures measured now.

    The reference is the checkpoint it came from, which also brings the held-out text, or else the decoder rebuilt from
    the graph's own weights; None where rounding has left the graph without them. Raises BundleError, CheckpointError,
    SourceMismatchError, VerificationError and ValueError.
    """
    progress("reading the model", 0, 0)
    bundle = load_bundle(directory)
    if source is None and bundle.manifest.precision != "fp32":
        if text is not None:
            raise ValueError(
                f"perplexity on {text} is measured against the weights before rounding: name --checkpoint"
            )
        return bundle.manifest, None
    if source is None:
        rebuilt = load_decoder(bundle.config, bundle.graph_path)
        checkpoint = Checkpoint(directory, rebuilt, bundle.tokenizer, {})
    else:
        checkpoint = load_checkpoint(source, bundle.config.max_model_len)
        if sha256(checkpoint.path / WEIGHTS_FILE) != bundle.manifest.source.get("sha256"):
            raise SourceMismatchError(
                f"{directory} was not exported from {checkpoint.path}: the hashes differ"
            )
    sample = sample_text(checkpoint, text, bundle.manifest.precision)
    measured = _verifier(
        checkpoint.decoder, bundle.graph_path, sample, bundle.manifest.device
    ).verify(progress)
    check(measured, bundle.manifest.precision)
    return bundle.manifest, measured


def _check_precision(device: Device, precision: str | None) -> str:
    if precision is None:
        return PRECISIONS[device][0]
    if precision not in PRECISIONS[device]:
        raise ValueError(
            f"no precision {precision!r} for {device}; there are {', '.join(PRECISIONS[device])}"
        )
    return precision


def _verifier(decoder: Decoder, path: Path, sample: SampleText | None, device: str) -> Verifier:
    if device == "cpu":
        return Verifier(decoder, path, sample)
    on_gpu = decoder.to("cuda") if torch.cuda.is_available() else decoder
    return Verifier(on_gpu, path, sample, PagedSession.open(path, decoder.config))


def make_manifest(
    decoder: Decoder,
    directory: Path,
    precision: str,
    source: dict[str, str | int | float],
    verification: Verification,
    device: Device = "cpu",
) -> Manifest:
    """The manifest of a directory whose other files are all written."""
    config, graph = decoder.config, onnx_ir.load(directory / GRAPH_FILE).graph
    return Manifest(
        format_version=FORMAT_VERSION,
        architecture="kvasir-decoder",
        parameters=decoder.n_parameters,
        device=device,
        precision=precision,
        max_model_len=config.max_model_len,
        graph_inputs=[str(value.name) for value in graph.inputs],
        graph_outputs=[str(value.name) for value in graph.outputs],
        versions={name: version(name) for name in _VERSIONS},
        files=hash_files(directory),
        source=source,
        verification=verification,
    )


def sample_text(checkpoint: Checkpoint, file: Path | None, precision: str) -> SampleText | None:
    """A file's text, or what the run's training never saw, or, where a precision is measured on text, English prose.

    Raises ValueError for a file that is not UTF-8 text of two tokens at least.
    """
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text") from None
        return _tokenised(checkpoint, file.name, text)
    run = checkpoint.path.parent
    if checkpoint.progress and (run / DATA_FOLDER).is_dir():
        held_out = open_tokens(run / DATA_FOLDER).held_out.astype(np.int64)
        return SampleText(f"held-out text of {run.name}", held_out, _prefix(checkpoint))
    if precision in MAX_PERPLEXITY_LOSS and (prose := _english_prose()):
        return _tokenised(
            checkpoint, f"Python {sys.version_info[0]}.{sys.version_info[1]}'s pydoc topics", prose
        )
    return None


def _tokenised(checkpoint: Checkpoint, name: str, text: str) -> SampleText:
    token_ids = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
    if len(token_ids) < 2:
        raise ValueError(f"{name} has {len(token_ids)} tokens, too few to measure on")
    return SampleText(name, np.array(token_ids, dtype=np.int64), _prefix(checkpoint))


def _prefix(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before any text, such as BOS."""
    encoding = checkpoint.tokenizer.encode("a")
    pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    return tuple(token_id for token_id, _ in takewhile(itemgetter(1), pairs))


def _english_prose() -> str | None:
    """Topics of the language's reference, half a million characters; some distributions of Python leave them out."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415
    except ImportError:
        return None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _advice(checkpoint: Checkpoint, generation: GenerationDefaults | None) -> dict[str, float]:
    """How requests are sampled: what is asked for, over what the checkpoint brings."""
    try:
        own = GenerationDefaults.model_validate_json(
            checkpoint.extra_files.get(GENERATION_FILE, b"{}")
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = (
            f"{checkpoint.path / GENERATION_FILE}: {'.'.join(map(str, first['loc'])) or 'the file'}"
        )
        raise CheckpointError(f"{where}: {first['msg']}") from None
    return own.given() | (generation.given() if generation is not None else {})


def _describe_source(checkpoint: Checkpoint) -> dict[str, str | int | float]:
    """Which weights these are, and what their training noted: steps, tokens, hours."""
    source: dict[str, str | int | float] = {
        "name": checkpoint.path.parent.name if checkpoint.progress else checkpoint.path.name,
        "sha256": sha256(checkpoint.path / WEIGHTS_FILE),
    }
    for key in ("step", "train_tokens", "held_out_tokens", "seconds", "held_out_loss"):
        if checkpoint.progress.get(key) is not None:
            source[f"training_{key}" if key in ("step", "seconds") else key] = checkpoint.progress[
                key
            ]
    return source

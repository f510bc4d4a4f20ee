"""Checkpoint → model directory: the graph, the manifest and the verification, all or nothing."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx_ir
from pydantic import ValidationError

from export.attention_graph import write_attention_graph
from export.encoder_graph import export_encoder_graph
from export.graph import export_graph, load_weights
from export.kv_cache import KVScales
from export.paged_graph import KV_DTYPES, check_pageable, export_paged_graph
from export.verification.paged_session import PagedSession, require_cuda
from export.verification.plan import FEWEST_TOKENS, SampleText
from export.verification.segments import SegmentedGraph
from export.verification.vectors import verify_vectors
from export.verification.verify import MAX_PERPLEXITY_LOSS, VerificationError, Verifier, check
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
)
from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from model.config import TransformerConfig, first_problem
from model.files import new_directory
from model.network.skeleton import count_parameters
from model.progress import Progress, unheard
from model.tensor_files import hash_weights
from model.tokenizer import leading_ids
from model.training.data import DATA_FOLDER, open_tokens

# The manifest's names for what a checkpoint notes of its training.
_NOTES = {"step": "training_step", "seconds": "training_seconds"}
_NOTES |= {name: name for name in ("train_tokens", "held_out_tokens")}
_NOTES |= {name: name for name in ("held_out_loss", "held_out_accuracy")}
_VERSIONS = ("torch", "onnx", "onnxruntime", "kvasir-lm")
_PYDOC = f"Python {sys.version_info[0]}.{sys.version_info[1]}'s pydoc topics"


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    device: Device = "cpu",
    precision: str | None = None,
    kv_cache: str | None = None,
    int8_prompts: bool = True,
    text: Path | None = None,
    generation: GenerationDefaults | None = None,
    max_model_len: int | None = None,
    progress: Progress = unheard,
) -> tuple[Manifest, tuple[str, ...]]:
    """Export what `load_checkpoint` opens to a model directory, all or nothing.

    Returns its manifest, and notes on what was left out of a published model.

    device: a graph for cuda is verified on a GPU, so there must be one. precision: None is the
    device's first. kv_cache: on cuda, one of KV_DTYPES; None is the type of activations.
    int8_prompts: give int4 on the CPU int8 weights as well, for prompts. text: see `sample_text`.
    generation: recommended sampling, which overrides the checkpoint's field by field.
    max_model_len: the longest row; None is the checkpoint's. Raises CheckpointError,
    VerificationError, FileExistsError when `out` is in use, and ValueError for text, a precision, a
    device or a decoder that cannot be used with the others.
    """
    precision = PRECISIONS[device][0] if precision is None else precision
    check_precision(precision, device)
    if kv_cache is not None and (device != "cuda" or kv_cache not in KV_DTYPES):
        known = ", ".join(KV_DTYPES)
        raise ValueError(f"no kv cache {kv_cache!r} on {device}; on cuda there are {known}")
    if not int8_prompts and (device, precision) != ("cpu", "int4"):
        raise ValueError(f"{precision} on {device} has no int8 prompts; only int4 on cpu has")
    progress("reading the checkpoint", 0, 0)
    checkpoint = load_checkpoint(source, max_model_len)
    config, weights = checkpoint.config, checkpoint.weights
    if config.encoder is not None:
        raise ValueError(f"{source} is an encoder-decoder, which Kvasir reads but does not export")
    if device == "cuda":
        check_pageable(config)
        require_cuda()
    if config.pooling is not None:
        check_vector_options(device, precision, text)
    sample = None if config.pooling else sample_text(checkpoint, text, precision)
    files = dict(checkpoint.extra_files)
    try:
        brought = GenerationDefaults.model_validate_json(files.get(GENERATION_FILE, b"{}"))
    except ValidationError as error:
        file = checkpoint.path / GENERATION_FILE
        raise CheckpointError(f"{file}: {first_problem(error)}") from None
    if recommended := brought.given() | (generation.given() if generation else {}):
        files[GENERATION_FILE] = json.dumps(recommended, indent=2).encode() + b"\n"
    with new_directory(out) as part:
        config.save(part / CONFIG_FILE)
        checkpoint.tokenizer.save(str(part / TOKENIZER_FILE))
        for name, content in files.items():
            (part / name).write_bytes(content)
        graph = part / GRAPH_FILE
        if config.pooling is not None:
            export_encoder_graph(config, weights, graph, precision, progress)
            tokenizer = checkpoint.tokenizer
            write_attention_graph(part)
            figures = verify_vectors(config, weights, graph, tokenizer, precision, progress)
        else:
            verifier, scales = Verifier(config, weights, sample, device), KVScales(config)
            verifier.compute(progress, scales.observe)
            steps = scales.steps()
            if device == "cuda":
                export_paged_graph(config, weights, graph, precision, kv_cache, steps, progress)
            else:
                export_graph(
                    config, weights, graph, precision, steps, progress, int8_prompts=int8_prompts
                )
                write_attention_graph(part)
            figures = _verify(verifier, graph, config, device, precision, progress)
        notes = _describe_source(checkpoint)
        manifest = make_manifest(config, part, precision, notes, figures, device)
        manifest.save(part / MANIFEST_FILE)
    return manifest, checkpoint.notes


def check_vector_options(device: Device, precision: str, text: Path | None) -> None:
    """Raise ValueError for options that a model with a pooling has not."""
    if device == "cuda" or precision == "int4":
        wrong = f"{precision} on {device}"
        raise ValueError(f"a model that makes vectors is fp32 or int8 on cpu, not {wrong}")
    if text is not None:
        raise ValueError(f"a model that makes vectors is not measured on {text}; leave it out")


def check_precision(precision: str, device: Device) -> None:
    """Raise ValueError for a precision that the device has not."""
    if precision not in PRECISIONS[device]:
        known = ", ".join(PRECISIONS[device])
        raise ValueError(f"no precision {precision!r} for {device}; there are {known}")


def verify_directory(
    directory: Path,
    source: Path | None = None,
    text: Path | None = None,
    progress: Progress = unheard,
) -> tuple[Manifest, Verification | None]:
    """Check a model directory's hashes and measure its figures now.

    The reference is the checkpoint or else the decoder rebuilt from the graph's own weights;
    figures are None where rounding has left neither. Raises BundleError, CheckpointError (also for
    one that the directory was not made from), VerificationError and ValueError.
    """
    progress("reading the model", 0, 0)
    bundle = load_bundle(directory)
    manifest = bundle.manifest
    if source is not None:
        checkpoint = load_checkpoint(source, bundle.config.max_model_len)
        if hash_weights(checkpoint.weight_files) != manifest.source.get("sha256"):
            raise CheckpointError(
                f"{directory} was not exported from {checkpoint.path}: the hashes differ"
            )
    elif manifest.precision == "fp32":
        weights = load_weights(bundle.config, bundle.graph_path)
        checkpoint = Checkpoint(directory, bundle.config, weights, bundle.tokenizer, {})
    elif text is not None:
        raise ValueError(
            f"perplexity on {text} is measured against the weights before rounding: "
            "name --checkpoint"
        )
    else:
        return manifest, None
    config, device, precision = checkpoint.config, manifest.device, manifest.precision
    graph, weights, tokenizer = bundle.graph_path, checkpoint.weights, checkpoint.tokenizer
    if config.pooling is not None:
        check_vector_options(device, precision, text)
        return manifest, verify_vectors(config, weights, graph, tokenizer, precision, progress)
    verifier = Verifier(config, weights, sample_text(checkpoint, text, precision), device)
    return manifest, _verify(verifier, graph, config, device, precision, progress)


def _verify(
    verifier: Verifier,
    path: Path,
    config: TransformerConfig,
    device: Device,
    precision: str,
    progress: Progress,
) -> Verification:
    """Measure a graph on its device. Raises VerificationError."""
    open_graph = PagedSession.open if device == "cuda" else SegmentedGraph
    figures = verifier.verify(open_graph(path, config), progress)
    check(figures, precision)
    return figures


def make_manifest(
    config: TransformerConfig,
    directory: Path,
    precision: str,
    source: dict[str, str | int | float],
    verification: Verification,
    device: Device = "cpu",
) -> Manifest:
    """Make the manifest of a directory whose other files are all written."""
    graph = onnx_ir.load(directory / GRAPH_FILE).graph
    return Manifest(
        format_version=FORMAT_VERSION,
        architecture="kvasir-encoder" if config.pooling else "kvasir-decoder",
        parameters=count_parameters(config),
        device=device,
        precision=precision,
        max_model_len=config.max_model_len,
        fits_16_bits=config.pooling is not None,
        graph_inputs=[str(value.name) for value in graph.inputs],
        graph_outputs=[str(value.name) for value in graph.outputs],
        versions={name: version(name) for name in _VERSIONS},
        files=hash_files(directory),
        source=source,
        verification=verification,
    )


def sample_text(checkpoint: Checkpoint, file: Path | None, precision: str) -> SampleText | None:
    """Return the text to verify on: the file's, or the run's held-out text, or English prose.

    Prose is for precisions measured on text; without text there is None for others. Raises
    ValueError for a file that is not UTF-8 text, or for too few tokens, and VerificationError for a
    precision that needs text where Python brings none.
    """
    run, prefix = checkpoint.path.parent, tuple(leading_ids(checkpoint.tokenizer))
    text, token_ids = "", np.empty(0, dtype=np.int64)
    if file is not None:
        try:
            name, text = file.name, file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text") from None
    elif checkpoint.progress and (run / DATA_FOLDER).is_dir():
        name = f"held-out text of {run.name}"
        token_ids = open_tokens(run / DATA_FOLDER).held_out.astype(np.int64)
    elif precision in MAX_PERPLEXITY_LOSS:
        try:  # half a million characters on the language, which some distributions leave out
            from pydoc_data.topics import topics  # noqa: PLC0415
        except ImportError:
            raise VerificationError(
                f"{precision} is measured on text, and the checkpoint has none; "
                "give --text FILE, or --precision fp32"
            ) from None
        name, text = _PYDOC, "\n\n".join(topics[name] for name in sorted(topics))
    else:
        return None
    if text:
        token_ids = np.array(checkpoint.tokenizer.encode(text, add_special_tokens=False).ids)
    fewest = FEWEST_TOKENS if precision in MAX_PERPLEXITY_LOSS else 2
    if len(token_ids) < fewest:
        raise ValueError(
            f"{name} has {len(token_ids)} tokens, too few to measure {precision} on; "
            f"give --text FILE with at least {fewest}"
        )
    return SampleText(name, token_ids, prefix)


def _describe_source(checkpoint: Checkpoint) -> dict[str, str | int | float]:
    """Return which weights these are, and what their training noted: steps, tokens, hours."""
    progress, path = checkpoint.progress, checkpoint.path.absolute()
    name = path.parent.name if progress else path.name
    known = {_NOTES[key]: progress[key] for key in _NOTES if progress.get(key) is not None}
    return {"name": name, "sha256": hash_weights(checkpoint.weight_files), **known}

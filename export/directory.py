"""Checkpoint → model directory: the graph, the manifest and the verification, all or nothing."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import onnx_ir
from pydantic import ValidationError

from kvasir.export.evaluation import check_encoder, measure
from kvasir.export.graphs.attention import write_attention_graph
from kvasir.export.graphs.decoder import export_graph
from kvasir.export.graphs.encoder import export_encoder_graph
from kvasir.export.graphs.paged import KV_DTYPES, check_pageable, export_paged_graph, speed_notes
from kvasir.export.graphs.source import export_source_graph, join_layers
from kvasir.export.rounding.activations import Activations
from kvasir.export.rounding.formulas import BITS
from kvasir.export.rounding.kv_cache import KVScales
from kvasir.export.rounding.smoothing import smooth
from kvasir.export.rounding.weights import Weights, with_factors
from kvasir.export.verification.paged_session import require_device
from kvasir.export.verification.plan import SampleText
from kvasir.export.verification.samples import make_sample, sample_calibration
from kvasir.export.verification.sensitivity import (
    BITS_A_WEIGHT,
    check_bits,
    keep_in_8_bits,
    notes_on_bits,
)
from kvasir.export.verification.vectors import observe_vectors
from kvasir.export.verification.verify import Verifier
from kvasir.model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import (
    ADAPTERS_FILE,
    CONFIG_FILE,
    ENCODER_GRAPH_FILE,
    FORMAT_VERSION,
    GENERATION_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    PRECISIONS,
    TOKENIZER_FILE,
    Device,
    Manifest,
    hash_files,
)
from kvasir.model.network.skeleton import count_parameters
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.model.platform.files import new_directory
from kvasir.model.platform.machine import available_memory
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.platform.suggestions import first_problem
from kvasir.model.records import GenerationDefaults, Verification
from kvasir.model.tensor_files import hash_weights

# The manifest's names for what a checkpoint notes of its training.
_NOTES = {"step": "training_step", "seconds": "training_seconds"}
_NOTES |= {name: name for name in ("train_tokens", "held_out_tokens")}
_OF_HELD_OUT = ("held_out_loss", "held_out_accuracy", "held_out_exact_match")
_NOTES |= {name: name for name in _OF_HELD_OUT}
_VERSIONS = ("torch", "onnx", "kvasir-lm")
_TABLE_BYTES = 16  # of a number in a table of positions, while it is made


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    device: Device = "cpu",
    precision: str | None = None,
    kv_cache: str | None = None,
    int8_prompts: bool = True,
    bits: float | None = None,
    text: Path | None = None,
    generation: GenerationDefaults | None = None,
    max_model_len: int | None = None,
    calibrate: Path | None = None,
    smooths: bool = True,
    replaces: bool = False,
    progress: Progress = no_progress,
) -> tuple[Manifest, tuple[str, ...]]:
    """Export what `load_checkpoint` opens to a model directory, all or nothing.

    Returns its manifest, and notes on what was left out of a published model, and on bits.

    device: a graph for a GPU is verified there, so there must be one. precision: None is the
    device's first. kv_cache: on cuda, one of KV_DTYPES; None is the type of activations.
    int8_prompts: give int4 on the CPU int8 weights as well, for prompts. bits: of a weight that it
    decodes with, on average of linear layers outside experts, and not of those rounded to 4 bits
    before; None is BITS_A_WEIGHT. text: see `make_sample`.
    generation: recommended sampling, which overrides the checkpoint's field by field.
    max_model_len: the longest row; None is the checkpoint's. calibrate: text to smooth outliers by;
    None is another part of the same text. smooths: rounded weights are smoothed, see `smooth`.
    replaces: a model directory at `out` makes room once the new one is whole. Raises
    CheckpointError, VerificationError, FileExistsError when `out` is in use, and ValueError for
    text, a precision, a device or a decoder that cannot be used with the others.
    """
    precision = PRECISIONS[device][0] if precision is None else precision
    _check_options(device, precision, kv_cache, int8_prompts=int8_prompts)
    rounds = smooths and precision in BITS
    if bits is not None:
        check_bits(bits, is_calibrated_int4=rounds and (device, precision) == ("cpu", "int4"))
    if calibrate is not None and not (smooths and precision in BITS):
        raise ValueError(f"{calibrate} is for rounding weights; leave it out, or round them by it")
    if not replaces and (out / MANIFEST_FILE).is_file():
        mend = "replace it with --force, or choose another --out"
        raise FileExistsError(f"{out} is a model directory; {mend}")
    progress("reading the checkpoint", 0, 0)
    checkpoint = load_checkpoint(source, max_model_len)
    config = checkpoint.config
    _check_positions(config)
    check_encoder(config, device, precision, text)
    if device != "cpu":
        check_pageable(config)
        require_device(device)
    sample = None if config.pooling else make_sample(checkpoint, text, precision)
    calibration = None if calibrate is None else sample_calibration(checkpoint, calibrate)
    extra_files = _extra_files(checkpoint, generation)
    target = _Target(device, precision, kv_cache, int8_prompts, bits or BITS_A_WEIGHT, rounds)
    verifier = None
    if config.pooling is None:
        verifier = Verifier(
            config, checkpoint.weights, sample, device, calibration, calibrates=target.smooths
        )
    with new_directory(out, MANIFEST_FILE if replaces else None) as part:
        config.save(part / CONFIG_FILE)
        checkpoint.tokenizer.save(str(part / TOKENIZER_FILE))
        for name, content in extra_files.items():
            (part / name).write_bytes(content)
        noted = _write_graphs(checkpoint, verifier, part, target, calibration, progress)
        graph = part / GRAPH_FILE
        figures, problem = measure(checkpoint, verifier, graph, device, precision, progress)
        if problem is not None:
            raise problem
        facts = _describe_source(checkpoint)
        manifest = make_manifest(config, part, precision, facts, figures, device)
        manifest = manifest.model_copy(update=noted)
        manifest.save(part / MANIFEST_FILE)
    notes = checkpoint.notes + notes_on_bits(bits, manifest.in_8_bits)
    return manifest, notes + (speed_notes(config) if device == "cuda" else ())


class _Target(NamedTuple):
    """A device and options that graphs are written for; see `export_checkpoint`."""

    device: Device
    precision: str
    kv_cache: str | None
    int8_prompts: bool
    bits: float
    smooths: bool


def _write_graphs(
    checkpoint: Checkpoint,
    verifier: Verifier | None,
    part: Path,
    target: _Target,
    calibration: SampleText | None,
    progress: Progress,
) -> dict[str, Any]:
    """Compute the network, choose how it is rounded, and write its graphs.

    Returns what the manifest says of the calibration, if there was one.
    """
    config, weights, scales = checkpoint.config, checkpoint.weights, KVScales(checkpoint.config)
    with TemporaryDirectory(dir=part) as folder:
        activations = None
        if target.smooths:  # int4 reads every token again, while weights are written
            activations = Activations(Path(folder) if target.precision == "int4" else None)
        if verifier is not None:
            verifier.compute(progress, scales.observe, activations)
        elif activations is not None:
            observe_vectors(config, weights, checkpoint.tokenizer, activations, calibration)
        if activations is not None:
            rounded = config, weights, activations, target.device, target.precision, progress
            # Values that are cached in 8 bits have scales of their own.
            is_decoder = verifier is not None and config.encoder is None
            is_cached = target.device == "cpu" or target.kv_cache is not None
            weights = smooth(*rounded, keeps_values=is_decoder and is_cached)
        inputs, kept = None if activations is None else activations.inputs, list[str]()
        arguments, steps = (config, weights, part / GRAPH_FILE, target.precision), scales.steps()
        scaled = Weights(weights)
        if target.device != "cpu":
            in_cache = target.kv_cache, steps, progress, target.device
            export_paged_graph(*arguments, *in_cache, inputs=inputs)
        elif verifier is None:
            export_encoder_graph(*arguments, progress)
        else:
            if target.smooths and target.precision == "int4":
                row = verifier.calibration_row
                kept = keep_in_8_bits(config, weights, steps, row, target.bits, progress)
            given, prompts = (*arguments, steps, progress), target.int8_prompts
            scaled = export_graph(*given, int8_prompts=prompts, kept=kept, inputs=inputs)
        if checkpoint.adapters is not None and target.device == "cpu":
            layout = with_factors(checkpoint.adapters(), scaled, activations)
            layout = layout if config.encoder is None else join_layers(layout)
            layout.save(part / ADAPTERS_FILE)
        if config.encoder is not None:
            file = part / ENCODER_GRAPH_FILE
            export_source_graph(config, weights, file, target.precision, progress)
        if target.device == "cpu":
            write_attention_graph(part)
    report = None if activations is None else activations.report
    return {"calibration": report, "in_8_bits": kept}


def _check_options(
    device: Device, precision: str, kv_cache: str | None, *, int8_prompts: bool
) -> None:
    """Raise ValueError for options that are not for a device or a precision."""
    check_precision(precision, device)
    if kv_cache is not None and (device != "cuda" or kv_cache not in KV_DTYPES):
        dtypes = ", ".join(KV_DTYPES)
        raise ValueError(f"no kv cache {kv_cache!r} on {device}; on cuda there are {dtypes}")
    if not int8_prompts and (device, precision) != ("cpu", "int4"):
        raise ValueError(f"{precision} on {device} has no int8 prompts; only int4 on cpu has")


def _check_positions(config: TransformerConfig) -> None:
    """Raise ValueError if there is no memory for the tables of positions, before it is taken."""
    widths = {"rotary": config.head_dim, "sinusoidal": config.d_model, "alibi": config.n_head}
    n_bytes = _TABLE_BYTES * widths.get(config.position, 1) * config.max_model_len
    if n_bytes > available_memory():
        raise ValueError(
            f"tables of {config.max_model_len:,} positions take {n_bytes / 2**30:,.0f} GiB, more "
            "memory than there is; give a smaller --max-model-len"
        )


def _extra_files(checkpoint: Checkpoint, generation: GenerationDefaults | None) -> dict[str, bytes]:
    """Return the checkpoint's, by name, with its recommended sampling overridden."""
    files = dict(checkpoint.extra_files)
    try:
        brought = GenerationDefaults.model_validate_json(files.get(GENERATION_FILE, b"{}"))
    except ValidationError as error:
        file = checkpoint.path / GENERATION_FILE
        raise CheckpointError(f"{file}: {first_problem(error)}") from None
    if recommended := brought.given() | (generation.given() if generation else {}):
        files[GENERATION_FILE] = json.dumps(recommended, indent=2).encode() + b"\n"
    return files


def check_precision(precision: str, device: Device) -> None:
    """Raise ValueError for a precision that the device has not."""
    if precision not in PRECISIONS[device]:
        precisions = ", ".join(PRECISIONS[device])
        raise ValueError(f"no precision {precision!r} for {device}; there are {precisions}")


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
    kind = "encoder" if config.pooling else "encoder-decoder" if config.encoder else "decoder"
    return Manifest(
        format_version=FORMAT_VERSION,
        architecture=f"kvasir-{kind}",
        parameters=count_parameters(config),
        device=device,
        precision=precision,
        max_model_len=config.max_model_len,
        fits_16_bits=kind != "decoder",
        graph_inputs=[str(value.name) for value in graph.inputs],
        graph_outputs=[str(value.name) for value in graph.outputs],
        # The packages of ONNX Runtime have different names.
        versions={"onnxruntime": onnxruntime.__version__}
        | {name: version(name) for name in _VERSIONS},
        files=hash_files(directory),
        source=source,
        verification=verification,
    )


def _describe_source(checkpoint: Checkpoint) -> dict[str, str | int | float]:
    """Return which weights these are, and what their training noted: steps, tokens, hours."""
    progress, path = checkpoint.progress, checkpoint.path.absolute()
    name = path.parent.name if progress else path.name
    notes = {_NOTES[key]: progress[key] for key in _NOTES if progress.get(key) is not None}
    return {"name": name, "sha256": hash_weights(checkpoint.weight_files), **notes}

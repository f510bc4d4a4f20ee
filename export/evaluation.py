"""A model directory against its checkpoint: what it costs to serve the graph."""

from __future__ import annotations

from pathlib import Path

from kvasir.export.graphs.decoder import load_weights
from kvasir.export.graphs.source import load_both_weights
from kvasir.export.verification.own_operators import own_graph
from kvasir.export.verification.paged_session import PagedSession
from kvasir.export.verification.samples import make_sample
from kvasir.export.verification.segments import SegmentedGraph
from kvasir.export.verification.vectors import verify_vectors
from kvasir.export.verification.verify import MAX_LOGIT_ERROR, VerificationError, Verifier, check
from kvasir.model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import Device, Manifest, load_model_dir
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.records import Verification
from kvasir.model.tensor_files import hash_weights


def verify_directory(
    directory: Path,
    source: Path | None = None,
    text: Path | None = None,
    progress: Progress = no_progress,
    *,
    by_layer: bool = False,
) -> tuple[Manifest, Verification | None, VerificationError | None]:
    """Check a model directory's hashes and measure its figures now.

    The reference is the checkpoint or else the decoder rebuilt from the graph's own weights;
    figures are None where rounding has left neither. The last item says why the graph must not be
    served, if it must not. by_layer: measure each layer alone too. Raises ModelDirectoryError,
    CheckpointError (also for one that the directory was not made from), VerificationError as
    `measure`, and ValueError.
    """
    progress("reading the model", 0, 0)
    model_dir = load_model_dir(directory)
    manifest = model_dir.manifest
    if source is not None:
        checkpoint = load_checkpoint(source, model_dir.config.max_model_len)
        if hash_weights(checkpoint.weight_files) != manifest.source.get("sha256"):
            raise CheckpointError(
                f"{directory} was not exported from {checkpoint.path}: the hashes differ"
            )
    elif manifest.precision == "fp32":
        load = load_weights if model_dir.config.encoder is None else load_both_weights
        weights = load(model_dir.config, model_dir.graph_path)
        checkpoint = Checkpoint(directory, model_dir.config, weights, model_dir.tokenizer, {})
    elif text is not None:
        raise ValueError(
            f"perplexity on {text} is measured against the weights before rounding: "
            "name their checkpoint: --against"
        )
    else:
        return manifest, None, None
    config, device, precision = checkpoint.config, manifest.device, manifest.precision
    check_encoder(config, device, precision, text)
    verifier = None
    if config.pooling is None:
        sample = make_sample(checkpoint, text, precision)
        verifier = Verifier(config, checkpoint.weights, sample, device)
    graph = model_dir.graph_path
    figures, problem = measure(checkpoint, verifier, graph, device, precision, progress)
    if by_layer:
        if verifier is None or config.encoder is not None or device != "cpu":
            raise ValueError("only decoders on cpu are measured by layer; leave --by-layer out")
        layers = verifier.by_layer(SegmentedGraph(graph, config))
        figures = figures.model_copy(update={"by_layer": layers})
    return manifest, figures, problem


def measure(
    checkpoint: Checkpoint,
    verifier: Verifier | None,
    path: Path,
    device: Device,
    precision: str,
    progress: Progress = no_progress,
) -> tuple[Verification, VerificationError | None]:
    """Measure a graph on its device, and say why it must not be served, if it must not.

    verifier: None for a model that makes vectors. Raises VerificationError for vectors that differ
    too much.
    """
    config = checkpoint.config
    if verifier is None:
        measured = config, checkpoint.weights, path, checkpoint.tokenizer
        return verify_vectors(*measured, precision, progress), None
    on_cpu = device == "cpu"
    graph = SegmentedGraph(path, config) if on_cpu else PagedSession.open(path, config, device)
    figures = verifier.verify(graph.logits, progress)
    own = own_graph(path, config) if on_cpu else None
    if own is not None:
        figures = figures.model_copy(update={"own": verifier.verify(own.logits, progress)})
    try:
        for each in filter(None, (figures, figures.own)):
            is_far = precision == "fp32" and each.max_logit_error > MAX_LOGIT_ERROR
            check(each, precision, verifier.float32_error(progress) if is_far else 0.0)
    except VerificationError as error:
        return figures, error
    return figures, None


def check_encoder(
    config: TransformerConfig, device: Device, precision: str, text: Path | None
) -> None:
    """Raise ValueError for options that a model with an encoder, or a pooling, has not."""
    if config.encoder is None and config.pooling is None:
        return
    kind = "a model that makes vectors" if config.pooling else "an encoder-decoder"
    if device != "cpu" or precision == "int4":
        raise ValueError(f"{kind} is fp32 or int8 on cpu, not {precision} on {device}")
    if config.pooling and text is not None:
        raise ValueError(f"{kind} is not measured on {text}; leave it out")

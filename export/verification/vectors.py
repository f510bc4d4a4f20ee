"""A graph that makes vectors of texts against PyTorch: cosines, and retrieval of docstrings.

Queries are the first lines of docstrings of Python's standard library, and documents the rest.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from kvasir.export.rounding.activations import Activations
from kvasir.export.verification.own_operators import own_session
from kvasir.export.verification.plan import SampleText, affordable_tokens
from kvasir.export.verification.verify import MAX_LOGIT_ERROR, MOST_OF_NOISE, VerificationError
from kvasir.model.config import TransformerConfig
from kvasir.model.network.skeleton import build_decoder, count_parameters
from kvasir.model.onnx.runtime import onnxruntime, open_cpu_session
from kvasir.model.packing import HIDDEN_OUTPUT, TYPES_INPUT, VECTORS_OUTPUT, pack
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.records import Verification

# Least cosines of both vectors: of every text for fp32, else the mean.
_LEAST_COSINE = {"fp32": 0.99999, "int8": 0.995}
_MAX_RETRIEVAL_LOSS = 0.005
_TOKENS = 64  # of a text at most
_FEWEST, _MOST = 50, 400  # pairs
_OBSERVED = 50  # pairs
_BATCH = 16  # texts
_LEAST_QUERY, _LEAST_DOCUMENT = 20, 100  # characters
_PAIRS = f"Python {sys.version_info[0]}.{sys.version_info[1]}'s docstrings"

Floats = NDArray[np.floating]
Encode = Callable[[list[list[int]]], tuple[Floats, Floats]]


def verify_vectors(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    path: Path,
    tokenizer: Tokenizer,
    precision: str,
    progress: Progress = no_progress,
) -> Verification:
    """Measure a graph on docstrings, or on random ids where Python has brought none.

    weights: by the network's names. Raises VerificationError for a graph that differs too much.
    """
    assert config.pooling is not None
    n_pairs = affordable_tokens(count_parameters(config), _FEWEST, _MOST)
    texts = _docstrings(0, n_pairs)
    ids = _ids(config, tokenizer, texts)
    reference = _run(_in_torch(config, weights), ids, "running PyTorch", progress)
    expected, labels = reference[0], config.pooling.labels
    has_pairs, limit = bool(texts) and not labels, MAX_LOGIT_ERROR

    def compare(session: onnxruntime.InferenceSession) -> Verification:
        made = _run(_in_onnx(session), ids, "running ONNX Runtime", progress)
        return _compare(reference, made, is_classifier=bool(labels), has_pairs=has_pairs)

    sessions = open_cpu_session(path), own_session(path)
    measured = [compare(session) for session in sessions if session is not None]
    is_far = any(figures.max_logit_error > limit for figures in measured)
    if precision == "fp32" and is_far:
        in_float64 = _in_torch(config, weights, torch.float64)
        exact, _ = _run(in_float64, ids, "running PyTorch in float64", progress)
        limit = max(limit, MOST_OF_NOISE * float(np.abs(expected - exact).max() / exact.std()))
    for figures in measured:
        _check(figures, precision, limit)
    figures, *own = measured
    if own:
        figures = figures.model_copy(update={"own": own[0]})
    return Verification.model_validate(figures.model_dump(exclude_unset=True))


def _compare(
    reference: tuple[Floats, Floats],
    made: tuple[Floats, Floats],
    *,
    is_classifier: bool,
    has_pairs: bool,
) -> Verification:
    """Return a graph's figures, unchecked; both arguments are of `_run`."""
    (expected, hidden), (actual, of_tokens) = reference, made
    cosines = _cosines(hidden, of_tokens) if is_classifier else _cosines(expected, actual)
    figures: dict[str, Any] = {
        "max_logit_error": float(np.abs(actual - expected).max() / expected.std()),
        "greedy_agreement": float((actual.argmax(axis=1) == expected.argmax(axis=1)).mean()),
        "mean_cosine": float(cosines.mean()),
        "least_cosine": float(cosines.min()),
        "positions": len(expected),
    }
    if has_pairs:
        in_torch, in_onnx = _found(expected), _found(actual)
        figures |= {"retrieval_torch": in_torch.mean(), "retrieval_onnx": in_onnx.mean()}
        figures["retrieval_error"] = np.sqrt((in_torch != in_onnx).mean() / len(in_torch))
        figures["text"] = _PAIRS
    return Verification.model_construct(**figures)


def observe_vectors(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    activations: Activations,
    calibration: SampleText | None = None,
) -> None:
    """Note what products read of docstrings that nothing is measured on, or of a calibration."""
    if calibration is None:
        n_pairs = affordable_tokens(count_parameters(config), _FEWEST, _MOST)
        name, ids = _PAIRS, _ids(config, tokenizer, _docstrings(n_pairs, n_pairs + _OBSERVED))
    else:
        name, length = calibration.name, min(_TOKENS, config.max_model_len)
        ids = calibration.rows(2 * _OBSERVED, length).tolist()
    activations.describe(name, ids)
    network = build_decoder(config, weights)
    with torch.inference_mode(), activations.watch(network, ""):
        for text in ids:
            network.hidden(torch.tensor([text]), torch.tensor([len(text)]))


def _ids(config: TransformerConfig, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the tokens of texts, cut to _TOKENS; random ones if there are no texts."""
    shorter = Tokenizer.from_str(tokenizer.to_str())
    shorter.enable_truncation(min(_TOKENS, config.max_model_len))
    shorter.no_padding()
    if texts:
        return [encoding.ids for encoding in shorter.encode_batch_fast(texts)]
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, min(_TOKENS, config.max_model_len) + 1, size=2 * _FEWEST)
    return [generator.integers(config.vocab_size, size=n).tolist() for n in lengths]


def _check(figures: Verification, precision: str, most_error: float) -> None:
    """most_error: of an fp32 graph, relative to the deviation of PyTorch's vectors."""
    least = _LEAST_COSINE[precision]
    cosine = figures.least_cosine if precision == "fp32" else figures.mean_cosine
    if cosine is None or not cosine >= least:  # a NaN fails too
        raise VerificationError(
            f"the cosine of the graph's vectors and PyTorch's is {cosine}, less than {least}; "
            "it must not be served"
        )
    error = figures.max_logit_error
    if precision == "fp32" and not error <= most_error:
        raise VerificationError(
            f"the graph's vectors differ from PyTorch's, relative to their standard deviation, by "
            f"{error:.2e}, more than {most_error:.0e}; it must not be served"
        )
    if figures.retrieval_torch is None or figures.retrieval_onnx is None:
        return
    loss = figures.retrieval_torch - figures.retrieval_onnx
    if loss - 2.0 * (figures.retrieval_error or 0.0) > _MAX_RETRIEVAL_LOSS:
        raise VerificationError(
            f"the graph's vectors find {figures.retrieval_onnx:.1%} of {_PAIRS} and PyTorch's "
            f"{figures.retrieval_torch:.1%}; it must not be served"
        )


def _in_torch(
    config: TransformerConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> Encode:
    network = build_decoder(config, weights).to(dtype)

    @torch.inference_mode()
    def encode(batch: list[list[int]]) -> tuple[Floats, Floats]:
        lengths = torch.tensor([len(text) for text in batch])
        rows = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)
        for row, text in zip(rows, batch, strict=True):
            row[: len(text)] = torch.tensor(text)
        hidden = network.hidden(rows, lengths)
        means = [row[:length].mean(dim=0) for row, length in zip(hidden, lengths, strict=True)]
        assert network.pooler is not None
        return network.pooler(hidden, lengths).numpy(), torch.stack(means).numpy()

    return encode


def _in_onnx(session: onnxruntime.InferenceSession) -> Encode:
    has_types = TYPES_INPUT in {value.name for value in session.get_inputs()}

    def encode(batch: list[list[int]]) -> tuple[Floats, Floats]:
        inputs, ends = pack(batch, [None] * len(batch) if has_types else None)
        vectors, hidden = session.run([VECTORS_OUTPUT, HIDDEN_OUTPUT], inputs)
        means = [part.mean(axis=0) for part in np.split(hidden, ends)[: len(batch)]]
        return vectors, np.stack(means)

    return encode


def _run(
    encode: Encode, ids: list[list[int]], step: str, progress: Progress
) -> tuple[Floats, Floats]:
    """Return the vectors [texts, …] of texts and the means of their tokens', in their order."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    parts = []
    for start in range(0, len(ids), _BATCH):
        progress(step, start, len(ids))
        parts.append(encode([ids[i] for i in order[start : start + _BATCH]]))
    vectors, means = (np.concatenate(part) for part in zip(*parts, strict=True))
    places = np.argsort(order)
    return vectors[places], means[places]


def _cosines(a: Floats, b: Floats) -> NDArray[np.float64]:
    """Return those of rows [texts, width]."""
    double_a, double_b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(double_a, axis=1) * np.linalg.norm(double_b, axis=1)
    cosines: NDArray[np.float64] = (double_a * double_b).sum(axis=1) / lengths
    return cosines


def _found(vectors: Floats) -> NDArray[np.bool_]:
    """Return whether each query's nearest document is its own: [pairs]. Queries are even rows."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    nearest = (unit[::2] @ unit[1::2].T).argmax(axis=1)
    found: NDArray[np.bool_] = nearest == np.arange(len(nearest))
    return found


def _docstrings(start: int, stop: int) -> list[str]:
    """Return the first line of each of some docstrings, all different, and then its rest."""
    pairs: dict[str, str] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for query, document in _pairs_in(file):
            pairs.setdefault(query, document)
        if len(pairs) >= stop:
            break
    return [text for pair in islice(pairs.items(), start, stop) for text in pair]


@cache
def _pairs_in(file: Path) -> list[tuple[str, str]]:
    """Return the parts of a module's docstrings that are long enough; it is parsed once."""
    pairs = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            query, _, document = (part.strip() for part in text.partition("\n\n"))
            if len(query) >= _LEAST_QUERY and len(document) >= _LEAST_DOCUMENT:
                pairs.append((query, document))
    return pairs

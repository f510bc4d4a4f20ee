"""A model with a pooling becomes a directory whose figures are of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.export.directory import export_checkpoint
from kvasir.export.evaluation import verify_directory
from kvasir.export.graphs.encoder import export_encoder_graph
from kvasir.export.verification import vectors
from kvasir.export.verification.vectors import verify_vectors
from kvasir.export.verification.verify import VerificationError
from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.directory import GRAPH_FILE, load_model_dir
from tests.export.runs import save_run
from tests.kit.encoders import BERT, MPNET
from tests.kit.short_samples import shorten_samples

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tale"
    return save_run(folder, n_layer=2, notes={"held_out_accuracy": 0.75}, **BERT)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "tale"
    export_checkpoint(run, out)
    return out


def test_the_manifest_has_cosines_and_retrieval(exported: Path) -> None:
    manifest = load_model_dir(exported).manifest
    assert manifest.source["held_out_accuracy"] == 0.75
    figures = manifest.verification
    assert figures.mean_cosine is not None
    assert figures.least_cosine is not None
    assert 0.99 < figures.least_cosine <= figures.mean_cosine < 1.0 + 1e-9
    assert figures.retrieval_torch is not None
    assert figures.retrieval_torch == pytest.approx(figures.retrieval_onnx, abs=0.05)
    assert "docstrings" in (figures.text or "")


def test_another_checkpoints_graph_is_refused(run: Path, exported: Path) -> None:
    model_dir, checkpoint = load_model_dir(exported), load_checkpoint(run)
    weights = {name: checkpoint.weights[name].clone() for name in checkpoint.weights}
    weights["blocks.0.feed_forward.down.weight"].neg_()
    with pytest.raises(VerificationError, match="cosine"):
        verify_vectors(model_dir.config, weights, model_dir.graph_path, model_dir.tokenizer, "int8")


def test_a_classifiers_graph_is_enough_to_verify_it(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", n_layer=2, **MPNET)
    manifest, _ = export_checkpoint(run, tmp_path / "out", precision="fp32")
    figures = manifest.verification
    assert figures.retrieval_torch is None
    assert figures.max_logit_error < 1e-4
    again = verify_directory(tmp_path / "out")[1]
    assert again is not None
    assert np.isclose(again.max_logit_error, figures.max_logit_error, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"device": "cuda"}, {"precision": "int4"}, {"text": Path("prose.txt")}]
)
def test_options_of_decoders_are_refused(
    run: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    (named,) = map(str, options.values())
    with pytest.raises(ValueError, match=named):
        export_checkpoint(run, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_fp32_graph_may_be_as_far_as_pytorch_is_from_float64(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, path = load_checkpoint(run), tmp_path / GRAPH_FILE
    config, weights = checkpoint.config, checkpoint.weights
    export_encoder_graph(config, weights, path, "fp32")
    monkeypatch.setattr(vectors, "MAX_LOGIT_ERROR", 0.0)
    assert verify_vectors(config, weights, path, checkpoint.tokenizer, "fp32").max_logit_error > 0.0
    monkeypatch.setattr(vectors, "MOST_OF_NOISE", 0.0)
    with pytest.raises(VerificationError, match=r"more than 0e\+00"):
        verify_vectors(config, weights, path, checkpoint.tokenizer, "fp32")

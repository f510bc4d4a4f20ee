"""`kvasir export` and `kvasir eval`: a verified model directory, or none."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir
import pytest

from kvasir.export import directory as export_directory
from kvasir.export.directory import export_checkpoint
from kvasir.export.evaluation import verify_directory
from kvasir.export.graphs.decoder import STEP_INPUTS, export_graph
from kvasir.export.rounding.weights import Weights
from kvasir.export.verification.samples import make_sample
from kvasir.export.verification.verify import VerificationError
from kvasir.model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import cache_names, load_model_dir
from kvasir.model.training.data.corpus import Corpus
from kvasir.model.training.data.tokens import write_tokens
from kvasir.server.engine.runner import OnnxRunner
from tests.export.runs import TEXT, save_run, tokenizer_of_text
from tests.kit.commands import kvasir
from tests.kit.huggingface_checkpoints import set_values
from tests.kit.random_models import export_random, make_decoder
from tests.kit.short_samples import shorten_samples

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run: a checkpoint with random weights, and its tokens."""
    folder = tmp_path_factory.mktemp("runs") / "tale"
    save_run(folder, step=40, notes={"seconds": 3.5})
    write_tokens(Corpus([TEXT], 0), tokenizer_of_text(), folder / "data", held_out=0.1, context=32)
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "tale"
    export_checkpoint(run, out, precision="fp32")
    return out


def test_the_directory_is_whole_and_says_what_was_measured(exported: Path) -> None:
    assert json.loads((exported / "manifest.json").read_text())["format_version"] == 1
    manifest = load_model_dir(exported).manifest
    assert manifest.verification.max_logit_error < 1e-4
    assert manifest.verification.greedy_agreement == 1.0
    assert re.fullmatch(r"held-out text of tale, \d+ x 96 tokens", manifest.verification.text or "")
    assert manifest.verification.perplexity_onnx == pytest.approx(
        manifest.verification.perplexity_torch, rel=1e-4
    )
    assert manifest.source["training_step"] == 40
    assert not list(exported.parent.glob("*.part*"))


def test_the_graph_has_the_contracts_names_and_no_path_of_this_machine(exported: Path) -> None:
    config, graph = load_model_dir(exported).config, onnx_ir.load(exported / "model.onnx").graph
    inputs, outputs = ([value.name for value in of] for of in (graph.inputs, graph.outputs))
    assert inputs == [*STEP_INPUTS, *cache_names("past_key_values", config.n_layer)]
    assert outputs == ["logits", *cache_names("present", config.n_layer)]
    assert str(Path.cwd()).encode() not in (exported / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    "options", [{"max_model_len": 97}, {"max_model_len": 1}, {"kv_cache_bytes": 10}]
)
def test_limits_that_cannot_be_met_are_refused(exported: Path, options: dict[str, Any]) -> None:
    model_dir = load_model_dir(exported)
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        OnnxRunner(model_dir.graph_path, model_dir.config, max_num_seqs=2, **options)


def test_models_of_any_length_can_be_verified(tmp_path: Path) -> None:
    """The checks' own lengths must fit the shortest model; without positions one graph is all."""
    model = export_random(tmp_path, n_layer=1, position="none")
    for max_model_len in (2, 3, 36, 37):
        model.decoder.config = replace(model.config, max_model_len=max_model_len)
        assert model.verify().max_logit_error < 1e-4


def test_a_wrong_graph_fails_the_export_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export_something_else(
        config: TransformerConfig,
        _weights: object,
        path: Path,
        precision: str,
        *_: object,
        **__: object,
    ) -> Weights:
        return export_graph(config, make_decoder(config, seed=1).state_dict(), path, precision)

    monkeypatch.setattr(export_directory, "export_graph", export_something_else)
    with pytest.raises(VerificationError, match=r"logits differ from PyTorch's, .* 1e-03"):
        export_checkpoint(run, tmp_path / "out", precision="fp32")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def rounded(run: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of an int8 export, and what the command says of it."""
    out = run.parent / "rounded"
    advice = ["--temperature", "0.5", "--top-p", "0.9", "--json"]
    return out, json.loads(kvasir("export", run, "--out", out, *advice))


def test_int8_is_smaller_and_as_good(exported: Path, rounded: tuple[Path, dict[str, Any]]) -> None:
    out, made = rounded
    manifest = load_model_dir(out).manifest
    figures = manifest.verification
    assert made["verification"] == figures.model_dump()
    assert (made["device"], made["precision"], made["notes"]) == ("cpu", "int8", [])
    assert made["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert manifest.precision == "int8"
    assert figures.perplexity_onnx == pytest.approx(figures.perplexity_torch, rel=0.01)
    assert figures.perplexity_onnx != load_model_dir(exported).manifest.verification.perplexity_onnx
    sizes = [(folder / "model.onnx.data").stat().st_size for folder in (out, exported)]
    assert sizes[0] < 0.4 * sizes[1]


def test_what_rounding_costs_is_told_by_position_in_a_picture_and_in_words(
    run: Path, rounded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    (out, made), picture = rounded, tmp_path / "losses.png"
    figures, report = load_model_dir(out).manifest.verification, load_model_dir(out).manifest
    spans = figures.by_position
    assert spans is not None
    assert sum(span.tokens for span in spans) == figures.positions
    mean = sum(span.tokens * span.mean_kl for span in spans) / sum(span.tokens for span in spans)
    assert mean == pytest.approx(figures.mean_kl)
    found = json.loads(kvasir("eval", out, "--against", run, "--plot", picture, "--json"))
    assert found["measured"] == figures.model_dump()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert made["verdict"] == figures.verdict
    told = kvasir("eval", out)
    assert "0 to 95" in told
    assert "to measure int8 again" in told
    for answer in (told, kvasir("doctor", out)):
        assert str(figures.verdict) in " ".join(answer.split())
    assert report.calibration is not None
    assert report.calibration["text"] == "held-out text of tale"
    assert report.calibration["places"] == 3  # of one layer, whose values have scales of their own


def test_perplexity_can_be_measured_on_a_text_of_ones_own(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:3000])
    figures = verify_directory(exported, run, text)[1]
    assert figures is not None
    assert re.fullmatch(r"text\.txt, \d+ x 96 tokens", figures.text or "")
    text.write_text("")
    with pytest.raises(ValueError, match=r"text\.txt has 0 tokens, too few"):
        export_checkpoint(run, tmp_path / "other", precision="fp32", text=text)
    text.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"text\.txt is not UTF-8"):
        export_checkpoint(run, tmp_path / "other", precision="fp32", text=text)
    assert not (tmp_path / "other").exists()


def test_a_folder_that_happens_to_be_called_data_is_not_a_runs(
    exported: Path, tmp_path: Path
) -> None:
    """Beside a model directory, or an imported checkpoint, it may hold anything."""
    (tmp_path / "data").mkdir()
    model = load_model_dir(exported)
    beside = Checkpoint(tmp_path / "model", model.config, {}, model.tokenizer, {})
    assert make_sample(beside, None, "fp32") is None
    checkpoint = save_run(tmp_path)
    (checkpoint / "training.json").unlink()  # as an imported checkpoint
    assert make_sample(load_checkpoint(checkpoint), None, "fp32") is None


def test_int8_without_text_to_measure_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    checkpoint = save_run(tmp_path, max_model_len=16)
    with pytest.raises(VerificationError, match="has none; give --text FILE"):
        export_checkpoint(checkpoint, tmp_path / "out")


def test_a_checkpoint_of_ones_own_is_exported_as_it_is(tmp_path: Path) -> None:
    """With its own files and shorter rows; int8 is measured on English prose."""
    run, out = tmp_path / "run", tmp_path / "out"
    files = {
        "chat_template.jinja": b"{{ bos_token }}",
        "special_tokens_map.json": b'{"bos_token": "<s>"}',
        "generation_config.json": b'{"temperature": 0.6, "top_k": 40}',
    }
    checkpoint = save_run(run, files=files, position="learned")
    options = ("--temperature", 0.3, "--top-p", 0.9, "--max-model-len", 40)
    told = kvasir("export", checkpoint, "--out", out, *options)
    manifest = load_model_dir(out).manifest
    assert str(manifest.verification.verdict) in " ".join(told.split())
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    text = manifest.verification.text or ""
    assert re.fullmatch(rf"{python}'s pydoc topics, \d+ x 40 tokens", text)
    model_dir = load_model_dir(out)
    assert model_dir.config.max_model_len == model_dir.manifest.max_model_len == 40
    assert model_dir.chat_template == "{{ bos_token }}"
    assert model_dir.special_tokens == {"bos_token": "<s>"}
    assert model_dir.generation.given() == {"temperature": 0.3, "top_k": 40, "top_p": 0.9}


def test_positions_beyond_all_memory_are_refused(tmp_path: Path) -> None:
    path = save_run(tmp_path / "run")
    set_values(path, "config.json", max_model_len=2**31 - 1)
    with pytest.raises(ValueError, match="tables of 2,147,483,647 positions take 512 GiB"):
        export_checkpoint(path, tmp_path / "out", precision="fp32")


def test_bad_advice_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    files = {"generation_config.json": b'{"temperature": -1}'}
    save_run(tmp_path / "run", files=files)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature .* not -1"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", precision="fp32")
    assert not (tmp_path / "out").exists()


def test_commands_in_one_line_each(
    run: Path, exported: Path, rounded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    (advised, made), out = rounded, tmp_path / "out"
    measured = json.loads(kvasir("eval", exported, "--json"))
    assert measured["manifest"] == load_model_dir(exported).manifest.verification.model_dump()
    assert load_model_dir(advised).generation.given() == {"temperature": 0.5, "top_p": 0.9}
    assert load_model_dir(exported).generation.given() == {}
    assert "held-out text of tale" in kvasir("eval", exported, "--against", run)
    found = json.loads(kvasir("eval", advised, "--json"))
    assert (found["manifest"], found["measured"]) == (made["verification"], None)
    save_run(other := run.parent / "other", seed=2)
    no_prompts: dict[tuple[object, ...], str] = {
        ("--device", device, "--precision", precision): f"{precision} on {device} has no int8"
        for device, precision in (("cpu", "int8"), ("cpu", "fp32"), ("cuda", "int4"))
    }
    wrong: dict[tuple[object, ...], str] = {
        ("eval", advised, "--text", "x"): "name their checkpoint: --against",
        ("export", run, "--out", exported): "--force",
        ("export", exported, "--out", out): "is a model directory",
        ("export", run, "--out", run, "--force"): "has no manifest.json",
        ("export", run, "--out", out, "--precision", "int3"): "no precision 'int3'",
        ("export", run.parent, "--out", out): "holds no checkpoint",
        ("eval", run.parent / "absent"): "does not exist",
        ("generate", run.parent / "absent", "prompt"): "does not exist",
        ("eval", exported, "--against", other): "was not exported from",
    } | {
        ("export", run, "--out", out, "--no-int8-prompts", *options): told
        for options, told in no_prompts.items()
    }
    for line, told in wrong.items():
        assert told in kvasir(*line, fails=True)
    assert not list(tmp_path.iterdir())

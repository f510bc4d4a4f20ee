"""`kvasir export` of what others published: the same model as from a checkpoint directory of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner, Result

from kvasir.__main__ import app
from kvasir.export.directory import export_checkpoint
from kvasir.export.evaluation import verify_directory
from kvasir.export.verification import verify
from kvasir.export.verification.sensitivity import notes_on_bits
from kvasir.model.checkpoint import CheckpointError, is_published, load_checkpoint
from kvasir.model.checkpoint import save_checkpoint as save_run
from tests.kit.gguf_files import write_gguf
from tests.kit.huggingface_checkpoints import make_model, save_checkpoint
from tests.kit.short_samples import shorten_samples
from tests.model.test_quantized import write as write_rounded

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)

MANIFEST = "manifest.json"


def shards(folder: Path) -> Path:
    return save_checkpoint(folder / "shards", make_model("gpt2"), max_shard_size="60KB")


def gptq(folder: Path) -> Path:
    llama = save_checkpoint(folder / "llama", make_model("llama"))
    return write_rounded(llama, folder, "gptq sym")


def gguf(folder: Path) -> Path:
    return write_gguf(folder / "model.gguf", make_model("qwen3"), Kind.Q8_0)


def split_gguf(folder: Path) -> Path:
    write_gguf(folder / "model.gguf", make_model("llama"), split_max_tensors=10)
    return min(folder.glob("*.gguf"))


@pytest.mark.parametrize(("make", "n_notes"), [(shards, 0), (gptq, 1), (gguf, 1), (split_gguf, 0)])
def test_it_is_the_model_that_a_checkpoint_directory_gives(
    make: Any, n_notes: int, tmp_path: Path
) -> None:
    """An export reads nothing else; rows are shorter, which cuts learned positions."""
    source = make(tmp_path)
    opened = load_checkpoint(source)
    weights, files = dict(opened.weights), opened.extra_files
    args = (tmp_path / "run", 0, opened.decoder, opened.tokenizer)
    save_run(*args, {}, {}, weights=weights, extra_files=files)
    given, saved = (load_checkpoint(path, 64) for path in (source, tmp_path / "run"))
    assert (given.config, given.extra_files) == (saved.config, saved.extra_files)
    assert given.tokenizer.to_str() == saved.tokenizer.to_str()
    assert given.weights.keys() == saved.weights.keys()
    for name in given.weights:
        torch.testing.assert_close(given.weights[name], saved.weights[name], rtol=0.0, atol=0.0)
    assert (len(given.notes), saved.notes) == (n_notes, ())


def test_a_published_model_is_exported_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(verify.MAX_PERPLEXITY_LOSS, "int4", 10.0)  # random weights
    source, out = gptq(tmp_path), tmp_path / "out/one"
    manifest, notes = export_checkpoint(source, out, precision="int4", bits=5.0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one"]
    assert notes == (*load_checkpoint(source).notes, *notes_on_bits(5.0, []))  # it was in 4 bits
    assert verify_directory(out, source)[1] == manifest.verification
    with pytest.raises(CheckpointError, match=r"one was not exported from .*: the hashes differ"):
        verify_directory(out, tmp_path / "floats")


def kvasir(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_prints_notes_and_names_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(save_checkpoint(tmp_path / "tiny", make_model("llama")))
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": "many"}
    Path("generation_config.json").write_text(json.dumps(sampling))
    result = kvasir("export", ".", "--out", tmp_path / "a", "--precision", "fp32")
    assert result.exit_code == 0, result.output
    assert "note: generation_config.json's top_k is left out" in result.stdout
    manifest = json.loads((tmp_path / "a" / MANIFEST).read_text())
    assert manifest["source"]["name"] == "tiny"
    assert kvasir("eval", tmp_path / "a", "--against", ".").exit_code == 0


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "folder", make_model("llama"))
    (folder / "tokenizer.json").unlink()
    (tmp_path / "bad.gguf").write_bytes(b"GGUX")
    for source, reason in {
        folder: "it has no tokenizer.json",
        tmp_path / "bad.gguf": "is not a GGUF file",
    }.items():
        assert is_published(source)
        result = kvasir("export", source, "--out", tmp_path / "new/out")
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1].startswith(f"kvasir: {source} cannot be read: ")
        assert reason in result.stderr
        assert not (tmp_path / "new").exists()


def test_training_can_begin_with_a_published_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "llama", make_model("llama"))
    (tmp_path / "text.txt").write_text("a text of a few words\n" * 200)
    monkeypatch.chdir(tmp_path)
    result = kvasir(
        *("train", "text.txt", "--init", folder, "--out", "run"),
        *("--steps", 1, "--context", 16, "--batch-size", 2),
    )
    assert result.exit_code == 0, result.output
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.config.n_layer == 2
    assert checkpoint.progress["settings"]["learning_rate"] == 2e-5

"""The digest of answers: the committed one holds here; models that may differ have none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.kernels import library
from kvasir.kernels.graph import Mismatch
from kvasir.kernels.library import FILE, Library
from kvasir.model.directory import load_model_dir
from kvasir.server.engine import digest
from kvasir.server.engine.digest import RULES, compute_digest, find_digest, write_digest
from tests.kernels.graphs import needs_library, usable_paths

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"


def doctor(model: Path) -> tuple[int, list[str]]:
    """Return the exit code and the notes of `kvasir doctor MODEL`."""
    result = CliRunner().invoke(app, ["doctor", str(model), "--json"])
    return result.exit_code, json.loads(result.stdout)["notes"]


def use(monkeypatch: pytest.MonkeyPatch, found: Library | str) -> None:
    """Let a library, or the reason why there is none, be found without a trial."""
    for module in (library, digest):
        monkeypatch.setattr(module, "load", lambda *_: found)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "model"))


@needs_library
@pytest.mark.parametrize("path", usable_paths())
def test_the_example_answers_as_everywhere(path: str) -> None:
    """After a change of what is computed: one more in RULES, and examples/renew_digest.py."""
    model = load_model_dir(EXAMPLE)
    found = compute_digest(model.graph_path, model.config, Library(FILE, path))
    assert found == model.manifest.digest


@needs_library
def test_doctor_compares(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Library(FILE, usable_paths()[-1]))
    assert write_digest(copied) == ""
    before = load_model_dir(EXAMPLE).manifest
    assert load_model_dir(copied).manifest == before
    code, notes = doctor(copied)
    assert code == 0
    assert any("to the last bit" in note for note in notes)
    expected = before.digest
    assert expected is not None
    manifest = copied / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace(expected, f"{RULES}-0"))
    code, notes = doctor(copied)
    assert code == 1
    assert any(expected in note for note in notes)
    manifest.write_text(text.replace(expected, "0-0"))  # of another Kvasir
    assert doctor(copied)[0] == 0


def test_without_operators_of_our_own(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "stock operators are used")
    code, notes = doctor(copied)
    assert code == 0
    assert any("stock operators are used" in note for note in notes)
    assert write_digest(copied)
    assert load_model_dir(copied).manifest.digest is None
    assert not any("digest" in note for note in doctor(copied)[1])


def test_what_the_runtime_computes_has_none(tmp_path: Path) -> None:
    """As soft caps of logits, which are not the same on every CPU."""
    model, file = onnx.load(EXAMPLE / "model.onnx", load_external_data=False), tmp_path / "m.onnx"
    (maker,) = (node for node in model.graph.node if "logits" in node.output)
    maker.output[:] = ["uncapped"]
    model.graph.node.append(onnx.helper.make_node("Tanh", ["uncapped"], ["logits"]))
    onnx.save(model, file)
    with pytest.raises(Mismatch, match="Tanh"):
        compute_digest(file, load_model_dir(EXAMPLE).config, Library(FILE))


def test_an_encoder_decoder_has_none() -> None:
    assert find_digest(EXAMPLE.with_name("numbers"))[0] is None

"""The digest of answers: the committed one holds here; models that may differ have none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.kernels import library
from kvasir.kernels.graph import Mismatch
from kvasir.kernels.library import FILE, Library
from kvasir.model.directory import load_model_dir
from kvasir.model.onnx.runtime import open_cpu_session
from kvasir.server.engine import digest, packed, runner
from kvasir.server.engine.digest import RULES, compute_digest, find_digest, write_digest
from tests.kernels.graphs import needs_library, usable_paths
from tests.kit.random_models import export_random
from tests.model.variants import VARIANTS

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
    """Which is not the same on every CPU."""
    model, file = onnx.load(EXAMPLE / "model.onnx", load_external_data=False), tmp_path / "m.onnx"
    (maker,) = (node for node in model.graph.node if "logits" in node.output)
    maker.output[:] = ["uncapped"]
    model.graph.node.append(onnx.helper.make_node("Sin", ["uncapped"], ["logits"]))
    onnx.save(model, file)
    with pytest.raises(Mismatch, match="Sin"):
        compute_digest(file, load_model_dir(EXAMPLE).config, Library(FILE))


# Mixtures, functions and recurrent layers that products of ours stand beside; rows with biases.
KINDS = {"gpt-oss": "int4", "hunyuan mixture": "int8", "olmo2": "int8", "mamba2": "int8"}
KINDS |= {"lfm2": "int4", "qwen3.5": "int8", "bamba": "fp32", "falcon h1": "int8", "bloom": "int8"}


@needs_library
@pytest.mark.parametrize(("name", "precision"), KINDS.items())
def test_every_kind_answers_alike(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every path, and any number of threads."""
    changes = {"d_model": 64} | VARIANTS[name] if precision == "int4" else VARIANTS[name]
    model, found = export_random(tmp_path, precision, **changes), set[str]()
    for i, path in enumerate([*usable_paths(), "auto"]):
        for module in (packed, runner):
            monkeypatch.setattr(module, "usable_cpus", lambda n=1 + i % 3: n)
        found.add(compute_digest(model.graph, model.config, Library(FILE, path)))
    assert len(found) == 1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n_best", [1, 3, 60, 128])
def test_the_runtime_takes_the_first_of_equal_numbers(threads: int, n_best: int) -> None:
    """Else mixtures of experts would have other answers elsewhere."""
    x = np.random.default_rng(1).integers(5, size=(300, 128)).astype(np.float32)
    node = onnx.helper.make_node("TopK", ["x", "k"], ["values", "places"], axis=-1)
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)
    made = onnx.helper.make_tensor_value_info("places", onnx.TensorProto.INT64, None)
    constant = onnx.numpy_helper.from_array(np.array([n_best]), "k")
    graph = onnx.helper.make_graph([node], "best", [given], [made], [constant])
    opsets = [onnx.helper.make_opsetid("", 23)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    (found,) = open_cpu_session(model.SerializeToString(), threads).run(None, {"x": x})
    assert (found == np.argsort(-x, axis=-1, kind="stable")[:, :n_best]).all()


def test_an_encoder_decoder_has_none() -> None:
    assert find_digest(EXAMPLE.with_name("numbers"))[0] is None

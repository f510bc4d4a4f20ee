"""`kvasir doctor`: what it reads off a machine, and what it finds missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvasir.server.engine.digest  # noqa: F401  it would keep a replaced `load`
from kvasir.__main__ import app
from kvasir.commands import doctor
from kvasir.export.directory import export_checkpoint
from kvasir.kernels import library
from kvasir.model.adapters.layout import Layout
from kvasir.model.directory import ADAPTERS_FILE, load_model_dir
from kvasir.model.platform.machine import usable_cpus
from kvasir.server.engine.adapters.loaded import GraphAdapters
from tests.api_reference import EXAMPLE
from tests.kernels.graphs import needs_library, usable_paths
from tests.kit.adapters import save_adapter
from tests.kit.huggingface_checkpoints import make_model, save_checkpoint
from tests.kit.short_samples import shorten_samples

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)

XEON = "flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8\n"
ZEN_3 = "model name\t: AMD EPYC\nflags\t\t: fpu avx avx2 fma\n"
GRAVITON = "Features\t: fp asimd asimddp bf16 i8mm\n"


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        (XEON, ["AVX2", "AVX-512", "VNNI", "BF16", "AMX BF16", "AMX int8"]),
        (ZEN_3, ["AVX2"]),
        (GRAVITON, ["DotProd", "I8MM", "BF16"]),
        ("", []),
    ],
)
def test_features_are_those_of_the_processor(cpuinfo: str, features: list[str]) -> None:
    assert doctor.cpu_features(cpuinfo) == features


def told(*arguments: object, exit_code: int = 0) -> Any:
    """Return what the command prints as JSON."""
    result = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_it_tells_of_this_machine_in_tables_and_in_json() -> None:
    shown, found = CliRunner().invoke(app, ["doctor", "--all"]), told("--all")
    assert shown.exit_code == 0
    assert found["machine"]["cpus"].startswith(f"{usable_cpus()} of {os.cpu_count()} ")
    for section in ("versions", "machine", "precisions", "missing"):
        assert section in shown.stdout or not found[section]
        assert all(name in shown.stdout for name in found[section])


@pytest.mark.parametrize("is_built", [False, pytest.param(True, marks=needs_library)])
def test_it_tells_what_computes_and_the_memory_of_a_token(
    is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes in rows of ONNX Runtime's operators, beside floats of prompts; blocks have scales."""
    stock = "stock operators are used: libkvasir.so was not built when Kvasir was installed"
    if not is_built:
        monkeypatch.setattr(library, "load", lambda *_: stock)
    config = load_model_dir(EXAMPLE).config
    n_heads = 2 * config.n_layer * config.n_kv_head
    size = n_heads * (config.head_dim + 4 * is_built)
    words = f"a token of context takes {size:,} bytes"
    if not is_built:
        words += f", and {4 * size:,} more while its prompt is computed"
    found = told(EXAMPLE)
    assert found["machine"]["kernels"].startswith(usable_paths()[-1] if is_built else stock)
    assert f"stdlib: {words}; " in found["notes"][1]


def test_adapters_are_counted(tmp_path: Path) -> None:
    """As many as a bank of the default size takes, each of the size that it has when loaded."""
    source = save_checkpoint(tmp_path / "source", model := make_model("llama"))
    export_checkpoint(source, tmp_path / "base", precision="int8")
    save_adapter(tmp_path / "adapter", model, r=16)
    graph = GraphAdapters(Layout.load(tmp_path / "base" / ADAPTERS_FILE))
    size = graph.load(tmp_path / "adapter", "adapter", 2**30).n_bytes
    (note,) = doctor._adapters(load_model_dir(tmp_path / "base"))
    assert note.startswith("base: an adapter of rank 16 in all layers takes ")
    assert note.endswith(f"holds {2**30 // size:,}")


def test_every_extra_of_the_package_has_a_purpose() -> None:
    extras = {one.partition("extra == ")[2].strip("\"' ") for one in requires("kvasir-lm") or ()}
    assert doctor._PURPOSES.keys() == extras - {""}


def test_a_gpu_is_used_by_webgpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._notes(["AVX2"], ["onnxruntime"], has_gpu=True)
    monkeypatch.setattr(doctor, "_version", lambda _: "1.0")
    assert not doctor._notes(["AVX2"], ["onnxruntime"], has_gpu=True)


def test_what_contributors_need_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "1" if name == "onnxruntime" else None)
    monkeypatch.setattr(doctor, "_gpus", list)
    of_users, every = told()["missing"].keys(), told("--all")["missing"].keys()
    assert every - of_users == {"dev", "loadtest", "cuda"}
    assert "train" in of_users


def test_missing_packages_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"torch", "onnxruntime", "onnxruntime-gpu"}
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in absent else version(name))
    found = told(exit_code=1)
    assert "'.[train]' (brings torch)" in found["missing"]["train"]
    assert "'.[cpu]' (brings onnxruntime)" in found["missing"]["cpu"]
    assert "no ONNX Runtime" in found["notes"][0]


def test_both_runtimes_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: "1.0")
    found = told()
    assert "share a folder" in found["notes"][0]
    assert not found["missing"].keys() & doctor._PURPOSES.keys()


def test_a_gpu_that_the_runtime_cannot_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034 MiB, 580.65'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    version = doctor._version
    gpu_only = "onnxruntime-gpu"
    monkeypatch.setattr(doctor, "_version", lambda one: None if one == gpu_only else version(one))
    found = told()
    assert found["machine"]["gpu"] == "NVIDIA L4, 23034 MiB, 580.65"
    assert "bf16" in found["precisions"]
    assert "install cuda instead" in found["notes"][0]


def test_it_needs_none_of_the_packages_that_may_be_missing() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('torch', 'onnxruntime', 'onnx'))); "
    code += "sys.argv[1:] = ['doctor']; from kvasir.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

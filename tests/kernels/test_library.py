"""The library is found and tried, or a sentence says why stock operators are used."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kvasir.kernels import library, self_test
from kvasir.kernels.library import Library, load
from tests.kernels.graphs import graph, needs_library, self_test_graph, session, usable_paths

COMPILER, OBJDUMP = shutil.which("g++"), shutil.which("objdump")


@needs_library
@pytest.mark.parametrize("path", usable_paths())
def test_a_path_passes_its_trial(path: str) -> None:
    self_test.run(Library(library.FILE, path))


@needs_library
def test_a_trial_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("auto", tmp_path / "cache")
    assert isinstance(first, Library)
    assert first.path == usable_paths()[-1]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a second trial"))
    assert load("auto", tmp_path / "cache") == first


@needs_library
def test_the_trial_of_another_machine_does_not_count(tmp_path: Path) -> None:
    """Its CPU may take another path from the cache that both share."""
    found = load("auto", tmp_path)
    (passed,) = tmp_path.iterdir()
    passed.write_text("other")
    assert load("auto", tmp_path) == found
    assert passed.read_text() == getattr(found, "path", "")


@needs_library
def test_without_a_cache_the_library_is_still_used(tmp_path: Path) -> None:
    """As in a container with a root that cannot be written, and without a home."""
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", None):
        assert load("scalar", cache) == Library(library.FILE, "scalar")


def test_stock_operators_are_used_as_asked(tmp_path: Path) -> None:
    assert load("off", tmp_path) == "stock operators are used: the setting asks for them"


def test_a_library_that_was_not_built(tmp_path: Path) -> None:
    found = load("auto", tmp_path, tmp_path / "libkvasir.so")
    assert found == "stock operators are used: libkvasir.so was not built when Kvasir was installed"


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    file = tmp_path / "libkvasir.so"
    file.write_bytes(b"no library")
    found = load("auto", tmp_path, file)
    assert re.match("stock operators are used: the trial of libkvasir.so failed: .*", str(found))
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_a_library_that_crashes_ends_its_trial_alone(tmp_path: Path) -> None:
    """As one does that takes a function from the wrong position of the runtime's table."""
    source, file = tmp_path / "crash.cc", tmp_path / "libkvasir.so"
    source.write_text('extern "C" void* RegisterCustomOps(void*, void*) { __builtin_trap(); }')
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", file, source], check=True)
    found = load("auto", tmp_path, file)
    assert re.search(r"failed: it ended with -\d+$", str(found))


@needs_library
@pytest.mark.skipif("avx2" not in usable_paths(), reason="needs AVX2")
def test_a_slower_path_is_used_if_the_fastest_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each start says so, and tries the fastest again."""
    run, failing = subprocess.run, ["auto", "avx512"]

    def fail(command: tuple[str, ...], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[-1] in failing:
            return subprocess.CompletedProcess(command, 1, stderr="wrong by up to 3")
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", fail)
    for _ in range(2):
        found = load("auto", tmp_path)
        assert isinstance(found, Library)
        assert found.path == "avx2"
        assert found.fault == "the trial of libkvasir.so failed: wrong by up to 3"
    failing.clear()
    found = load("auto", tmp_path)
    assert isinstance(found, Library)
    assert found.fault is None


@needs_library
@pytest.mark.parametrize("place", range(len(self_test.trials())))
def test_a_wrong_result_fails_the_trial(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = self_test.trials()
    trial = trials[place]
    trials[place] = trial._replace(expected=trial.expected + np.float32(0.5))
    monkeypatch.setattr(self_test, "trials", lambda: trials)
    with pytest.raises(RuntimeError, match=f"{trial.operator} is wrong by up to "):
        self_test.run(Library(library.FILE))


def test_every_operator_is_tried() -> None:
    source = library.FILE.with_name("register.cc").read_text()
    registered = re.findall(r"^ +const \w+Operator \w+\[(\d+)\];$", source, re.MULTILINE)
    assert len({trial.operator for trial in self_test.trials()}) == sum(map(int, registered))


def test_the_graph_of_the_trial_is_current() -> None:
    """`python -m tests.kernels.graphs` writes it."""
    assert self_test.GRAPH.read_bytes() == self_test_graph()


@needs_library
@pytest.mark.skipif(not OBJDUMP, reason="needs objdump")
def test_wide_registers_are_used_only_where_they_were_chosen() -> None:
    """Else a CPU without them would fail in code that all paths share."""
    command = [str(OBJDUMP), "-d", "-C", "--no-show-raw-insn", str(library.FILE)]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions = re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)*)", code, re.MULTILINE)
    assert len(functions) > 50
    for name, body in functions:
        if "kvasir::avx512::" not in name:
            assert "zmm" not in body, name
            assert "kvasir::avx2::" in name or "ymm" not in body, name


@needs_library
def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """Packed, and no longer in the mapping of their file, which lookups may still read."""
    weight = np.random.default_rng(1).integers(-127, 128, (4096, 4096), dtype=np.int8)
    constants = {"weight": weight, "scales": np.ones(4096, dtype=np.float32)}
    model = onnx.load_from_string(graph("Linear", constants, {"transposed": 1}))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin")
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    model.graph.node.append(helper.make_node("Gather", ["weight", "ids"], ["rows"]))
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, None))
    model.graph.output.append(helper.make_tensor_value_info("rows", TensorProto.INT8, None))
    onnx.save(model, tmp_path / "m.onnx")
    opened = session(str(tmp_path / "m.onnx"))
    mappings = re.findall(
        r"weights\.bin\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text()
    )
    assert mappings
    assert sum(map(int, mappings)) < weight.nbytes / 1024 / 4
    y, rows = opened.run(None, {"x": np.eye(2, 4096, dtype=np.float32), "ids": np.arange(4096)})
    assert (y.round() == weight.T[:2]).all()
    assert (rows == weight).all()

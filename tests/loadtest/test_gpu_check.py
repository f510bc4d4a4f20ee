"""The GPU check without a GPU: its log, and all of it on the graph in numpy."""

from __future__ import annotations

import json
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from kvasir.loadtest import bench_engine
from kvasir.loadtest.gpu import check as gpu_check
from kvasir.loadtest.gpu import steps as gpu_steps
from kvasir.loadtest.gpu.check import FigureLog, Sequences, check
from kvasir.loadtest.gpu.promises import SkippedError, check_figures, check_promises
from kvasir.model.directory import PRECISIONS
from kvasir.model.presets import PRESETS, preset
from kvasir.model.records import Verification
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.gpu.session import BACKENDS
from tests.engine.test_paged_runner import make_engine
from tests.engine.test_session import NO_GPU
from tests.kit.numpy_session import export_paged, numpy_backend
from tests.kit.recording_session import recording_backend

LENGTHS = (3, 9, 5, 4, 7, 2, 6, 5)  # of prompts


def test_a_failure_costs_only_its_own_figure(tmp_path: Path) -> None:
    def fail(error: Exception) -> float:
        raise error

    log = FigureLog(tmp_path / "figures.json")
    log.note("one", lambda: 1.5)
    log.note("two", fail, RuntimeError("out of memory"))
    log.note("none", fail, SkippedError("no such tool"))
    log.note("three", lambda: {"a": 3})
    assert json.loads((tmp_path / "figures.json").read_text()) == {
        "one": 1.5,
        "two": {"failed": "RuntimeError: out of memory"},
        "none": {"skipped": "no such tool"},
        "three": {"a": 3},
    }
    assert log.failures == ["two"]


@pytest.mark.parametrize(
    ("agreement", "near_ties", "passes"), [(0.96, 0, True), (0.9, 8, True), (0.9, 2, False)]
)
def test_only_near_ties_are_forgiven(agreement: float, near_ties: int, passes: bool) -> None:
    """Rounding alone changes greedy tokens of random weights where two are about as likely."""
    figures = Verification(
        max_logit_error=0.1, greedy_agreement=agreement, near_ties=near_ties, positions=100
    )
    if passes:
        check_figures(figures, "bf16")
        return
    with pytest.raises(AssertionError, match=r"92\.0% of tokens"):
        check_figures(figures, "bf16")


def test_a_wrong_block_table_breaks_a_promise(tmp_path: Path) -> None:
    """With blocks of 8 tokens. The whole checks below show that right ones keep all promises."""
    model = export_paged(tmp_path)

    def open_runner(n_blocks: int, max_num_seqs: int) -> PagedRunner:
        engine, _ = make_engine(model, n_blocks=n_blocks, max_num_seqs=max_num_seqs)
        assert isinstance(engine.runner, PagedRunner)
        return engine.runner

    wrong = open_runner(9, 4)
    slots = wrong.kv.slots

    def check_all() -> None:
        alone = partial(open_runner, 8, 1)
        assert check_promises(alone, lambda: wrong, LENGTHS, n_new=6, chunk_size=16) == 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrong.kv, "slots", lambda rows, positions: slots(rows, positions)[::-1])
        with pytest.raises(AssertionError):
            check_all()


def version_on_a_card(package: str) -> str:
    """ONNX Runtime's package has another name there."""
    if package == "onnxruntime":
        raise PackageNotFoundError(package)
    return version(package)


SMALL = {"vocab_size": 300, "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1}
SMALL |= {"head_dim": 16, "d_ff": 32, "max_model_len": 600}


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU in numpy, with presets, prompts and batches that it can bear."""
    monkeypatch.setitem(PRESETS, "small", preset("tiny", **SMALL))
    monkeypatch.setitem(BACKENDS, "cuda", recording_backend(2**20))
    monkeypatch.setattr("kvasir.export.directory.version", version_on_a_card)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "numpy")
    monkeypatch.setattr(bench_engine, "measure_gpu", lambda: (1e9, 1e12))
    sequences = Sequences(LENGTHS, (8, 8), 16, 6, 512)
    monkeypatch.setitem(gpu_check._SEQUENCES, "cuda", sequences)
    monkeypatch.setitem(PRECISIONS, "cuda", ("bf16", "int4"))
    monkeypatch.setattr(gpu_check, "KV_DTYPES", ("int8",))
    monkeypatch.setitem(bench_engine.DECODE_BATCHES, "cuda", (2,))
    monkeypatch.setitem(bench_engine.PREFILL_TOKENS, "cuda", (4,))
    for module, name, value in (
        (gpu_check, "PRESETS", ("small",)),
        (gpu_check, "_CONTEXTS", (5, 300, 715)),
        (gpu_check, "_LONGEST", 720),
        (gpu_check, "_REPLAYED", 260),
        (gpu_check, "_KV_BYTES", 2**17),
        (gpu_steps, "_NEW", 3),
        (gpu_steps, "_PROMPT", 4),
        (gpu_steps, "_ROUNDS", 1),
        (bench_engine, "_PROMPT_TOKENS", 4),
        (bench_engine, "_DECODE_STEPS", 3),
        (bench_engine, "_PREFILL_ROUNDS", 1),
        (gpu_steps, "_STEPS", 2),
        (gpu_steps, "_PROFILED", 1),
    ):
        monkeypatch.setattr(module, name, value)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho no errors of $*\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("small_card")
def test_the_whole_check_runs_in_numpy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """compute-sanitizer, which is another command here, gets a prefill and two decodes."""
    failed = check(tmp_path / "models", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert not failed, {name: figures[name] for name in failed}
    skipped = {name for name, one in figures.items() if "skipped" in str(one)}
    assert skipped == {  # in rows of 720
        f"small bf16, context 715, batch 2, {how}: step" for how in ("greedy", "greedy, no graphs")
    }
    names = list(figures)
    order = ("parity", "graphs beside", "step", "answers", "compute-sanitizer")
    places = [next(i for i, name in enumerate(names) if part in name) for part in order]
    assert places == sorted(places)
    assert figures["small bf16: tokens as alone"] == 1.0
    beside = figures["small bf16, batch 2: graphs beside eager runs"]
    assert beside["same greedy tokens"] == 1.0
    for how, captures in (("greedy", True), ("greedy, no graphs", False)):
        assert figures[f"small bf16, context 300, batch 2, {how}: step"]["graphs"] is captures
    folder = tmp_path / "models" / "small-cuda-bf16"
    assert str(folder) in figures["compute-sanitizer"]
    capsys.readouterr()
    gpu_steps.run_shortly(folder)
    assert len(json.loads(capsys.readouterr().out)[0]) == 3
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\necho an invalid read\nexit 9\n")
    with pytest.raises(AssertionError, match="an invalid read"):
        gpu_steps.check_memory(folder)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SkippedError):
        gpu_steps.check_memory(folder)


def test_the_check_of_webgpu_runs_in_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a stream of a server, which is a process of its own, and without short weights."""
    backend = numpy_backend(2**20)._replace(open_stream=None, kv_cache_bytes=2**24)
    monkeypatch.setitem(BACKENDS, "webgpu", backend)
    monkeypatch.setitem(PRECISIONS, "webgpu", ("fp16",))
    monkeypatch.setattr(gpu_check, "check_stream", lambda folder: folder.name)
    monkeypatch.setattr(gpu_check, "_SMALL", {"scale": 3} | SMALL)
    monkeypatch.setitem(gpu_check._SEQUENCES, "webgpu", Sequences(LENGTHS, (3, 6), 2, 4, 64))
    monkeypatch.setattr(gpu_steps, "_NEW", 3)
    monkeypatch.setattr(gpu_steps, "_PROMPT", 4)
    failed = check(tmp_path / "models", tmp_path / "figures.json", "webgpu")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert not failed, {name: figures[name] for name in failed}
    assert figures["fp16: parity"]["max_logit_error"] < 0.05
    assert figures["tokens as alone"] == 1.0
    assert figures["stream over HTTP"] == "tiny-webgpu-fp16"
    assert figures["batch 8, tokens/s"] > 0


@NO_GPU
def test_the_check_ends_at_once_without_a_card(tmp_path: Path) -> None:
    assert check(tmp_path / "models", tmp_path / "figures.json") == ["machine"]
    (figure,) = json.loads((tmp_path / "figures.json").read_text()).values()
    assert figure["failed"].startswith("NoDeviceError: ")

"""`kvasir bench engine` prints figures that agree with one another."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.loadtest import bench_engine as bench
from kvasir.loadtest.gpu import check
from kvasir.model.network.transformer import Transformer
from kvasir.model.presets import preset
from tests.kernels.graphs import needs_library, usable_paths


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little; a test that asks again, in other words, gets the same figures."""
    for name, value in (("_DECODE_STEPS", 6), ("_PREFILL_ROUNDS", 1), ("_READ_BYTES", 2**20)):
        monkeypatch.setattr(bench, name, value)
    measure, found = bench.bench_engine, list[Any]()

    def measure_once(*asked: Any, **more: Any) -> Any:
        found.extend([measure(*asked, **more)] if not found else ())
        return found[0]

    monkeypatch.setattr(bench, "bench_engine", measure_once)


def figures_and_table(model: Path, *options: str) -> tuple[Any, str]:
    """Return what the command prints of a model in the cache, in both ways."""
    arguments = ["bench", "engine", "--preset", "tiny", "--cache-dir", str(model.parents[1])]
    told = CliRunner().invoke(app, [*arguments, *options, "--json"])
    assert told.exit_code == 0, told.output
    return json.loads(told.stdout), CliRunner().invoke(app, [*arguments, *options]).stdout


def test_the_command_prints_its_figures(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def read_speed(n_bytes: float, threads: int) -> float:
        assert threads >= 1
        read.append(n_bytes)
        return 1e9

    monkeypatch.setattr(bench, "read_speed", read_speed)
    written = (tiny_model / "model.onnx").stat().st_mtime_ns
    figures, shown = figures_and_table(tiny_model)
    assert [row["batch"] for row in figures["decode"]] == [1, 4, 16]
    for row in figures["decode"]:
        assert row["tokens_per_second"] == pytest.approx(
            row["batch"] / row["step_milliseconds"] * 1e3
        )
        # A small model stays in the caches, so as many bytes as the step's are read.
        n_bytes = bench.bytes_per_step(preset("tiny"), "int8", row["batch"], "cpu")
        assert read.pop(0) == n_bytes
        assert row["roofline"] == pytest.approx(n_bytes / row["step_milliseconds"] / 1e6)
    assert set(figures["prefill_tokens_per_second"]) == {"128", "512"}
    assert 0 < figures["outside_greedy"] < 1
    assert 0 < figures["outside_sampled"] < 1
    assert "of roofline" in shown
    assert f"threads of {figures['processor']}, " in shown
    assert (tiny_model / "model.onnx").stat().st_mtime_ns == written, "the preset is kept"


@needs_library
@pytest.mark.parametrize("kernels", ["on", "scalar"])
def test_operators_of_our_own_and_stock_ones_are_measured_in_turn(
    kernels: str, tiny_model: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "ratios.png"
    options = (
        "--kernels",
        f"{kernels},off",
        "--plot",
        str(picture),
        "--prompt",
        "16",
        "--prompt",
        "40",
    )
    found, table = figures_and_table(tiny_model, *options)
    path = usable_paths()[-1] if kernels == "on" else kernels
    assert (found["kernels"]["kernels"], found["stock"]["kernels"]) == (path, None)
    assert plt.imread(picture).ndim == 3
    for place, (batch, ratio) in enumerate(found["decode_ratios"].items()):
        ours, stock = (found[name]["decode"][place] for name in ("kernels", "stock"))
        assert ours["batch"] == stock["batch"] == int(batch)
        assert ratio == pytest.approx(stock["step_milliseconds"] / ours["step_milliseconds"])
    assert found["prefill_ratios"].keys() == {"16", "40"}
    assert f"kernels for {found['kernels']['kernels']}" in table
    assert table.count("decode, batch") == 3


def test_prompts_fit_the_rows_of_presets() -> None:
    longest = max(map(max, bench.PREFILL_TOKENS.values()))
    assert all(longest < preset(name).max_model_len for name in check.PRESETS)


@pytest.mark.parametrize("n_bytes", [1e5, 1e6])
def test_the_speed_of_reading_is_a_number(n_bytes: float) -> None:
    assert 0 < bench.read_speed(n_bytes, 2) < math.inf


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--preset", "huge", "no preset 'huge'"),
        ("--precision", "int3", "no precision 'int3'"),
        ("--device", "cuda", "install the extra cuda"),
        ("--kernels", "on", "kernels cannot be on: libkvasir.so is missing"),
        ("--kernels", "avx2,off", "kernels cannot be avx2: libkvasir.so is missing"),
        ("--kernels", "off,on", "kernels are 'off,on'"),
        ("--kernels", "sse", "kernels are 'sse'"),
        ("--plot", "ratios.png", "--plot draws ratios"),
        ("--preset", "tiny-seq2seq", "measure encoder-decoders with"),
    ],
)
def test_an_unusable_option_is_refused_in_one_line(
    option: str, value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "load", lambda *_: "libkvasir.so is missing")
    arguments = ["bench", "engine", "--preset", "tiny", "--cache-dir", str(tmp_path), option, value]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("precision", "weight_bytes"), [("fp32", 4), ("int8", 1)])
def test_the_roofline_counts_what_a_step_has_to_read(precision: str, weight_bytes: int) -> None:
    """Count every weight except an untied embedding, and the KV cache of each sequence."""
    config = preset("tiny", tied_embeddings=False)
    with torch.device("meta"):
        n_parameters = Transformer(config).n_parameters
    measured = bench.bytes_per_step(config, precision, 3, "cpu")
    tokens = 128 + bench._DECODE_STEPS / 2
    cache = 3 * tokens * 2 * config.n_layer * config.n_kv_head * config.head_dim  # numbers
    assert measured == weight_bytes * (n_parameters - config.vocab_size * config.d_model + cache)

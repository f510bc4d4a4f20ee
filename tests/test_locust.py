"""The load test with a real Locust, on a server whose model is faked; skipped where Locust is not installed."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path

import pytest

from loadtest.report import read
from loadtest.run_locust import LOCUSTFILE
from loadtest.slo import LATENCIES
from tests.fake_runner import TIMEOUT, FakeRunner
from tests.live import KEY, Live, live
from tests.serving import VOCAB_SIZE

LOCUST = LOCUSTFILE.parent.parent / "build/loadtest/bin/locust"
pytestmark = pytest.mark.skipif(not LOCUST.exists(), reason="make build/loadtest/.ready installs Locust")


def run(served: Live, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(LOCUST), "-f", str(LOCUSTFILE), "--host", served.url, "--headless", "-r", "100", "--only-summary"]
    environment = os.environ | {"KVASIR_API_KEY": KEY}
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, timeout=TIMEOUT, check=False
    )


def test_mixed_streams_are_measured_and_kept_with_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    with live(FakeRunner(VOCAB_SIZE, max_model_len=2000), max_queue=100) as served:
        options = ("-u", "4", "-t", "2s", "--pace", "spike", "--prompt-words", "4", "--max-tokens", "16")
        done = run(served, *options, "--requests-csv", str(path), "--slo", "errors:0 ttft:p50:20000")
    assert done.returncode == 0, done.stderr
    requests = read(path)
    assert {request.users for request in requests} >= {1, 4}
    for request in requests:
        assert request.ttft is not None
        assert request.e2e is not None
        assert request.longest_gap is not None
        assert 0 < request.ttft <= request.ttft + request.longest_gap <= request.e2e + 1e-6
        assert request.tokens >= 1
    with path.open(encoding="utf-8") as file:
        scenarios = {row["scenario"] for row in csv.DictReader(file)}
    assert {"completion", "shared prefix"} <= scenarios
    for kind in (*LATENCIES, "POST"):
        assert f"\n{kind} " in done.stdout + done.stderr


def test_clients_that_leave_make_the_server_throw_tokens_away() -> None:
    """Poisson arrivals; more tokens are asked for than could be there by the time at which they leave."""
    with live(FakeRunner(VOCAB_SIZE, max_model_len=20000), max_queue=100) as served:
        options = ("-u", "2", "-t", "2s", "--pace", "poisson", "--rate", "5", "-T", "cancel", "--spread", "0")
        lengths = ("--prompt-words", "2", "--max-tokens", "19000")
        done = run(served, *options, *lengths, "--slo", "errors:0 ttft:p50:0")
        assert served.value("tokens_wasted_total") > 0
    assert "SLO missed: ttft p50" in done.stderr
    assert "failed" not in done.stderr
    assert done.returncode == 1


def test_limits_that_are_none_are_refused_before_anything_is_asked() -> None:
    with live() as served:
        done = run(served, "--slo", "ttft:99")
        assert served.value("prompt_tokens_total") == 0
    assert done.returncode == 2
    assert "'ttft:99' is no limit" in done.stderr

"""The load test with a real Locust and a fake model; skipped if Locust is not installed."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path

import pytest

from kvasir.loadtest.locust.request_log import open_requests, read
from kvasir.loadtest.locust.run import LOCUSTFILE, main
from kvasir.loadtest.locust.slo import LATENCIES
from tests.fake_runner import TIMEOUT, FakeRunner
from tests.live import KEY, Live, live
from tests.serving import VOCAB_SIZE

LOCUST = Path(__file__).parents[2] / "build/loadtest/bin/locust"
pytestmark = pytest.mark.skipif(
    not LOCUST.exists(), reason="make build/loadtest/.ready installs Locust"
)


def load(served: Live, options: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(LOCUST), "-f", str(LOCUSTFILE), "--host", served.url]
    command += ["--headless", "-r", "100", "--only-summary", *options.split(), *more]
    environment = os.environ | {"KVASIR_API_KEY": KEY}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT, check=False
    )


def test_mixed_streams_are_measured_and_written_to_a_file(tmp_path: Path) -> None:
    """Their lengths are bounded by the model's context, which they exceed."""
    path = tmp_path / "requests.csv"
    with live(FakeRunner(VOCAB_SIZE, max_model_len=64), max_queue=100) as served:
        options = f"-u 4 -t 2s --pace spike --prompt-words 99 --max-tokens 99 --requests-csv {path}"
        done = load(served, options, "--slo", "errors:0 ttft:p50:20000")
    assert done.returncode == 0, done.stderr
    requests = read(path)
    assert max(open_requests(requests)[1]) == 4
    for request in requests:
        lasted = request.ended - request.sent
        assert request.ttft is not None
        assert 0 < request.ttft <= request.ttft + sum(request.gaps) <= lasted + 1e-3
        assert request.e2e is None or abs(request.e2e - lasted) < 1e-3
        assert request.tokens >= 1
    with path.open(encoding="utf-8") as file:
        scenarios = {row["scenario"] for row in csv.DictReader(file)}
    assert {"completion", "shared prefix"} <= scenarios
    for kind in (*LATENCIES, "POST"):
        assert f"\n{kind} " in done.stdout + done.stderr


def test_clients_that_disconnect_waste_tokens_of_the_server() -> None:
    """Poisson arrivals ask for more tokens than can be there when they disconnect."""
    with live(FakeRunner(VOCAB_SIZE, max_model_len=20000), max_queue=100) as served:
        options = "-u 2 -t 2s --pace poisson --rate 5 -T cancel --spread 0"
        lengths = ("--prompt-words", "2", "--max-tokens", "19000")
        done = load(served, options, *lengths, "--slo", "errors:0 ttft:p50:0 e2e:p50:60000")
        assert served.value("tokens_wasted_total") > 0
    assert "SLO missed: ttft p50" in done.stderr
    assert "SLO missed: e2e p50 is unknown" in done.stderr, "a cancelled answer has no e2e"
    assert "failed" not in done.stderr
    assert done.returncode == 1


def test_invalid_limits_are_refused_before_a_request() -> None:
    with live() as served:
        done = load(served, "--slo ttft:99")
        assert served.value("prompt_tokens_total") == 0
    assert done.returncode == 2
    assert "'ttft:99' is not a limit" in done.stderr


def test_streams_that_the_end_cuts_off_have_failed(tmp_path: Path) -> None:
    """Poisson arrivals go on while nothing is answered, and every request is reported."""
    path = tmp_path / "requests.csv"
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000, max_num_seqs=2)
    with live(runner, max_queue=1000) as served:
        runner.allow(2)  # for the question before the test starts
        options = "-u 1 -t 1s --pace poisson --rate 200 --stop-timeout 1 -T completion"
        done = load(served, f"{options} --requests-csv {path} --slo errors:0")
        runner.release()
        assert all(served.submitted.acquire(blocking=False) for _ in range(20)), (
            "more than Locust's default of 10 connections"
        )
    requests = read(path)
    assert len(requests) > 20, "of 200 that are due"
    assert all(request.failed for request in requests)
    assert f"SLO missed: {len(requests)} of {len(requests)} requests failed" in done.stderr
    assert "it had not ended when the test did" in done.stdout + done.stderr
    assert done.returncode == 1


def test_a_missing_server_ends_the_test_at_once() -> None:
    with live() as served:
        pass
    done = load(served, "-u 1 -t 5m")
    assert done.returncode == 1
    assert "\nno load test: http://127.0.0.1:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("directory", "slo", "wanted"),
    [
        ("none", "errors:1", "none"),
        ("examples/stdlib", "errors", "'errors' is not a limit"),
        ("examples/stdlib", "errors:1 --nope", "Locust ended with 2 before it"),
    ],
)
def test_an_invalid_run_is_refused_in_one_line(
    directory: str,
    slo: str,
    wanted: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = tmp_path / "report.png"
    old.touch()
    command = ["run", str(LOCUST), directory, str(tmp_path), "--slo", *slo.split()]
    monkeypatch.setattr("sys.argv", command)
    assert main() == 2
    message = capsys.readouterr().err
    assert message.startswith("no load test: ")
    assert wanted in message
    assert message.count("\n") == 1
    assert "--nope" not in slo or not old.exists(), "a picture of another run is removed"

"""The load test with a real Locust and a fake model; skipped if Locust is not installed."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path

import pytest

from kvasir.loadtest.locust.traffic import LATENCIES
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.live import KEY, Live, live
from tests.kit.serving import VOCAB_SIZE, fake_model_dir

ROOT = Path(__file__).parents[2]
LOCUST = ROOT / "build/loadtest/bin/locust"
pytestmark = pytest.mark.skipif(
    not LOCUST.exists(), reason="make build/loadtest/.ready installs Locust"
)


def load(
    served: Live, options: str, *more: str, key: str = KEY
) -> subprocess.CompletedProcess[str]:
    command = [str(LOCUST), "-f", str(ROOT / "loadtest/locust/locustfile.py")]
    command += ["--headless", "-r", "100", "--only-summary", *options.split(), *more]
    environment = os.environ | {"KVASIR_API_KEY": key, "KVASIR_URL": served.url}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT, check=False
    )


@pytest.mark.parametrize("has_chat", [True, False])
def test_mixed_streams_are_measured_and_drawn(has_chat: bool, tmp_path: Path) -> None:
    """Their lengths are bounded by the model's context, which they exceed."""
    model_dir = fake_model_dir() if has_chat else fake_model_dir(chat_template=None)
    runner = FakeRunner(VOCAB_SIZE, max_model_len=64)
    with live(runner, model_dir=model_dir, max_queue=100) as served:
        options = f"-u 4 -t 2s --pace spike --prompt-words 99 --max-tokens 99 --csv {tmp_path}/load"
        limits = ("--report", str(tmp_path / "report.png"), "--slo", "errors:0 ttft:p50:20000")
        done = load(served, options, *limits)
    assert done.returncode == 0, done.stderr
    assert "\nevery limit was kept\n" in done.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "load_stats.csv").open(encoding="utf-8") as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    paths = {"completion": "/v1/completions", "shared prefix": "/v1/completions"}
    paths |= {"chat": "/v1/chat/completions"} if has_chat else {}
    for name, path in paths.items():
        requests = int(rows["POST", f"{path} ({name})"]["Request Count"])
        assert requests == int(rows["ttft", name]["Request Count"])
        first, gap, whole = (float(rows[kind, name]["Median Response Time"]) for kind in LATENCIES)
        assert max(first, gap) <= whole
    assert (("ttft", "chat") in rows) is has_chat


def test_clients_that_disconnect_waste_tokens_of_the_server() -> None:
    """They ask for more tokens than can be there when they disconnect."""
    with live(FakeRunner(VOCAB_SIZE, max_model_len=20000), max_queue=100) as served:
        lengths = ("--prompt-words", "2", "--max-tokens", "19000")
        limits = ("--slo", "errors:0 ttft:p50:0 e2e:p50:60000")
        done = load(served, "-u 2 -t 2s -T cancel --spread 0", *lengths, *limits)
        assert served.value("tokens_wasted_total") > 0
    assert "SLO missed: ttft p50" in done.stderr
    assert "SLO missed: e2e p50 is unknown" in done.stderr, "a cancelled answer has no e2e"
    assert "failed" not in done.stderr
    assert done.returncode == 1


def test_streams_that_the_end_cuts_off_have_failed() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000, max_num_seqs=2)
    with live(runner, max_queue=1000) as served:
        runner.allow(2)  # for the question before the test starts
        options = "-u 20 -t 1s --stop-timeout 1 -T completion --slo errors:0"
        done = load(served, options)
        runner.release()
    assert "SLO missed: 20 of 20 requests failed; the limit is 0 %" in done.stderr
    assert "it had not ended when the test did" in done.stdout + done.stderr
    assert done.returncode == 1


def test_a_server_that_cannot_be_loaded_ends_the_test_at_once() -> None:
    with live() as served:
        refused = load(served, "-u 1 -t 5m", key="wrong")
        invalid = load(served, "--slo ttft:99")
        assert served.value("prompt_tokens_total") == 0
    missing = load(served, "-u 1 -t 5m")
    assert (refused.returncode, missing.returncode, invalid.returncode) == (1, 1, 2)
    answers = f"no load test: {served.url}/v1/models answers HTTP 401: no valid API key"
    assert answers in refused.stderr
    assert f"no load test: {served.url} does not answer" in missing.stderr
    assert "Traceback" not in refused.stderr + missing.stderr
    assert "'ttft:99' is not a limit" in invalid.stderr

"""`kvasir bench reproducibility` against Kvasir, and against servers that differ on purpose."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from kvasir.__main__ import app
from kvasir.loadtest.bench_reproducibility import SHARED_WORDS, make_requests
from tests.kit.fake_completions import DONE, event, fake_completions
from tests.kit.fake_runner import FakeRunner
from tests.kit.live import KEY, live
from tests.kit.serving import VOCAB_SIZE

ALONE, CROWD, CROWD_STREAMED = "alone, streamed", "in a crowd", "in a crowd, streamed"


def bench(*arguments: str) -> Result:
    command = ["bench", "reproducibility", *arguments]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


def answer(body: dict[str, Any], text: str, logprob: float | None = None) -> Any:
    """Answer in two pieces or in one."""
    half = len(text) // 2
    choices = [
        {"text": part, "logprobs": None if logprob is None else {"token_logprobs": [logprob]}}
        for part in ((text[:half], text[half:]) if body["stream"] else (text,))
    ]
    if not body["stream"]:
        if logprob is not None:
            choices[0]["logprobs"] = {"token_logprobs": [logprob] * 2}
        return 200, {"choices": choices}
    return 200, [*(event("", choices=[choice]) for choice in choices), DONE]


def test_kvasir_answers_alike_alone_and_in_a_crowd() -> None:
    with live(FakeRunner(VOCAB_SIZE, max_model_len=1500)) as server:
        options = ["--requests", "6", "--max-tokens", "8", "--api-key", KEY, "--json"]
        result = bench(server.url, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    same = {"requests": 6, "greedy": 0, "drawn": 0, "logprobs": 0}
    assert found["servers"][server.url] == dict.fromkeys((ALONE, CROWD, CROWD_STREAMED), same)
    assert found["different"] == 0


def test_what_differs_is_counted_by_way_and_sampling() -> None:
    """The crowd gets other log-probabilities, and streams of it other draws; no text is greedy."""
    n = 6

    def respond(body: dict[str, Any]) -> Any:
        in_crowd = len(fake.bodies) > 1 + 2 * n
        differs = in_crowd and body["stream"] and body["temperature"]
        return answer(body, "other" if differs else body["prompt"], 0.25 + in_crowd)

    with fake_completions(respond) as fake:
        result = bench(fake.url, "--requests", str(n), "--json")
    rows = json.loads(result.stdout)["servers"][fake.url]
    assert rows[ALONE] == {"requests": n, "greedy": 0, "drawn": 0, "logprobs": 0}
    assert rows[CROWD] == {"requests": n, "greedy": 0, "drawn": 0, "logprobs": n}
    assert rows[CROWD_STREAMED] == {"requests": n, "greedy": 0, "drawn": 3, "logprobs": n}
    assert result.exit_code == 1
    assert len(fake.bodies) == 1 + 4 * n


def test_servers_without_logprobs_are_compared_by_text() -> None:
    def respond(body: dict[str, Any]) -> Any:
        return (400, [b"{}"]) if "logprobs" in body else answer(body, body["prompt"])

    with fake_completions(respond) as first, fake_completions(respond) as second:
        result = bench(first.url, second.url, "--requests", "2", "--model", "m")
    assert result.exit_code == 0, result.output
    assert first.url in result.stdout
    assert second.url in result.stdout
    assert {body["model"] for body in second.bodies} == {"m"}


def test_a_failure_is_no_difference() -> None:
    with fake_completions(lambda _: (404, [b'{"error": {"message": "no such model"}}'])) as fake:
        result = bench(fake.url)
    assert result.exit_code == 1
    assert result.stderr.endswith("failed a request: HTTP 404: no such model\n")
    assert len(fake.bodies) == 2


def test_requests_differ_and_share_prefixes() -> None:
    prompts = [request["prompt"].split() for request in make_requests(24, 5, 1)]
    assert len(set(map(tuple, prompts))) == 24
    for n_shared in SHARED_WORDS[1:]:
        prefixes = [tuple(prompt[:n_shared]) for prompt in prompts]
        assert max(map(prefixes.count, prefixes)) >= 8

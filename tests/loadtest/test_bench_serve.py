"""`kvasir bench serve` against servers of its own, and against servers that the test scripts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvasir.__main__ import app
from kvasir.loadtest.load import SUITES
from tests.kit.fake_completions import DONE, event, fake_completions, well

ROOT = Path(__file__).parents[2]
ONE = ["--workload", "2x3/4", "--rounds", "2", "--requests", "4", "--warmup", "1"]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments], env={"COLUMNS": "200"})


def prompts(bodies: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(body["prompt"]) for body in bodies]


def test_a_served_directory_gives_exact_counts() -> None:
    workloads = ["--workload", "3x20/8", "--workload", "2x64+8/4", "--rounds", "2"]
    result = bench(str(ROOT / "examples/stdlib"), *workloads, "--seed", "5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["workloads"].keys() == {"3x20/8", "2x64+8/4 cold", "2x64+8/4 warm"}
    for row in found["workloads"].values():
        measured = row["servers"]["A"]
        assert measured["failed"] == 0
        assert not any("not what was" in note or "usage" in note for note in measured["notes"])
        assert len(measured["rounds"]) == 2
        assert row.keys() == {"servers"}
    assert found["seed"] == 5


def test_two_servers_take_turns_with_prompts_of_their_own() -> None:
    order = []

    def respond(letter: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
        order.append(letter)
        return well({**body, "max_tokens": 4 if letter == "A" else 2})

    with (
        fake_completions(lambda b: respond("A", b)) as first,
        fake_completions(lambda b: respond("B", b)) as second,
    ):
        options = [first.url, "--compare", second.url, *ONE, "--model", "m"]
        options += ["--extra-body-b", '{"cache_prompt": false}', "--goodput", "ttft:60000"]
        result, again = bench(*options), bench(*options, "--json")
    assert (result.exit_code, again.exit_code) == (0, 0), result.output + again.output
    assert "".join(order) == 2 * ("AB" + 2 * "AAAABBBB"), "a warm-up each, then alternate rounds"
    both = first.bodies + second.bodies
    assert {body["model"] for body in both} == {"m"}
    assert {body.get("cache_prompt") for body in first.bodies} == {None}
    assert {body["cache_prompt"] for body in second.bodies} == {False}
    assert len(set(prompts(both))) == 36, "a prompt sent twice might be cached"

    found = json.loads(again.stdout)["workloads"]["2x3/4"]
    medians = [found["servers"][letter]["median"] for letter in "AB"]
    for key, ratio in found["A/B"].items():
        assert ratio == pytest.approx(medians[0][key] / medians[1][key])
    odd = "not what was asked for: 3 tokens in, 2 out"
    assert [odd in found["servers"][letter]["notes"] for letter in "AB"] == [False, True]
    assert f"2x3/4, B: {odd}" in result.stdout
    assert "A/B: A is better if" in result.stdout


def in_one_piece(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    if "input" in body:
        return 200, {"data": [], "usage": {"prompt_tokens": len(body["input"].split())}}
    return 200, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}


@pytest.mark.parametrize(
    ("suite", "speed"),
    [("embed", "input_tokens_per_second"), ("seq2seq", "output_tokens_per_second")],
)
def test_three_servers_that_do_not_stream_are_compared(suite: str, speed: str) -> None:
    with ExitStack() as stack:
        fakes = [stack.enter_context(fake_completions(in_one_piece)) for _ in "ABC"]
        more = [word for fake in fakes[1:] for word in ("--compare", fake.url)]
        options = ["--workload", suite, "--rounds", "2", "--requests", "2", "--warmup", "1"]
        result = bench(fakes[0].url, *more, *options, "--json")
        shown = bench(fakes[0].url, *more, *options)
    assert (result.exit_code, shown.exit_code) == (0, 0), result.output + shown.output
    rows = json.loads(result.stdout)["workloads"]
    assert rows.keys() == {str(workload) for workload in SUITES[suite]}
    for row in rows.values():
        assert row["servers"].keys() == set("ABC")
        assert row.keys() == {"servers", "A/B", "A/C"}
        assert {speed, "requests_per_second", "e2e_ms_p95"} <= row["A/C"].keys()
        assert all(not one["notes"] for one in row["servers"].values())
    paths = {"embed": "/v1/embeddings", "seq2seq": "/v1/completions"}
    for fake in fakes:
        assert set(fake.paths) == {paths[suite]}
        assert len(fake.bodies) == 2 * len(rows) * 5
    assert "A/B, A/C: A is better if" in shown.stdout
    assert "ttft" not in shown.stdout


def test_waves_of_a_shared_prefix_follow_one_another() -> None:
    options = ["--workload", "2x5+3/2", "--rounds", "2", "--requests", "6", "--warmup", "0"]
    with fake_completions(well) as fake:
        assert bench(fake.url, *options).exit_code == 0
    prefixes = [prompt[:5] for prompt in prompts(fake.bodies)]
    assert len(set(prefixes)) == 2
    assert prefixes == [prefixes[0]] * 6 + [prefixes[6]] * 6
    assert len(fake.connections) == 2, "later waves take the connections of the first"


def test_requests_that_fail_are_counted_and_shown() -> None:
    def respond(body: dict[str, Any]) -> tuple[int, list[bytes]]:
        full = (429, [b'{"error": {"message": "the [/queue] is full"}}'])
        return full if len(fake.bodies) % 3 == 0 else well(body)

    options = ["--workload", "1x3/4", "--rounds", "2", "--requests", "3", "--warmup", "1"]
    with fake_completions(respond) as fake:
        result = bench(fake.url, *options)
    assert result.exit_code == 1
    reason = "requests failed, the first: HTTP 429: the [/queue] is full\n"
    assert f"1x3/4, A: 2 of 6 {reason}" in result.stdout
    assert result.stderr.endswith(f"kvasir: 2 {reason}")


def test_a_server_that_answers_nothing_stops_the_benchmark() -> None:
    with fake_completions(lambda _: (404, [b'{"error": {"message": "no such model"}}'])) as fake:
        result = bench(fake.url, *ONE)
    assert result.exit_code == 1
    assert result.stderr.endswith("answered none of 1 requests: HTTP 404: no such model\n")
    assert len(fake.bodies) == 1


def test_an_open_loop_and_a_server_without_usage() -> None:
    with fake_completions(lambda _: (200, [event("a"), event("b"), DONE])) as fake:
        result = bench(fake.url, *ONE, "--rate", "1000")
    assert result.exit_code == 0, result.output
    assert len(fake.bodies) == 1 + 2 * 4
    assert "rate: 1000.0" in result.stdout
    assert "2x3/4, A: the server sends no usage" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--workload", "16*4"], "'16*4'"),
        (["--goodput", "ttft=5"], "'ttft=5'"),
        (["--extra-body", "[1]"], "'[1]'"),
        (["--extra-body-b", "{", "--compare", "http://x"], "'{'"),
        (["--rate", "5"], "a shared prefix"),
        ([], "'ftp://x'"),
    ],
)
def test_invalid_options_are_refused_in_one_line(arguments: list[str], reason: str) -> None:
    result = bench("ftp://x", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("kvasir: ")
    assert reason in result.stderr


def test_a_mix_tells_short_prompts_from_long_ones() -> None:
    options = ["--workload", "long:2x600-700/2", "--rounds", "1", "--requests", "20"]
    options += ["--rate", "999"]
    with fake_completions(well) as fake:
        result = bench(fake.url, *options, "--warmup", "0", "--json")
    rows = json.loads(result.stdout)["workloads"]
    assert rows.keys() == {"long:2x600-700/2 short", "long:2x600-700/2 long"}
    assert sum(len(body["prompt"]) >= 600 for body in fake.bodies) == 2

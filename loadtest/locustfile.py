"""Mixed traffic on a running server: locust -f loadtest/locustfile.py --host http://localhost:8000 (make loadtest)

Every stream is read event by event. Beside Locust's own row for the HTTP answer there is one of type `ttft` (sending to
the first event with text), `itl` (every gap between such events) and `e2e` (sending to the end) for each scenario, in
milliseconds. `--slo` sets the exit code; `--requests-csv` keeps a line a request, from which loadtest.report draws.

Runs in Locust's own environment, on gevent; imports nothing of the server.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from argparse import ArgumentTypeError
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter, time
from typing import Any
from urllib.request import Request, urlopen

import gevent
from geventhttpclient.response import HTTPSocketPoolResponse
from locust import FastHttpUser, LoadTestShape, constant, events, tag, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from loadtest.slo import LATENCIES, missed, parse_slo
from loadtest.sse_client import Answer, error_message
from loadtest.traffic import PACES, draw, words

COLUMNS = ("scenario", "sent", "ttft", "e2e", "tokens", "longest_gap", "users", "error")


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("Kvasir")
    group.add_argument("--prompt-words", type=float, default=64, help="Median of a prompt's words (log-normal).")
    group.add_argument("--max-tokens", type=float, default=48, help="Median of the tokens asked for (log-normal).")
    group.add_argument("--spread", type=float, default=0.6, help="Sigma of both distributions; 0 is no spread.")
    group.add_argument("--pace", choices=list(PACES), default="constant", help="How the number of users changes.")
    group.add_argument("--rate", type=float, default=2.0, help="Requests a second that each user of poisson sends.")
    group.add_argument(
        "--slo",
        default="",
        type=_checked_slo,
        help='Limits such as "ttft:p99:2500 itl:p99:200 errors:1" (ms, percent).',
    )
    group.add_argument("--requests-csv", default="", help="File for a line a request.")
    group.add_argument("--random-seed", type=int, default=0, help="Of lengths and words.")


def _checked_slo(text: str) -> str:
    """As it was given: options may go to other processes."""
    try:
        parse_slo(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


class Kvasir(FastHttpUser):
    """Sends one request after the other; with the pace poisson, whenever one is due."""

    wait_time = constant(0)
    network_timeout = 300.0
    concurrency = 1000  # requests of one user that poisson may have on their way
    numbers = count()  # a user's own, so that a seed means the same users each time

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.random = Random(f"{options.random_seed} {next(self.numbers)}")  # noqa: S311
        self.shared = words(self.random, round(4 * options.prompt_words))  # the same in each of its requests

    @tag("completion")
    @task(5)
    def completion(self) -> None:
        self.send("completion", "/v1/completions", {"prompt": self.prompt()})

    @tag("chat")
    @task(3)
    def chat(self) -> None:
        if not self.environment.has_chat:  # type: ignore[attr-defined]
            self.completion()
            return
        messages = [{"role": "user", "content": self.prompt()}]
        self.send("chat", "/v1/chat/completions", {"messages": messages})

    @tag("shared")
    @task(3)
    def shared_prefix(self) -> None:
        self.send("shared prefix", "/v1/completions", {"prompt": self.shared + words(self.random, 8)})

    @tag("cancel")
    @task(1)
    def cancel(self) -> None:
        """Leaves after a few tokens."""
        body = {"prompt": self.prompt()}
        self.send("cancel", "/v1/completions", body, leave_after=self.random.randint(1, 8))

    def send(self, scenario: str, path: str, body: dict[str, Any], leave_after: int | None = None) -> None:
        options = self.environment.parsed_options
        body |= {"max_tokens": draw(self.random, options.max_tokens, options.spread), "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if options.pace == "poisson":
            gevent.spawn(self.stream, scenario, path, body, leave_after)
            gevent.sleep(self.random.expovariate(options.rate))
        else:
            self.stream(scenario, path, body, leave_after)

    def stream(self, scenario: str, path: str, body: dict[str, Any], leave_after: int | None) -> None:
        answer = Answer(sent=perf_counter())
        sent_at = time()
        with self.client.post(
            path, json=body, headers=_headers(), stream=True, name=f"{path} ({scenario})", catch_response=True
        ) as response:
            if response.status_code == 200:
                self.read(response.stream, answer, leave_after)
            else:
                answer.fail(f"HTTP {response.status_code}: {_said(response.text)}")
            if answer.error is not None:
                response.failure(answer.error)
        _report(self.environment, scenario, sent_at, answer)

    def read(self, stream: HTTPSocketPoolResponse, answer: Answer, leave_after: int | None) -> None:
        try:
            while line := stream.readline(b"\n"):
                answer.feed(line, perf_counter())
                if leave_after is not None and len(answer.event_times) >= leave_after:
                    answer.ended = perf_counter()
                    return
            answer.finish(perf_counter())
            if not answer.usage:
                answer.fail("the stream ended without its usage")
        except OSError as error:
            answer.fail(f"the connection broke off: {error}")

    def prompt(self) -> str:
        options = self.environment.parsed_options
        return words(self.random, draw(self.random, options.prompt_words, options.spread))


def _headers() -> dict[str, str]:
    key = os.environ.get("KVASIR_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def _said(text: str | None) -> str:
    try:
        return error_message(json.loads(text or ""))
    except ValueError:
        return (text or "")[:200]


def _report(environment: Environment, scenario: str, sent_at: float, answer: Answer) -> None:
    """What came of one request, as events and as a line of the file."""
    if answer.error is None:
        for kind, values in zip(LATENCIES, ([answer.ttft], answer.gaps, [answer.e2e]), strict=True):
            for value in values:
                environment.events.request.fire(
                    request_type=kind, name=scenario, response_time=value * 1e3, response_length=0, exception=None
                )
    writer = environment.requests_csv  # type: ignore[attr-defined]
    if writer is not None:
        known = answer.error is None
        row: dict[str, Any] = {"scenario": scenario, "sent": sent_at, "users": environment.runner.user_count}
        row["error"] = answer.error or ""
        if known:
            row |= {"ttft": answer.ttft, "e2e": answer.e2e, "tokens": answer.n_tokens}
            row["longest_gap"] = max(answer.gaps, default=0.0)
        writer.writerow(row)


class Shape(LoadTestShape):
    """So many users as the pace says for this share of the time."""

    abstract = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        seconds = options.run_time or 60
        elapsed = self.get_run_time()
        if elapsed >= seconds:
            return None
        return PACES[options.pace](elapsed / seconds, options.num_users or 16), 100.0


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    if PACES[options.pace] is not None:
        environment.shape_class = Shape()
        environment.shape_class.runner = environment.runner
    environment.requests_csv = None  # type: ignore[attr-defined]
    if options.requests_csv:
        file = Path(options.requests_csv).open("w", newline="", encoding="utf-8", buffering=1)  # noqa: SIM115
        environment.requests_csv = csv.DictWriter(file, COLUMNS)  # type: ignore[attr-defined]
        environment.requests_csv.writeheader()  # type: ignore[attr-defined]


@events.test_start.add_listener
def _ask_for_chat(environment: Environment, **_: Any) -> None:
    """A model without a chat template refuses to chat: its chats become completions."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    request = Request(f"{environment.host}/v1/chat/completions", json.dumps(body).encode(), _headers())  # noqa: S310
    try:
        urlopen(request, timeout=60).close()  # noqa: S310
        environment.has_chat = True  # type: ignore[attr-defined]
    except OSError:
        environment.has_chat = False  # type: ignore[attr-defined]


@events.quitting.add_listener
def _judge(environment: Environment, **_: Any) -> None:
    """Exit code 1, and a line on what was missed, where the limits of --slo were not kept."""
    limits = parse_slo(environment.parsed_options.slo)
    if not limits:
        return
    times: dict[str, Counter[int]] = {kind: Counter() for kind in LATENCIES}
    n = n_failed = 0
    for (_name, kind), entry in environment.stats.entries.items():
        if kind in times:
            times[kind].update(entry.response_times)  # rounded to two digits, as Locust keeps them
        else:
            n, n_failed = n + entry.num_requests, n_failed + entry.num_failures
    broken = list(missed(limits, times, n, n_failed))
    for line in broken:
        print(f"SLO missed: {line}", file=sys.stderr)  # noqa: T201
    environment.process_exit_code = int(bool(broken))

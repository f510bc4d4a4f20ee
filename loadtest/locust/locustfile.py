"""Mixed traffic on a running server, by Locust (make loadtest).

locust -f loadtest/locust/locustfile.py --host http://localhost:8000

Every stream is read event by event. Each scenario has a row of type `POST` (sending to the end, however that came), and
for answers rows of type `ttft` (sending to the first event with text), `itl` (every gap between such events) and, where
nobody left before, `e2e` (sending to the end), in milliseconds. A stream that runs when the time is over, or its user
goes, is waited for; what still runs after `--stop-timeout` (here 30 s) has failed. `--slo` sets the exit code;
`--requests-csv` keeps a line a request, from which loadtest.report draws.

Runs in Locust's own environment, on gevent; imports nothing of the server.
"""

from __future__ import annotations

import csv
import os
import sys
from argparse import ArgumentTypeError
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter, time
from typing import Any

import gevent
from gevent.pool import Group
from geventhttpclient.response import HTTPSocketPoolResponse
from locust import FastHttpUser, LoadTestShape, constant, events, tag, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import CatchResponseError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loadtest.locust.served import NotServedError, ask, said
from loadtest.locust.slo import LATENCIES, missed, parse_slo
from loadtest.locust.traffic import PACES, draw, words
from loadtest.sse_client import Answer

COLUMNS = ("scenario", "sent", "ended", "ttft", "e2e", "tokens", "gaps", "error")
_LAST_STREAMS = 30.0  # seconds for them to end
_AWAY = 1.0  # seconds until a user asks again a server that takes no connection


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("Kvasir")
    group.add_argument(
        "--prompt-words", type=float, default=64, help="Median of a prompt's words (log-normal)."
    )
    group.add_argument(
        "--max-tokens",
        type=float,
        default=48,
        help="Median of the tokens asked for (log-normal); at most half of what the model holds are.",
    )
    group.add_argument(
        "--spread", type=float, default=0.6, help="Sigma of both distributions; 0 is no spread."
    )
    group.add_argument(
        "--pace", choices=list(PACES), default="constant", help="How the number of users changes."
    )
    group.add_argument(
        "--rate", type=float, default=2.0, help="Requests a second that each user of poisson sends."
    )
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
        self.streams, self.due = (
            Group(),
            perf_counter(),
        )  # of poisson: those on their way, the time of the next
        self.served = self.environment.served  # type: ignore[attr-defined]
        self.random = Random(f"{options.random_seed} {next(self.numbers)}")  # noqa: S311
        most = (
            self.served.max_model_len or sys.maxsize
        ) // 4  # beyond that beginnings may be cut off
        self.shared = words(
            self.random, min(round(4 * options.prompt_words), most)
        )  # the same in each of its requests

    def on_stop(self) -> None:
        try:
            self.streams.join()
        finally:  # no more time
            self.streams.kill()

    @tag("completion")
    @task(5)
    def completion(self) -> None:
        self.send("completion", "/v1/completions", {"prompt": self.prompt()})

    @tag("chat")
    @task(3)
    def chat(self) -> None:
        if not self.served.has_chat:
            self.completion()
            return
        messages = [{"role": "user", "content": self.prompt()}]
        self.send("chat", "/v1/chat/completions", {"messages": messages})

    @tag("shared")
    @task(3)
    def shared_prefix(self) -> None:
        self.send(
            "shared prefix", "/v1/completions", {"prompt": self.shared + words(self.random, 8)}
        )

    @tag("cancel")
    @task(1)
    def cancel(self) -> None:
        """Leaves after a few tokens."""
        body = {"prompt": self.prompt()}
        self.send("cancel", "/v1/completions", body, leave_after=self.random.randint(1, 8))

    def send(
        self, scenario: str, path: str, body: dict[str, Any], leave_after: int | None = None
    ) -> None:
        options = self.environment.parsed_options
        n_tokens = draw(self.random, options.max_tokens, options.spread)
        if most := self.served.max_model_len:
            n_tokens = min(n_tokens, most // 2)
            body["truncate_prompt_tokens"] = most - n_tokens
        body |= {"max_tokens": n_tokens, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if options.pace == "poisson":
            self.streams.spawn(self.stream, scenario, path, body, leave_after)
            self.due += self.random.expovariate(options.rate)
            gevent.sleep(max(0.0, self.due - perf_counter()))
        else:
            self.stream(scenario, path, body, leave_after)

    def stream(
        self, scenario: str, path: str, body: dict[str, Any], leave_after: int | None
    ) -> None:
        answer = Answer(sent=perf_counter())
        sent_at = time()
        try:
            self.exchange(path, body, answer, leave_after)
        except gevent.GreenletExit:
            answer.fail("it had not ended when the test did")
            raise
        finally:
            is_whole = bool(answer.ended) and answer.error is None
            answer.ended = answer.ended or perf_counter()
            _report(self.environment, scenario, path, sent_at, answer, is_whole=is_whole)

    def exchange(
        self, path: str, body: dict[str, Any], answer: Answer, leave_after: int | None
    ) -> None:
        # Not entered as a context, it reports nothing to Locust, which would not hear of streams that are killed.
        response = self.client.post(
            path, json=body, headers=_headers(), stream=True, catch_response=True
        )
        if response.status_code == 200:
            self.read(response.stream, answer, leave_after)
        elif response.status_code:
            answer.fail(f"HTTP {response.status_code}: {said(response.text)}")
        else:
            answer.fail(f"no answer: {response.error}")
            answer.ended = perf_counter()
            gevent.sleep(_AWAY)

    def read(self, stream: HTTPSocketPoolResponse, answer: Answer, leave_after: int | None) -> None:
        try:
            while line := stream.readline(b"\n"):
                answer.feed(line, perf_counter())
                if leave_after is not None and len(answer.event_times) >= leave_after:
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


def _report(
    environment: Environment,
    scenario: str,
    path: str,
    sent_at: float,
    answer: Answer,
    *,
    is_whole: bool,
) -> None:
    """What came of one request, as events and as a line of the file."""
    e2e = [answer.e2e] if is_whole else []
    row: dict[str, Any] = {"scenario": scenario, "sent": sent_at, "ended": sent_at + answer.e2e}
    row |= {"e2e": "".join(map(str, e2e)), "tokens": answer.n_tokens}
    times = [("POST", f"{path} ({scenario})", answer.e2e)]
    if answer.error is None:
        kinds = zip(LATENCIES, ([answer.ttft], answer.gaps, e2e), strict=True)
        times += [(kind, scenario, value) for kind, values in kinds for value in values]
    failure = None if answer.error is None else CatchResponseError(answer.error)
    for kind, name, value in times:
        environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=value * 1e3,
            response_length=0,
            exception=failure,
            context={},
        )
    if environment.requests_csv is not None:  # type: ignore[attr-defined]
        if answer.event_times:
            row |= {"ttft": answer.ttft, "gaps": " ".join(f"{gap:.5f}" for gap in answer.gaps)}
        environment.requests_csv.writerow(row | {"error": answer.error or ""})  # type: ignore[attr-defined]


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
    environment.stop_timeout = environment.stop_timeout or _LAST_STREAMS

    if (
        options.headless
    ):  # else the host may be told later; later, the answers would take some of the time
        _ask(environment)


def _ask(environment: Environment) -> None:
    """Ends the process with a line where there is nothing to load."""
    try:
        environment.served = ask(str(environment.host).rstrip("/"), _headers())  # type: ignore[attr-defined]
    except NotServedError as error:
        sys.exit(f"no load test: {error}")


@events.test_start.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    if not environment.parsed_options.headless:
        _ask(environment)
    environment.requests_csv = None  # type: ignore[attr-defined]
    if path := environment.parsed_options.requests_csv:
        file = Path(path).open("w", newline="", encoding="utf-8", buffering=1)  # noqa: SIM115
        environment.requests_csv = csv.DictWriter(file, COLUMNS)  # type: ignore[attr-defined]
        environment.requests_csv.writeheader()  # type: ignore[attr-defined]


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

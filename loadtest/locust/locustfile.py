"""Mixed traffic on a running server, by Locust (make loadtest).

locust -f loadtest/locust/locustfile.py --host http://localhost:8000

Each scenario has rows of these types, in milliseconds: `POST` from sending to the end of any kind,
`ttft` to the first event with text, `itl` for every gap between such events, and `e2e` to the end,
unless the client disconnected before.

A stream that runs when the time is over, or when its user stops, may end; one that still runs
after `--stop-timeout` (here 30 s) has failed. `--slo` sets the exit code. `--requests-csv` writes a
line a request, from which loadtest.locust.report draws.
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
from locust import FastHttpUser, LoadTestShape, constant, events, tag, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import CatchResponseError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvasir.loadtest.locust.served import NotServedError, query_model
from kvasir.loadtest.locust.slo import LATENCIES, missed, parse_slo
from kvasir.loadtest.locust.traffic import PACES, draw_length, draw_words
from kvasir.loadtest.sse_client import StreamedCompletion, error_message

COLUMNS = ("scenario", "sent", "ended", "ttft", "e2e", "tokens", "gaps", "error")
KEY = os.environ.get("KVASIR_API_KEY")
HEADERS = {"authorization": f"Bearer {KEY}"} if KEY else {}
_STOP_TIMEOUT = 30.0  # seconds for the last streams to end
_RETRY_AFTER = 1.0  # seconds before a user retries a server that accepts no connection


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument_group("Kvasir").add_argument
    add("--prompt-words", type=float, default=64, help="Median words of a prompt (log-normal).")
    answer = "Median tokens of an answer (log-normal); at most half of the model's context."
    add("--max-tokens", type=float, default=48, help=answer)
    add("--spread", type=float, default=0.6, help="Sigma of both; 0 makes all lengths equal.")
    add("--pace", choices=list(PACES), default="constant", help="Number of users over time.")
    add("--rate", type=float, default=2.0, help="Requests a second of each user, with poisson.")
    limits = 'Limits such as "ttft:p99:2500 itl:p99:200 errors:1" (ms, percent).'
    add("--slo", default="", type=_checked_slo, help=limits)
    add("--requests-csv", default="", help="File that gets a line a request.")
    add("--random-seed", type=int, default=0, help="Seed of lengths and words.")


def _checked_slo(text: str) -> str:
    """Return the text of valid limits, because options may go to other processes."""
    try:
        parse_slo(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


class Kvasir(FastHttpUser):
    """A user that sends one request after the other, or at Poisson arrivals whenever one is due."""

    wait_time = constant(0)
    network_timeout = 300.0
    concurrency = 1000  # most open requests of one user with poisson
    numbers = count()  # seeds each user differently, and alike in each test

    def on_start(self) -> None:
        """Draw the prefix that the user's requests share."""
        self.options = self.environment.parsed_options
        self.served = self.environment.served
        self.streams, self.due = Group(), perf_counter()  # of poisson: open ones, next arrival
        self.random = Random(f"{self.options.random_seed} {next(self.numbers)}")  # noqa: S311
        # A longer prefix might be truncated, and then no longer be shared.
        longest = (self.served.max_model_len or sys.maxsize) // 4
        self.shared = draw_words(self.random, min(round(4 * self.options.prompt_words), longest))

    def on_stop(self) -> None:
        """Wait for open streams until Locust kills the user."""
        try:
            self.streams.join()
        finally:
            self.streams.kill()

    @tag("completion")
    @task(5)
    def completion(self) -> None:
        """Complete a prompt."""
        self.send("completion", {"prompt": self.draw_prompt()})

    @tag("chat")
    @task(3)
    def chat(self) -> None:
        """Send a chat, or a completion if the model does not chat."""
        if not self.served.has_chat:
            self.completion()
            return
        messages = [{"role": "user", "content": self.draw_prompt()}]
        self.send("chat", {"messages": messages}, "/v1/chat/completions")

    @tag("shared")
    @task(3)
    def shared_prefix(self) -> None:
        """Complete a prompt that begins with the user's prefix."""
        self.send("shared prefix", {"prompt": self.shared + draw_words(self.random, 8)})

    @tag("cancel")
    @task(1)
    def cancel(self) -> None:
        """Disconnect after a few tokens."""
        body = {"prompt": self.draw_prompt()}
        self.send("cancel", body, last_event=self.random.randint(1, 8))

    def draw_prompt(self) -> str:
        """Draw words of a random length."""
        n = draw_length(self.random, self.options.prompt_words, self.options.spread)
        return draw_words(self.random, n)

    def send(
        self,
        scenario: str,
        body: dict[str, Any],
        path: str = "/v1/completions",
        last_event: int | None = None,
    ) -> None:
        """Send a request of a random length, now or when it is due; disconnect after an event."""
        n_tokens = draw_length(self.random, self.options.max_tokens, self.options.spread)
        if context := self.served.max_model_len:
            n_tokens = min(n_tokens, context // 2)
            body["truncate_prompt_tokens"] = context - n_tokens
        body |= {"max_tokens": n_tokens, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.options.pace != "poisson":
            self.stream(scenario, path, body, last_event)
            return
        self.streams.spawn(self.stream, scenario, path, body, last_event)
        self.due += self.random.expovariate(self.options.rate)
        gevent.sleep(max(0.0, self.due - perf_counter()))

    def stream(
        self, scenario: str, path: str, body: dict[str, Any], last_event: int | None
    ) -> None:
        """Send a request, read its stream and report it, even if the stream is killed."""
        answer, sent_at = StreamedCompletion(sent=perf_counter()), time()
        # Locust reports a response only in a `with` block, and never one whose stream is killed: we
        # report all.
        options = {"headers": HEADERS, "stream": True, "catch_response": True}
        try:
            response = self.client.post(path, json=body, **options)
            if response.status_code == 200:
                self.read(response.stream, answer, last_event)
            elif response.status_code:
                reason = error_message(response.text or "")
                answer.fail(f"HTTP {response.status_code}: {reason}")
            else:
                answer.fail(f"no answer: {response.error}")
                answer.ended = perf_counter()
                gevent.sleep(_RETRY_AFTER)
        except OSError as error:
            answer.fail(f"the connection broke off: {error}")
        except gevent.GreenletExit:
            answer.fail("it had not ended when the test did")
            raise
        finally:
            self.report(scenario, path, sent_at, answer)

    def read(self, stream: Any, answer: StreamedCompletion, last_event: int | None) -> None:
        """Feed a stream to `answer`, to its end or to the last event wanted."""
        while line := stream.readline(b"\n"):
            answer.feed(line, perf_counter())
            if last_event is not None and len(answer.event_times) >= last_event:
                return
        answer.finish(perf_counter())
        if not answer.usage:
            answer.fail("the stream ended without its usage")

    def report(self, scenario: str, path: str, sent_at: float, answer: StreamedCompletion) -> None:
        """Report a request to Locust's statistics, and write its line of the CSV file."""
        e2e = [answer.e2e] if answer.ended and answer.error is None else []
        answer.ended = answer.ended or perf_counter()
        times = [("POST", f"{path} ({scenario})", answer.e2e)]
        if answer.error is None:
            kinds = zip(LATENCIES, ([answer.ttft], answer.gaps, e2e), strict=True)
            times += [(kind, scenario, value) for kind, values in kinds for value in values]
        failure = CatchResponseError(answer.error) if answer.error else None
        event = {"response_length": 0, "exception": failure, "context": {}}
        fire = self.environment.events.request.fire
        for kind, name, value in times:
            fire(request_type=kind, name=name, response_time=value * 1e3, **event)
        if (file := self.environment.requests_csv) is not None:
            row = {"scenario": scenario, "sent": sent_at, "ended": sent_at + answer.e2e}
            row |= {"e2e": "".join(map(str, e2e)), "tokens": answer.n_tokens}
            if answer.event_times:
                row |= {"ttft": answer.ttft, "gaps": " ".join(f"{gap:.5f}" for gap in answer.gaps)}
            file.writerow(row | {"error": answer.error or ""})


class Shape(LoadTestShape):
    """The number of users over time that --pace asks for."""

    abstract = True

    def tick(self) -> tuple[int, float] | None:
        """Return the users now and those to start a second, or None at the end."""
        options = self.runner.environment.parsed_options
        share = self.get_run_time() / (options.run_time or 60)
        return (PACES[options.pace](share, options.num_users or 16), 100.0) if share < 1 else None


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    if PACES[environment.parsed_options.pace] is not None:
        environment.shape_class = Shape()
        environment.shape_class.runner = environment.runner
    environment.stop_timeout = environment.stop_timeout or _STOP_TIMEOUT
    # Asking later would cost some of the test's time. With a page, the host may not be known before
    # it starts.
    if environment.parsed_options.headless:
        _query_model(environment)


def _query_model(environment: Environment) -> None:
    """Ask the server about its model. End the process with one line if there is none."""
    try:
        environment.served = query_model(str(environment.host).rstrip("/"), HEADERS)
    except NotServedError as error:
        sys.exit(f"no load test: {error}")


@events.test_start.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    if not environment.parsed_options.headless:
        _query_model(environment)
    environment.requests_csv = None
    if path := environment.parsed_options.requests_csv:
        file = Path(path).open("w", newline="", encoding="utf-8", buffering=1)  # noqa: SIM115
        environment.requests_csv = csv.DictWriter(file, COLUMNS)
        environment.requests_csv.writeheader()


@events.quitting.add_listener
def _judge(environment: Environment, **_: Any) -> None:
    """Set exit code 1 and print a line for each limit that was missed."""
    limits = parse_slo(environment.parsed_options.slo)
    if not limits:
        return
    times: dict[str, Counter[int]] = {kind: Counter() for kind in LATENCIES}
    n = n_failed = 0
    for (_name, kind), entry in environment.stats.entries.items():
        if kind in times:
            times[kind].update(entry.response_times)  # Locust rounds them to two digits
        else:
            n, n_failed = n + entry.num_requests, n_failed + entry.num_failures
    broken = list(missed(limits, times, n, n_failed))
    for line in broken:
        print(f"SLO missed: {line}", file=sys.stderr)  # noqa: T201
    environment.process_exit_code = int(bool(broken))

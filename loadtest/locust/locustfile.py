"""Mixed traffic on a running server, by Locust (make loadtest).

locust -f loadtest/locust/locustfile.py --host http://localhost:8000

Users send completions, chats, prompts with a shared prefix and requests that they cancel, one after
the other. Each scenario has rows of these types, in milliseconds: `POST` from sending to the end of
any kind, `ttft` to the first event with text, `itl` for every gap between such events, and `e2e` to
the end, unless the client disconnected before.

A stream that runs when the time is over may end; one that still runs after `--stop-timeout` (here
30 s) has failed. `--slo` sets the exit code, and `--report` draws a picture of one process's users.
`kvasir bench serve` measures exact lengths, Poisson arrivals, and several servers in turn.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import gevent
import requests
from locust import FastHttpUser, LoadTestShape, constant, events, tag, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import CatchResponseError
from locust.stats import StatsEntry

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvasir.loadtest.client import Answer
from kvasir.loadtest.locust.traffic import (
    LATENCIES,
    PACES,
    Limit,
    draw_length,
    draw_words,
    parse_slo,
)
from kvasir.model.platform.printable import error_message

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KEY = os.environ.get("KVASIR_API_KEY")
HEADERS = {"authorization": f"Bearer {KEY}"} if KEY else {}
_TIMEOUT = 60.0  # seconds for an answer before the test; the server may be busy with other clients
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
    limits = 'Limits such as "ttft:p99:2500 itl:p99:200 errors:1" (ms, percent).'
    add("--slo", default="", type=_checked_slo, help=limits)
    add("--report", default="", help="PNG file to draw at the end.")
    add("--random-seed", type=int, default=0, help="Seed of lengths and words.")


def _checked_slo(text: str) -> str:
    """Return the text of valid limits, because options may go to other processes."""
    try:
        parse_slo(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


class Kvasir(FastHttpUser):
    """A user that sends one request after the other."""

    host = os.environ.get("KVASIR_URL")  # unless --host is given
    wait_time = constant(0)
    network_timeout = 300.0
    numbers = count()  # seeds each user differently, and alike in each test

    def on_start(self) -> None:
        """Draw the prefix that the user's requests share."""
        self.options = self.environment.parsed_options
        self.longest, self.has_chat = self.environment.served  # of the model: tokens, chats
        self.random = Random(f"{self.options.random_seed} {next(self.numbers)}")  # noqa: S311
        # A longer prefix might be truncated, and then no longer be shared.
        n = min(round(4 * self.options.prompt_words), (self.longest or sys.maxsize) // 4)
        self.shared = draw_words(self.random, n)

    @tag("completion")
    @task(5)
    def completion(self) -> None:
        """Complete a prompt."""
        self.send("completion", {"prompt": self.draw_prompt()})

    @tag("chat")
    @task(3)
    def chat(self) -> None:
        """Send a chat, or a completion if the model does not chat."""
        if not self.has_chat:
            self.completion()
            return
        messages = [{"role": "user", "content": self.draw_prompt()}]
        self.send("chat", {"messages": messages}, CHATS)

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
        path: str = COMPLETIONS,
        last_event: int | None = None,
    ) -> None:
        """Send a request of a random length, read its stream to an event or the end, report it."""
        n_tokens = draw_length(self.random, self.options.max_tokens, self.options.spread)
        if self.longest:
            n_tokens = min(n_tokens, self.longest // 2)
            body["truncate_prompt_tokens"] = self.longest - n_tokens
        body |= {"max_tokens": n_tokens, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        answer = Answer(sent=perf_counter())
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
        except OSError as error:
            answer.fail(f"the connection broke off: {error}")
        except gevent.GreenletExit:
            answer.fail("it had not ended when the test did")
            raise
        finally:
            self.report(scenario, path, answer)
        if (answer.error or "").startswith("no answer"):
            gevent.sleep(_RETRY_AFTER)

    def read(self, stream: Any, answer: Answer, last_event: int | None) -> None:
        """Feed a stream to `answer`, to its end or to the last event wanted."""
        while line := stream.readline(b"\n"):
            answer.feed(line, perf_counter())
            if last_event is not None and len(answer.event_times) >= last_event:
                return
        answer.finish(perf_counter())
        if not answer.usage:
            answer.fail("the stream ended without its usage")

    def report(self, scenario: str, path: str, answer: Answer) -> None:
        """Report a request to Locust's statistics, and keep it for the picture."""
        times = [("POST", f"{path} ({scenario})", (answer.ended or perf_counter()) - answer.sent)]
        if answer.error is None:
            e2e = [answer.e2e] if answer.ended else []
            kinds = zip(LATENCIES, ([answer.ttft], answer.gaps, e2e), strict=True)
            times += [(kind, scenario, value) for kind, values in kinds for value in values]
        failure = CatchResponseError(answer.error) if answer.error else None
        event = {"response_length": 0, "exception": failure, "context": {}}
        for kind, name, value in times:
            self.environment.events.request.fire(
                request_type=kind, name=name, response_time=value * 1e3, **event
            )
        if self.options.report:
            self.environment.answers.append(answer)


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
    environment.answers = []
    # Asking later would cost some of the test's time. With a page, the host may not be known before
    # it starts.
    if environment.parsed_options.headless:
        _query_model(environment)


@events.test_start.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    environment.answers.clear()
    if not environment.parsed_options.headless:
        _query_model(environment)


def _query_model(environment: Environment) -> None:
    """Ask for the model's context, and whether it chats. End the process if there is no server."""
    url = str(environment.host or Kvasir.host).rstrip("/")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    try:
        listed = requests.get(f"{url}/v1/models", headers=HEADERS, timeout=_TIMEOUT)
        chat = requests.post(url + CHATS, json=body, headers=HEADERS, timeout=_TIMEOUT)
        for response in (listed, chat):
            if not response.ok and not (response is chat and chat.status_code == 400):
                reason = f"HTTP {response.status_code}: {error_message(response.text)}"
                sys.exit(f"no load test: {response.url} answers {reason}")
        environment.served = listed.json()["data"][0].get("max_model_len"), chat.ok
    except (requests.RequestException, AttributeError, LookupError, TypeError) as error:
        sys.exit(f"no load test: {url} does not answer as an OpenAI-compatible server: {error}")


@events.quitting.add_listener
def _judge(environment: Environment, **_: Any) -> None:
    """Set exit code 1 and print a line for each limit that was missed; then draw the picture."""
    options = environment.parsed_options
    limits = parse_slo(options.slo)
    missed = [line for limit in limits for line in _missed(environment, limit)]
    for line in missed or ["every limit was kept"] * bool(limits):
        print(line, file=sys.stderr)  # noqa: T201
    if limits:
        environment.process_exit_code = int(bool(missed))
    if options.report and environment.answers:
        from kvasir.loadtest.locust.report import draw  # noqa: PLC0415  slow

        draw(environment.answers, Path(options.report), limits)


def _missed(environment: Environment, limit: Limit) -> Iterator[str]:
    """Yield a line if a limit was missed. A limit on an unknown latency is missed."""
    kind = "POST" if limit.kind == "errors" else limit.kind
    total = StatsEntry(environment.stats, kind, kind)
    for (_name, of_entry), entry in environment.stats.entries.items():
        if of_entry == kind:
            total.extend(entry)
    n, n_failed = total.num_requests, total.num_failures
    if limit.kind == "errors":
        if not n or 100 * n_failed > limit.most * n:
            failed = f"{n_failed} of {n} requests failed"
            yield f"SLO missed: {failed}; the limit is {limit.most:g} %"
        return
    value = total.get_response_time_percentile(limit.percentile / 100)  # of two digits
    if not n or value > limit.most:
        measured = f"{kind} p{limit.percentile:g} is {f'{value} ms' if n else 'unknown'}"
        yield f"SLO missed: {measured}; the limit is {limit.most:g} ms"

"""Run the stack of Docker Compose on a container engine and check it.

python -m tests.deploy.compose_check

Builds the images, starts the stack as a project of its own on free ports, prints a line for each
check, and removes the stack. A service whose image is missing and cannot be pulled is left out.
Exit code 1 after the first failed check.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kvasir.loadtest.client import Answer, Target
from tests.deploy.checking import ROOT, FailedError, SkippedError, load
from tests.deploy.monitoring import RULES
from tests.deploy.rolling_restart import free_port, stream_tokens

PROJECT = "kvasir-check"
FOLDER = Path("build/compose-check")  # relative, as an engine may see the repository elsewhere
KEY = "compose-check"
SHORT, LONG = 32, 1000  # tokens of a stream
WAIT = 60  # seconds for a restart, and for Prometheus' first scrape and evaluation
CONFINEMENT = """
import json, os
open("/tmp/written", "w").close()
root = os.statvfs("/").f_flag & os.ST_RDONLY
print(json.dumps({"user": os.stat("/proc/1").st_uid, "read-only": bool(root)}))
"""
KILL_ALL = "import os, signal; os.kill(-1, signal.SIGKILL)"  # spares process 1, which is init


class Stack:
    """The services of Compose in a project of their own."""

    def __init__(self) -> None:
        self.port, self.prometheus_port, self.grafana_port = (free_port() for _ in range(3))
        self._environment = os.environ | {
            "PORT": str(self.port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
            "GRAFANA_PORT": str(self.grafana_port),
            "REPORT": f"./{FOLDER}/report",
            "KEYS": f"./{FOLDER}/keys.txt",
        }
        for name in ("MODEL", "MODEL_NAME"):  # the example's context and speed are known
            self._environment.pop(name, None)

    def docker(self, *command: str, limit: float = 300) -> str:
        """Return what a docker command prints. Raises FailedError."""
        line = ("docker", *command)
        try:
            done = subprocess.run(
                line, capture_output=True, text=True, check=False, cwd=ROOT,
                env=self._environment, timeout=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise FailedError(f"{' '.join(line)} takes more than {limit:g} s") from None
        if done.returncode:
            text = f"{done.stdout}\n{done.stderr}".strip()
            raise FailedError(f"{' '.join(line)} ended with {done.returncode}: {text}")
        return done.stdout.strip()

    def compose(self, *command: str, overlays: tuple[str, ...] = (), limit: float = 300) -> str:
        files = [f"--file={name}" for name in ("docker-compose.yml", *overlays)]
        command = ("compose", "--ansi=never", f"--project-name={PROJECT}", *files, *command)
        return self.docker(*command, limit=limit)

    def start(self, service: str, *overlays: str) -> None:
        self.compose("up", "--detach", "--wait", "--no-build", service, overlays=overlays)

    def start_if_available(self, service: str) -> None:
        """Start a service. Raises SkippedError if its image cannot be had."""
        try:
            self.compose("pull", "--policy=missing", service)
        except FailedError as error:
            raise SkippedError(f"left out: {str(error).splitlines()[-1]}") from None
        self.start(service)

    def in_server(self, code: str) -> str:
        """Return what Python code prints in the server's container."""
        return self.compose("exec", "--no-TTY", "server", "python", "-c", code)

    def inspect(self, field: str) -> str:
        """Return a field of the server's container, which may have stopped."""
        container = self.compose("ps", "--all", "--quiet", "server")
        return self.docker("inspect", f"--format={{{{{field}}}}}", container)

    def stream(self, n_tokens: int, key: str | None = None) -> Answer:
        """Return a completion, which fails unless it has exactly so many tokens."""
        target = Target(f"http://127.0.0.1:{self.port}", key)
        return asyncio.run(stream_tokens(target, n_tokens))


def get(port: int, path: str, key: str | None = None) -> Any:
    """Return the JSON of an answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urlopen(request, timeout=10) as answer:  # noqa: S310
        return json.load(answer)


def eventually(check: Callable[[], str]) -> str:
    """Return what a check returns once it no longer fails."""
    end = time.monotonic() + WAIT
    while True:
        try:
            return check()
        except (FailedError, OSError):
            if time.monotonic() > end:
                raise
        time.sleep(0.5)


def images_are_built(stack: Stack) -> str:
    stack.compose("--profile=load", "build", limit=3600)
    return "server and load test"


def server_is_healthy(stack: Stack) -> str:
    stack.start("server")
    return f"{stack.inspect('.State.Health.Status')}, on a port of its own"


def server_is_confined(stack: Stack) -> str:
    found = json.loads(stack.in_server(CONFINEMENT))
    if found != {"user": 10001, "read-only": True}:
        raise FailedError(f"the server's process has {found}")
    return "user 10001, read-only root, writable /tmp"


def completion_streams(stack: Stack, key: str | None = None) -> str:
    answer = stack.stream(SHORT, key)
    if answer.error is not None:
        raise FailedError(answer.error)
    return f"{answer.n_tokens} tokens in {len(answer.event_times)} events"


def prometheus_scrapes(stack: Stack) -> str:
    stack.start_if_available("prometheus")
    rules = sum(len(group["rules"]) for group in load(ROOT / RULES)["groups"])

    def check() -> str:
        targets = get(stack.prometheus_port, "/api/v1/targets")["data"]["activeTargets"]
        if [target["health"] for target in targets] != ["up"]:
            found = [(target["health"], target["lastError"]) for target in targets]
            raise FailedError(f"not one target that is up, but {found}")
        groups = get(stack.prometheus_port, "/api/v1/rules")["data"]["groups"]
        health = [rule["health"] for group in groups for rule in group["rules"]]
        if health != ["ok"] * rules:
            raise FailedError(f"{rules} rules, of which {health.count('ok')} can be evaluated")
        return f"{targets[0]['scrapeUrl']} is up; {rules} rules evaluated"

    return eventually(check)


def grafana_has_the_dashboard(stack: Stack) -> str:
    stack.start_if_available("grafana")
    expected = {
        json.loads(path.read_bytes())["title"] for path in ROOT.glob("helm/dashboards/*.json")
    }

    def check() -> str:
        titles = {one["title"] for one in get(stack.grafana_port, "/api/search?type=dash-db")}
        if not expected <= titles:
            raise FailedError(f"it has {titles} instead of {expected}")
        return ", ".join(sorted(expected))

    return eventually(check)


def load_profile_ends(stack: Stack) -> str:
    picture = ROOT / FOLDER / "report/report.png"
    picture.unlink(missing_ok=True)
    verdict = "every limit was kept"
    try:
        stack.compose("run", "--rm", "--no-TTY", "load")
    except FailedError as error:
        missed = [line for line in str(error).splitlines() if line.startswith("SLO missed: ")]
        # Latencies depend on the machine.
        if not missed or any("requests failed" in line for line in missed):
            raise
        verdict = "; ".join(missed)
    return f"{verdict}; a picture of {picture.stat().st_size} bytes"


def stop_waits_for_streams(stack: Stack) -> str:
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(stack.stream, LONG)
        while not (get(stack.port, "/debug/batch")["sequences"] or stream.done()):
            time.sleep(0.01)
        stack.compose("stop", "server")
    answer = stream.result()
    code = stack.inspect(".State.ExitCode")
    if answer.error is not None or code != "0":
        raise FailedError(f"exit code {code}; the stream: {answer.error or 'complete'}")
    _, drained, after = stack.compose("logs", "--no-log-prefix", "server").partition('"draining"')
    if not drained or '"/v1/completions"' not in after:
        raise FailedError("the stream did not run while the server drained")
    return f"a stream of {answer.n_tokens} tokens ended whole after SIGTERM; exit code 0"


def killed_server_restarts(stack: Stack) -> str:
    stack.start("server")
    with suppress(FailedError):  # the command may be killed with the container
        stack.in_server(KILL_ALL)
    text = eventually(lambda: completion_streams(stack))
    if (restarts := stack.inspect(".RestartCount")) != "1":
        raise FailedError(f"the engine restarted the server {restarts} times instead of once")
    return f"{text} after a kill -9"


def keys_are_required(stack: Stack) -> str:
    keys = ROOT / FOLDER / "keys.txt"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    keys.chmod(0o644)
    stack.start("server", "docker-compose.key.yml")
    try:
        get(stack.port, "/v1/models")
    except HTTPError as error:
        if error.code != 401:
            raise
    else:
        raise FailedError("the server answers without a key")
    return f"401 without a key, {completion_streams(stack, KEY)} with one"


CHECKS: list[Callable[[Stack], str]] = [
    images_are_built, server_is_healthy, server_is_confined, completion_streams,
    prometheus_scrapes, grafana_has_the_dashboard, load_profile_ends, stop_waits_for_streams,
    killed_server_restarts, keys_are_required,
]  # fmt: skip


def say(name: str, word: str, text: str) -> None:
    print(f"{name:28} {word:8} {text}", flush=True)  # noqa: T201


def run_checks(stack: Stack, *, strict: bool) -> int:
    result = 0
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            say(name, "ok", check(stack))
        except SkippedError as error:
            say(name, "skipped", str(error))
            result = int(strict)
        except (FailedError, OSError) as error:
            say(name, "FAILED", str(error)[-2000:])
            with suppress(FailedError):
                say("last lines of the logs", "", stack.compose("logs", "--no-color", "--tail=10"))
            return 1
    return result


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("--strict", action="store_true", help="a skipped check fails")
    strict = parser.parse_args().strict
    stack = Stack()
    try:
        stack.docker("info")
        stack.docker("compose", "version")
    except (FailedError, FileNotFoundError):
        say("no container engine", "", "install Docker with Compose, and start its daemon")
        return 1
    # The engine, as root, would create a folder that the user cannot clear.
    (ROOT / FOLDER / "report").mkdir(parents=True, exist_ok=True)
    down = ("--profile=load", "down", "--volumes", "--remove-orphans")
    stack.compose(*down)  # of a run that was killed
    try:
        return run_checks(stack, strict=strict)
    finally:
        stack.compose(*down)


if __name__ == "__main__":
    sys.exit(main())

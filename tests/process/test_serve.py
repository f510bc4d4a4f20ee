"""The server process: what stops it before it serves, and how it ends."""

from __future__ import annotations

import gc
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.model.directory import (
    CONFIG_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    hash_files,
)
from kvasir.server.engine.gpu.session import BACKENDS
from kvasir.server.errors import StartupError
from kvasir.server.process import serve
from kvasir.server.process.engine_builder import check_model
from kvasir.server.settings import load_settings
from tests.kit.fake_runner import TIMEOUT
from tests.kit.serving import fake_model_dir
from tests.process.forked import Forked

BODY = {"prompt": "a", "max_tokens": 8, "logit_bias": {"66": 100}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A complete model directory, except that its graph is empty."""
    model_dir = fake_model_dir(tmp_path / "bogus")
    model_dir.path.mkdir()
    model_dir.config.save(model_dir.path / CONFIG_FILE)
    model_dir.tokenizer.save(str(model_dir.path / TOKENIZER_FILE))
    (model_dir.path / GRAPH_FILE).write_bytes(b"")
    (model_dir.path / WEIGHTS_FILE).write_bytes(b"weights")
    manifest = model_dir.manifest.model_copy(update={"files": hash_files(model_dir.path)})
    manifest.save(model_dir.path / MANIFEST_FILE)
    return model_dir.path


class Process:
    def __init__(self, options: dict[str, Any]) -> None:
        self.popen = Forked(json.dumps({"port": 0} | options))
        self.guard = threading.Timer(TIMEOUT, self.popen.kill)
        self.guard.start()

    def log_until(self, message: str) -> dict[str, Any]:
        """Read the log up to a message, and return its line."""
        for text in self.popen.stderr:
            line: dict[str, Any] = json.loads(text)
            if line["message"] == message:
                return line
        raise AssertionError(f"the process ended without logging {message!r}")

    def wait_for_submission(self) -> None:
        assert self.popen.stdout.readline() == "submitted\n"

    def tell_runner(self, command: str) -> None:
        self.popen.stdin.write(command + "\n")
        self.popen.stdin.flush()

    def close(self) -> None:
        self.guard.cancel()
        self.popen.close()


@contextmanager
def process(options: dict[str, Any]) -> Iterator[Process]:
    started = Process(options)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def served(directory: Path, **options: Any) -> Iterator[tuple[Process, httpx.Client]]:
    """A process that is ready; its runner is held."""
    with process({"model": str(directory)} | options) as started:
        port = started.log_until("listening")["port"]
        started.log_until("ready")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
            yield started, client


@contextmanager
def streaming(started: Process, client: httpx.Client, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun, and holds the only slot."""
    started.tell_runner("allow")
    body = BODY | {"stream": True} | fields
    with client.stream("POST", "/v1/completions", json=body) as response:
        started.wait_for_submission()
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def test_sigterm_sheds_the_queue_refuses_new_requests_and_lets_running_ones_finish(
    directory: Path,
) -> None:
    """A stream that has begun finishes with all its choices; half an upload is answered."""
    upload = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    with (
        served(directory) as (started, client),
        ThreadPoolExecutor() as pool,
        streaming(started, client, n=2) as lines,
        socket.create_connection((client.base_url.host, client.base_url.port), TIMEOUT) as uploader,
    ):
        queued = pool.submit(client.post, "/v1/completions", json=BODY)
        started.wait_for_submission()
        uploader.sendall(upload + b"Expect: 100-continue\r\n\r\n")
        assert uploader.recv(1000).startswith(b"HTTP/1.1 100 ")
        started.popen.send_signal(signal.SIGTERM)
        started.log_until("draining")
        refused = client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        started.tell_runner("release")
        assert queued.result().status_code == 503
        events = [line for line in lines if line]
        assert sum('"finish_reason":"length"' in event for event in events) == 2
        assert events[-1] == "data: [DONE]"
        assert uploader.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert started.popen.wait() == 0


def test_what_outlasts_the_drain_is_ended(directory: Path) -> None:
    """A stream in an error event; a client that does not read is cut off."""
    ended = {"drain timeout: ending what still runs", "cut off a client that does not read"}
    name = "x" * 100_000  # makes every event too large for the buffers on the way
    content = json.dumps(BODY | {"stream": True, "max_tokens": 60, "ignore_eos": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    request += b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
    with (
        served(directory, served_model_name=name, drain_timeout=0.5) as (started, client),
        socket.socket() as stuck,
    ):
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", client.base_url.port))
        stuck.sendall(request)
        started.wait_for_submission()
        started.tell_runner("release")
        # An answer to another request shows that the only slot is free: all is generated.
        assert client.post("/v1/completions", json=BODY).status_code == 200
        started.wait_for_submission()
        started.tell_runner("hold")
        with streaming(started, client) as lines:
            started.popen.send_signal(signal.SIGINT)
            logged = list[str]()
            while not ended <= {*logged}:
                logged.append(json.loads(next(started.popen.stderr))["message"])
            started.tell_runner("allow")
            events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "unavailable"
        assert events[-1] == "data: [DONE]"
        assert started.popen.wait() == 0
        logged += [json.loads(line)["message"] for line in started.popen.stderr]
    assert {*logged} <= ended | {"draining", "request"}


def test_a_second_signal_ends_the_process_at_once(directory: Path) -> None:
    with served(directory) as (started, client), streaming(started, client):
        started.popen.send_signal(signal.SIGTERM)
        started.log_until("draining")
        started.popen.send_signal(signal.SIGTERM)
        assert started.popen.wait() == 1


@pytest.mark.parametrize("exit_on_failure", [False, True])
def test_a_process_whose_engine_has_failed_ends_with_an_error_code(
    directory: Path, exit_on_failure: bool
) -> None:
    with served(directory, exit_on_failure=exit_on_failure) as (started, client):
        started.tell_runner("fail")
        assert client.post("/v1/completions", json=BODY).status_code == 500
        if not exit_on_failure:
            started.popen.send_signal(signal.SIGTERM)
        assert started.popen.wait() == 1


def test_a_process_that_loads_its_model_shows_its_page_and_ends_on_a_signal(
    directory: Path,
) -> None:
    options = {"model": str(directory), "loading": "hangs", "host": "0.0.0.0"}  # noqa: S104
    with process(options) as started:
        warning = next(line for line in started.popen.stderr if '"warning"' in line)
        assert "--allowed-hosts" in warning
        page = started.log_until("listening")["playground"]
        assert httpx.get(page, timeout=TIMEOUT).headers["content-type"].startswith("text/html")
        started.popen.send_signal(signal.SIGTERM)
        assert started.popen.wait() == 0


@pytest.mark.parametrize(
    ("host", "in_url"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::", "localhost"), ("::1", "[::1]")],  # noqa: S104
)
def test_the_logged_address_can_be_opened_here(host: str, in_url: str) -> None:
    assert serve._browsable(host) == in_url


def test_a_graph_that_the_runtime_refuses_is_one_line(directory: Path) -> None:
    with process({"model": str(directory), "loading": "real"}) as started:
        assert started.popen.wait() == 1
        text = started.popen.stderr.read()
    assert text.splitlines()[-1].startswith(f"kvasir: {directory} cannot be served: ")
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("harm", "place", "expected"),
    [
        (lambda path: (path / WEIGHTS_FILE).write_bytes(b"x"), ".", "does not match its hash"),
        (lambda path: (path / GRAPH_FILE).unlink(), ".", f"{GRAPH_FILE} is missing"),
        (str, "none", "does not exist"),
        (str, "..", "holds model directories"),
    ],
)
def test_a_bad_model_directory_is_refused(
    directory: Path, harm: Callable[[Path], object], place: str, expected: str
) -> None:
    harm(directory)
    with pytest.raises(StartupError, match=expected) as caught:
        serve.serve(load_settings(model=directory / place))
    assert "\n" not in str(caught.value)


def test_collections_of_garbage_leave_out_what_lives_from_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []

    def run(_server: serve.DrainingServer, sockets: list[socket.socket]) -> None:
        frozen.append(gc.get_freeze_count())
        sockets[0].close()

    monkeypatch.setattr(serve.DrainingServer, "run", run)
    try:
        serve.serve(load_settings(model=directory, port=0))
    finally:
        gc.unfreeze()
    assert frozen[0] > 0


def test_addresses_that_cannot_be_listened_on_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} is in use on 127.0.0.1"):
            serve.bind("127.0.0.1", port)
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1 port 0: [^(]*$"):
        serve.bind("192.0.2.1", 0)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_every_interface_is_that_of_both_families(
    has_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_ipv6:  # as on a machine whose kernel has none
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    elif not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with serve.bind("::", 0) as listener:
        for host in ["127.0.0.1", "::1"][: 1 + has_ipv6]:
            socket.create_connection((host, listener.getsockname()[1]), TIMEOUT).close()


def test_a_model_for_cuda_needs_a_gpu_and_no_settings_of_the_cpu(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / MANIFEST_FILE
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    with pytest.raises(StartupError, match="exported for cuda"):
        serve.serve(load_settings(model=directory))
    monkeypatch.setitem(BACKENDS, "cuda", BACKENDS["cuda"]._replace(require=lambda: None))
    accepted = check_model(load_settings(model=directory, prefix_cache_memory=0))
    assert accepted.manifest.device == "cuda"
    refused: tuple[dict[str, Any], ...] = ({"threads": 2}, {"prefix_cache_memory": "1MiB"})
    for options in refused:
        with pytest.raises(StartupError, match=f"setting {next(iter(options))}"):
            check_model(load_settings(model=directory, **options))

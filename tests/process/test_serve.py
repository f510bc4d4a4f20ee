"""The process: what stops it before it serves, and how it goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import httpx
import pytest

from model.bundle import (
    CONFIG_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    hash_files,
)
from server.errors import StartupError
from server.process.serve import bind, check_model, configure, run
from server.settings import load_settings
from tests.fake_runner import TIMEOUT, FakeRunner
from tests.serving import VOCAB_SIZE, fake_app, fake_bundle

BODY = {"prompt": "a", "max_tokens": 8, "logit_bias": {"66": 100}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory that is whole, though its graph is none."""
    bundle = fake_bundle(tmp_path / "bogus")
    bundle.path.mkdir()
    bundle.config.save(bundle.path / CONFIG_FILE)
    bundle.tokenizer.save(str(bundle.path / TOKENIZER_FILE))
    (bundle.path / GRAPH_FILE).write_bytes(b"not a graph")
    (bundle.path / WEIGHTS_FILE).write_bytes(b"weights")
    manifest = bundle.manifest.model_copy(update={"files": hash_files(bundle.path)})
    manifest.save(bundle.path / MANIFEST_FILE)
    return bundle.path


class Process:
    def __init__(self, options: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.serve_process", json.dumps({"port": 0} | options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )
        self.guard = threading.Timer(TIMEOUT, self.popen.kill)
        self.guard.start()

    def log_until(self, message: str) -> dict[str, Any]:
        """Read the log up to the line that says `message`."""
        for text in _pipe(self.popen.stderr):
            line: dict[str, Any] = json.loads(text)
            if line["message"] == message:
                return line
        raise AssertionError(f"the process ended without saying {message!r}")

    def wait_for_submission(self) -> None:
        assert _pipe(self.popen.stdout).readline() == "submitted\n"

    def tell_runner(self, command: str) -> None:
        pipe = _pipe(self.popen.stdin)
        pipe.write(command + "\n")
        pipe.flush()

    def close(self) -> None:
        self.guard.cancel()
        self.popen.kill()
        self.popen.communicate()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextmanager
def process(options: dict[str, Any], **environment: str) -> Iterator[Process]:
    started = Process(options, environment)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def served(directory: Path, **options: Any) -> Iterator[tuple[Process, httpx.Client]]:
    """A process that is ready, whose runner is held."""
    with process({"model": str(directory)} | options) as started:
        port = started.log_until("listening")["port"]
        started.log_until("ready")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
            yield started, client


@contextmanager
def streaming(started: Process, client: httpx.Client, **fields: Any) -> Iterator[Iterator[str]]:
    """Lines of a stream that has begun, and holds the only row."""
    started.tell_runner("allow")
    with client.stream(
        "POST", "/v1/completions", json=BODY | {"stream": True} | fields
    ) as response:
        started.wait_for_submission()
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def test_sigterm_sheds_the_queue_refuses_what_is_new_and_lets_what_runs_finish(
    directory: Path,
) -> None:
    with (
        served(directory) as (started, client),
        ThreadPoolExecutor() as pool,
        streaming(started, client) as lines,
    ):
        queued = pool.submit(client.post, "/v1/completions", json=BODY)
        started.wait_for_submission()
        started.popen.send_signal(signal.SIGTERM)
        started.log_until("draining")
        refused = client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        started.tell_runner("release")
        assert queued.result().status_code == 503
        events = [line for line in lines if line]
        assert '"finish_reason":"length"' in events[-2]
        assert events[-1] == "data: [DONE]"
        assert started.popen.wait() == 0


def test_a_stream_that_has_begun_outlives_sigterm_with_all_its_choices(directory: Path) -> None:
    with served(directory) as (started, client), streaming(started, client, n=2) as lines:
        started.popen.send_signal(signal.SIGTERM)
        started.log_until("draining")
        started.tell_runner("release")
        events = [line for line in lines if line]
        assert sum('"finish_reason":"length"' in event for event in events) == 2
        assert events[-1] == "data: [DONE]"
        assert started.popen.wait() == 0


def test_what_outlasts_the_drain_ends_in_words_too(directory: Path) -> None:
    with (
        served(directory, drain_timeout=0.01) as (started, client),
        streaming(started, client) as lines,
    ):
        started.popen.send_signal(signal.SIGINT)
        started.log_until("drain timeout: ending what still runs")
        started.tell_runner("allow")
        events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "unavailable"
        assert events[-1] == "data: [DONE]"
        assert started.popen.wait() == 0


def test_a_client_that_does_not_read_is_cut_off_when_the_drain_is_over(directory: Path) -> None:
    name = "x" * 100_000  # it makes every event too large for the buffers on the way
    content = json.dumps(BODY | {"stream": True, "max_tokens": 60, "ignore_eos": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        len(content),
        content,
    )
    with (
        served(directory, served_model_name=name, drain_timeout=0.5) as (started, client),
        socket.socket() as stuck,
    ):
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", client.base_url.port))
        stuck.sendall(request)
        started.wait_for_submission()
        started.tell_runner("release")
        assert (
            client.post("/v1/completions", json=BODY).status_code == 200
        )  # the only row is free: all is generated
        started.popen.send_signal(signal.SIGTERM)
        started.log_until("cut off a client that does not read")
        assert started.popen.wait() == 0
        messages = [json.loads(line)["message"] for line in _pipe(started.popen.stderr)]
    assert set(messages) <= {"drain timeout: ending what still runs", "request"}


class Transport(asyncio.Transport):
    """One whose client takes what the test says."""

    n_left = 100_000
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.n_left

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("is_whole", "n_taken", "is_cut"),
    [(True, 1, False), (True, 0, True), (False, 1, True), (False, 0, True)],
)
async def test_only_a_whole_answer_may_be_read_slowly(
    is_whole: bool, n_taken: int, is_cut: bool
) -> None:
    clock = Mock()
    kind: Any = configure(fake_app(FakeRunner(VOCAB_SIZE))).http
    protocol = kind(Mock(), Mock(), {}, clock)
    protocol.flow, protocol.transport, protocol._answering = (
        Mock(),
        Transport(),
        Mock(response_complete=is_whole),
    )
    protocol.pause_writing()
    protocol.transport.n_left -= n_taken
    seconds, check, *arguments = clock.call_later.call_args.args
    assert seconds == 60.0
    check(*arguments)
    assert protocol.transport.aborted == is_cut
    assert clock.call_later.call_count == (1 if is_cut else 2)
    protocol.resume_writing()
    assert not protocol.is_stalled
    clock.call_later.return_value.cancel.assert_called_once()


def test_half_an_upload_is_answered_at_shutdown(directory: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    with served(directory) as (started, client):
        with socket.create_connection(
            (client.base_url.host, client.base_url.port), TIMEOUT
        ) as uploader:
            uploader.sendall(head)
            assert uploader.recv(1000).startswith(b"HTTP/1.1 100 ")
            started.popen.send_signal(signal.SIGTERM)
            assert uploader.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert started.popen.wait() == 0


def test_a_second_signal_leaves_at_once(directory: Path) -> None:
    with served(directory) as (started, client), streaming(started, client):
        started.popen.send_signal(signal.SIGTERM)
        started.log_until("draining")
        started.popen.send_signal(signal.SIGTERM)
        assert started.popen.wait() == 1


def test_a_signal_while_the_model_loads_ends_the_process(directory: Path) -> None:
    with process({"model": str(directory), "loading": "hangs"}) as started:
        started.log_until("listening")
        started.popen.send_signal(signal.SIGTERM)
        assert started.popen.wait() == 0


def test_a_model_that_cannot_be_loaded_ends_the_process_in_one_line(directory: Path) -> None:
    with process({"model": str(directory), "loading": "fails"}) as started:
        assert started.popen.wait() == 1
        last = _pipe(started.popen.stderr).read().splitlines()[-1]
    assert last == f"kvasir: {directory} cannot be served: the graph is damaged"


def damage(directory: Path) -> str:
    (directory / WEIGHTS_FILE).write_bytes(b"other weights")
    return f"{WEIGHTS_FILE} does not match its hash"


def remove(directory: Path) -> str:
    (directory / GRAPH_FILE).unlink()
    return f"{GRAPH_FILE} is missing"


@pytest.mark.parametrize("change", [damage, remove])
def test_a_bad_model_directory_is_one_line(directory: Path, change: Callable[[Path], str]) -> None:
    _check_refused({"model": str(directory)}, change(directory))


def test_a_graph_that_the_runtime_refuses_is_one_line(directory: Path) -> None:
    with process({"model": str(directory), "loading": "real"}) as started:
        assert started.popen.wait() == 1
        text = _pipe(started.popen.stderr).read()
    assert text.splitlines()[-1].startswith(f"kvasir: {directory} cannot be served: ")
    assert "Traceback" not in text


def test_an_unknown_setting_is_one_line(directory: Path) -> None:
    _check_refused({"model": str(directory)}, "unknown setting KVASIR_PROT", KVASIR_PROT="1")


def test_a_port_in_use_is_one_line(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _check_refused(
            {"model": str(directory), "port": port}, f"port {port} is in use on 127.0.0.1"
        )


def _check_refused(options: dict[str, Any], expected: str, **environment: str) -> None:
    with process(options, **environment) as started:
        assert started.popen.wait() == 1
        lines = _pipe(started.popen.stderr).read().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("kvasir: ")
    assert expected in lines[0]


def test_a_model_for_another_device_is_refused(directory: Path) -> None:
    path = directory / MANIFEST_FILE
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    with pytest.raises(StartupError, match="exported for cuda"):
        run(load_settings(model=directory))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 2}, "setting threads is for the CPU"),
        ({"spin_microseconds": 0}, "setting spin_microseconds is for the CPU"),
        ({"prefix_cache_memory": "1MiB"}, "prefix_cache_memory can only be 0 on a GPU"),
    ],
)
def test_settings_that_a_gpu_would_pass_over_are_refused(
    directory: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / MANIFEST_FILE
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    monkeypatch.setattr("server.engine.cuda.session.require_cuda", lambda: None)
    assert (
        check_model(load_settings(model=directory, prefix_cache_memory=0)).manifest.device == "cuda"
    )
    with pytest.raises(StartupError, match=message):
        check_model(load_settings(model=directory, **options))


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="is not a directory"):
        run(load_settings(model=tmp_path / "nothing"))
    with pytest.raises(StartupError, match="not a model directory"):
        run(load_settings(model=tmp_path))


def test_an_address_of_somebody_else_is_refused() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
def test_the_log_has_an_address_at_which_the_page_is_open(directory: Path, host: str) -> None:
    with process({"model": str(directory), "host": host}) as started:
        page = started.log_until("listening")["playground"]
        assert httpx.get(page).headers["content-type"].startswith("text/html")

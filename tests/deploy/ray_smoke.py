"""Run Kvasir on a real local Ray: python -m tests.deploy.ray_smoke DIRECTORY

Ray Data: two actors answer a file with the bytes of one process, and again while one of them is
killed. Ray Serve: two replicas stream, keep a session at one of them by a header, and drain when a
new one replaces both. Prints what was checked, with the seconds of each command. Raises
AssertionError or the command's error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen

import psutil
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from kvasir.integrations.ray import Kvasir

N_LINES, N_STREAMS, N_TOKENS = 600, 8, 800
SESSIONS = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_DRAWN = rb'"((?:request_)?id)":"[^"]*"|"(created)":\d+'  # anew for each answer


def line(number: int) -> str:
    """Return a request; every fiftieth is refused."""
    prompt, temperature = f"def f{number}(" * (1 + number % 5), -1 if number % 50 == 9 else 1
    body = {"prompt": prompt, "max_tokens": 64, "seed": number, "temperature": temperature}
    request = {"custom_id": f"é{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(request) + "\n"


@contextmanager
def batch(folder: Path, name: str, model: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run `kvasir batch` on the requests; its answers are in the folder `name`."""
    (folder / name).mkdir()
    files = (folder / "requests.jsonl", folder / name / "out.jsonl")
    command = [sys.executable, "-m", "kvasir", "batch", *map(str, files), model, "--json", *options]
    environment = os.environ | {"KVASIR_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        output, errors = process.communicate()
    assert output, errors
    assert process.returncode == 1  # some requests are refused
    print(f"{name}: {json.loads(output)['seconds']:.1f} s")  # noqa: T201


def answers(folder: Path) -> dict[str, bytes]:
    """Return answers and errors by custom id, each once, without what is drawn anew."""
    lines = [one for path in folder.iterdir() for one in path.read_bytes().splitlines()]
    found = {json.loads(one)["custom_id"]: re.sub(_DRAWN, rb'"\1\2":0', one) for one in lines}
    assert len(found) == len(lines) == N_LINES
    return found


def workers(name: str) -> list[psutil.Process]:
    """Return the processes of Ray that this one started and whose title begins so."""
    children = psutil.Process().children(recursive=True)
    return [
        child
        for child in children
        if child.cmdline()[:1] and child.cmdline()[0].startswith(f"ray::{name}")
    ]


def check_batches(model: str) -> None:
    """Compare actors with one process, and kill an actor."""
    address = ray.get_runtime_context().gcs_address
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requests.jsonl").write_text("".join(map(line, range(N_LINES))), encoding="utf-8")
        with batch(folder, "one process", model):
            pass
        with batch(folder, "two actors", model, "--ray", address, "--engines", "2"):
            pass
        assert answers(folder / "two actors") == answers(folder / "one process")
        out = folder / "an actor killed" / "out.jsonl"
        with batch(folder, "an actor killed", model, "--ray", address, "--engines", "2") as run:
            while not out.exists() or not out.stat().st_size:
                assert run.poll() is None
            killed = workers("MapWorker")[0]
            killed.send_signal(signal.SIGKILL)
        assert answers(folder / "an actor killed") == answers(folder / "one process")
    print(f"all {N_LINES} answers are equal in the three runs")  # noqa: T201


def ask(url: str, session: str = "", **body: Any) -> IO[bytes]:
    """Send a completion, and return its answer, which may still be coming."""
    headers = {"Content-Type": "application/json", "X-Session-Id": session}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
    response: IO[bytes] = urlopen(request, timeout=120)  # noqa: S310
    return response


def check_serve(model: str) -> None:
    """Stream from two replicas, which one new replica replaces meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    router = RequestRouterConfig(request_router_class=SESSIONS)
    deployment: Any = Kvasir  # as a decorator made it
    options = deployment.options(ray_actor_options={"num_cpus": 0.4}, request_router_config=router)
    serve.run(options.options(num_replicas=2).bind(model=model, max_num_seqs=16))
    replicas = workers("ServeReplica")
    assert len(replicas) == 2
    n_cached = []
    for n in range(8):
        prompt = f"class C{n}:\n" + "".join(f"    def f{i}_{n}(self):\n" for i in range(24))
        for end in ("", "        return 1\n"):
            with ask(url, str(n), prompt=prompt + end, max_tokens=2) as response:
                details = json.load(response)["usage"]["prompt_tokens_details"]
        n_cached.append(details["cached_tokens"])
    assert all(n_cached), n_cached
    stream = {"prompt": "def read(", "max_tokens": N_TOKENS, "ignore_eos": True, "stream": True}
    streams = [ask(url, str(n), seed=n, **stream) for n in range(N_STREAMS)]
    begun = [stream.readline() for stream in streams]
    serve.run(options.options(num_replicas=1).bind(model=model, max_num_seqs=16))
    ends = [first + stream.read() for first, stream in zip(begun, streams, strict=True)]
    assert all(end.endswith(b"data: [DONE]\n\n") and b'"error"' not in end for end in ends)
    psutil.wait_procs(replicas)
    assert len(workers("ServeReplica")) == 1
    print(f"8 sessions kept at their replicas; {N_STREAMS} streams outlived them")  # noqa: T201


if __name__ == "__main__":
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        directory = str(Path(sys.argv[1]).resolve())
        check_batches(directory)
        check_serve(directory)
    finally:
        serve.shutdown()
        ray.shutdown()

"""Two servers behind nginx, restarted one after the other under load: python -m tests.deploy.rolling_restart DIRECTORY

Clients stream completions all the while. A server that drains answers new requests with 503, which nginx takes to the
other one; streams that run are finished first. Prints requests sent, streams completed, failed, what ran when each
server was told to stop, and how often nginx tried the other. Exit code 1 if any failed, or nothing was put to the test.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from urllib.request import urlopen

from loadtest.sse_client import StreamedCompletion, Target, complete

N_CLIENTS = 8
# So long, and of such different lengths, that some stream runs whenever a server is told to stop.
MAX_TOKENS = range(136, 248, 16)
BEFORE_AND_AFTER = (
    20  # streams that end before the first restart, between the two, and after the second
)

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
  log_format tries "$upstream_status";
  access_log {folder}/tries.log tries;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream kvasir {{ least_conn; server 127.0.0.1:{first} max_fails=0; server 127.0.0.1:{second} max_fails=0; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://kvasir;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_read_timeout 1h;
      # Nothing of a refused request has run, so it may go to the other server although it is a POST.
      proxy_next_upstream error http_503 non_idempotent;
    }}
  }}
}}
"""


class Server:
    """kvasir serve on a port of its own, which it keeps over restarts."""

    def __init__(self, directory: Path, port: int) -> None:
        self._command = [
            sys.executable,
            "-m",
            "kvasir",
            "serve",
            str(directory),
            "--port",
            str(port),
            "--threads",
            "1",
        ]
        self._port = port
        self._process: Process | None = None
        self._log: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stderr=PIPE, limit=2**20
        )
        ready = asyncio.get_running_loop().create_future()
        self._log = asyncio.create_task(self._follow(ready))
        await ready

    async def n_running(self) -> int:
        """Sequences that have not ended."""
        batch = await asyncio.to_thread(
            urlopen, f"http://127.0.0.1:{self._port}/debug/batch", timeout=10
        )
        return len(json.load(batch)["sequences"])

    async def stop(self) -> int | None:
        """SIGTERM, if it runs, and what it exits with."""
        if self._process is None:
            return None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        if self._log is not None:
            await self._log
        return await self._process.wait()

    async def _follow(self, ready: asyncio.Future[None]) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        line = b""
        async for line in self._process.stderr:
            if (
                not ready.done()
                and line.startswith(b"{")
                and json.loads(line)["message"] == "ready"
            ):
                ready.set_result(None)
        if not ready.done():
            ready.set_exception(ChildProcessError(f"the server ended at once: {line.decode()}"))


class Load:
    """Clients that each send a request when their last has ended."""

    def __init__(self, url: str) -> None:
        self._target = Target(url)
        self._seeds = count()
        self._stopping = False
        self._ended = asyncio.Condition()
        self.answers: list[StreamedCompletion] = []

    async def client(self) -> None:
        while not self._stopping:
            seed = next(self._seeds)
            max_tokens = MAX_TOKENS[seed % len(MAX_TOKENS)]
            body = {
                "prompt": "def read(path):\n",
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
            }
            body |= {"seed": seed, "stream_options": {"include_usage": True}}
            answer = await complete(self._target, json.dumps(body).encode(), limit=120)
            if answer.error is None and answer.n_tokens != max_tokens:
                answer.fail(f"{answer.n_tokens} tokens instead of {max_tokens}")
            async with self._ended:
                self.answers.append(answer)
                self._ended.notify_all()

    async def pass_on(self, n: int) -> None:
        """Return when n more have ended."""
        async with self._ended:
            wanted = len(self.answers) + n
            await self._ended.wait_for(lambda: len(self.answers) >= wanted)

    def stop(self) -> None:
        self._stopping = True


@asynccontextmanager
async def nginx(folder: Path, first: int, second: int) -> AsyncIterator[str]:
    """The URL of a proxy before two ports. When it has ended, `tries.log` has the servers' answers to each request."""
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(
        NGINX.format(folder=folder, first=first, second=second, port=port), encoding="utf-8"
    )
    process = await asyncio.create_subprocess_exec(
        "nginx", "-c", config, "-p", folder, stderr=DEVNULL
    )
    try:
        await accepts(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def accepts(port: int, process: Process) -> None:
    """Return when somebody listens there; nginx says nothing when it does."""
    while process.returncode is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise ChildProcessError("nginx ended at once")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def busy(server: Server, load: Load) -> int:
    """How many streams run on a server, as soon as there is one."""
    while not (n_running := await server.n_running()):
        await load.pass_on(1)
    return n_running


async def restart_each(servers: list[Server], load: Load) -> tuple[list[int], list[int | None]]:
    """Under load: what ran on each server when it was told to stop, and what it exited with."""
    clients = [asyncio.create_task(load.client()) for _ in range(N_CLIENTS)]
    running, codes = [], []
    await load.pass_on(BEFORE_AND_AFTER)
    for server in servers:
        running.append(await busy(server, load))
        codes.append(await server.stop())
        await load.pass_on(BEFORE_AND_AFTER)
        await server.start()
        await load.pass_on(BEFORE_AND_AFTER)
    load.stop()
    await asyncio.gather(*clients)
    return running, codes


async def main(directory: Path) -> int:
    ports = free_port(), free_port()
    servers = [Server(directory, port) for port in ports]
    with tempfile.TemporaryDirectory() as folder:
        try:
            await asyncio.gather(*(server.start() for server in servers))
            async with nginx(Path(folder), *ports) as url:
                load = Load(url)
                running, codes = await restart_each(servers, load)
        finally:
            stopped = await asyncio.gather(*(server.stop() for server in servers))
        tries = (Path(folder) / "tries.log").read_text(encoding="utf-8").splitlines()
    n_retried = sum(statuses.startswith("503,") for statuses in tries)
    codes += stopped
    failed = [answer.error for answer in load.answers if answer.error is not None]
    print(  # noqa: T201
        f"sent {len(load.answers)}, completed {len(load.answers) - len(failed)}, failed {len(failed)}"
    )
    for error in sorted(set(failed)):
        print(f"  {failed.count(error)} x {error}")  # noqa: T201
    print(f"running at SIGTERM: {running}; 503 and tried again: {n_retried}")  # noqa: T201
    print(f"exit codes of the servers: {codes}")  # noqa: T201
    return int(bool(failed) or any(codes) or not n_retried)


if __name__ == "__main__":
    if shutil.which("nginx") is None:
        sys.exit("this needs nginx, which Debian has as nginx-light")
    sys.exit(asyncio.run(main(Path(sys.argv[1]))))

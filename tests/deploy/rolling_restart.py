"""Restart two servers in turn under load: python -m tests.deploy.rolling_restart DIRECTORY

Clients stream completions meanwhile. A draining server answers new requests with 503, which nginx
retries on the other server; running streams end first. Prints the requests sent, completed and
failed, the streams that ran at each SIGTERM, and the number of retries. Exit code 1 if any request
failed, or none was retried.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from urllib.request import urlopen

from kvasir.loadtest.client import Answer, Target, complete
from tests.faults.server_process import ServerProcess

N_CLIENTS = 8
# Long and different enough that some stream runs whenever a server is stopped.
MAX_TOKENS = range(136, 248, 16)
BETWEEN = 20  # streams that end before, between and after the restarts

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
  log_format tries "$upstream_status";
  access_log {folder}/tries.log tries;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream kvasir {{
    least_conn;
    server 127.0.0.1:{first} max_fails=0;
    server 127.0.0.1:{second} max_fails=0;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://kvasir;
      proxy_set_header Host $http_host;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_read_timeout 1h;
      # No part of a refused request has run, so a POST may be retried on the other server.
      proxy_next_upstream error http_503 non_idempotent;
    }}
  }}
}}
"""


class Server:
    """`kvasir serve` on a port that it keeps over restarts."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory, self._port = directory, port
        self._process: ServerProcess | None = None

    async def start(self) -> None:
        """Start the server and wait until it is ready."""
        start = partial(ServerProcess, self._port, "--threads", "1", directory=self._directory)
        self._process = await asyncio.to_thread(start)

    async def n_running(self) -> int:
        """Return the number of sequences that have not ended."""
        url = f"http://127.0.0.1:{self._port}/debug/batch"
        batch = await asyncio.to_thread(urlopen, url, timeout=10)
        return len(json.load(batch)["sequences"])

    async def stop(self) -> int | None:
        """Send SIGTERM to a server that runs, and return its exit code."""
        if self._process is None:
            return None
        self._process.popen.terminate()
        return await asyncio.to_thread(self._process.wait)


async def stream_tokens(target: Target, n_tokens: int, **fields: int) -> Answer:
    """Return a completion, which fails unless it has exactly so many tokens."""
    body = {"prompt": "def read(path):\n", "max_tokens": n_tokens, "ignore_eos": True, **fields}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await complete(target, json.dumps(body).encode(), limit=120)
    if answer.error is None and answer.n_tokens != n_tokens:
        answer.fail(f"{answer.n_tokens} tokens instead of {n_tokens}")
    return answer


class Load:
    """Clients that each send a request when their last one has ended."""

    def __init__(self, url: str) -> None:
        self._target = Target(url)
        self._seeds = count()
        self.is_stopping = False
        self._ended = asyncio.Condition()
        self.answers: list[Answer] = []

    async def client(self) -> None:
        while not self.is_stopping:
            seed = next(self._seeds)
            max_tokens = MAX_TOKENS[seed % len(MAX_TOKENS)]
            answer = await stream_tokens(self._target, max_tokens, seed=seed)
            async with self._ended:
                self.answers.append(answer)
                self._ended.notify_all()

    async def wait_for(self, n: int) -> None:
        """Wait until n more streams have ended."""
        async with self._ended:
            wanted = len(self.answers) + n
            await self._ended.wait_for(lambda: len(self.answers) >= wanted)


@asynccontextmanager
async def nginx(folder: Path, first: int, second: int) -> AsyncIterator[str]:
    """Run a proxy of two ports and yield its URL. `tries.log` gets the statuses of each request."""
    port, config = free_port(), folder / "nginx.conf"
    text = NGINX.format(folder=folder, first=first, second=second, port=port)
    config.write_text(text, encoding="utf-8")
    command = ("nginx", "-c", config, "-p", folder)
    process = await asyncio.create_subprocess_exec(*command, stderr=DEVNULL)
    try:
        await wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def wait_for_port(port: int, process: Process) -> None:
    """Wait until a process accepts connections. nginx does not announce it."""
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
    """Return a port below those that systems choose for connections, which cannot take it."""
    while True:
        port = random.randrange(10_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


async def restart_each(servers: list[Server], load: Load) -> tuple[list[int], list[int | None]]:
    """Restart servers under load; return the streams that ran at each SIGTERM, and exit codes."""
    clients = [asyncio.create_task(load.client()) for _ in range(N_CLIENTS)]
    running, codes = [], []
    await load.wait_for(BETWEEN)
    for server in servers:
        while not (n_running := await server.n_running()):
            await load.wait_for(1)
        running.append(n_running)
        codes.append(await server.stop())
        await load.wait_for(BETWEEN)
        await server.start()
        await load.wait_for(BETWEEN)
    load.is_stopping = True
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
    n_sent, n_failed = len(load.answers), len(failed)
    print(f"sent {n_sent}, completed {n_sent - n_failed}, failed {n_failed}")  # noqa: T201
    for error in sorted(set(failed)):
        print(f"  {failed.count(error)} x {error}")  # noqa: T201
    print(f"running at SIGTERM: {running}; 503 and retried: {n_retried}")  # noqa: T201
    print(f"exit codes of the servers: {codes}")  # noqa: T201
    return int(bool(failed) or any(codes) or not n_retried)


if __name__ == "__main__":
    if shutil.which("nginx") is None:
        sys.exit("this needs nginx, which Debian has as nginx-light")
    sys.exit(asyncio.run(main(Path(sys.argv[1]))))

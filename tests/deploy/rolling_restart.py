"""Restart two servers in turn under load: python -m tests.deploy.rolling_restart DIRECTORY

Clients stream completions meanwhile. A draining server answers new requests with 503, which nginx
retries on the other server; running streams end first. Prints the requests sent, completed and
failed, the streams that ran at each SIGTERM, and the number of retries. Exit code 1 if any request
failed, or none was retried.

With a number of lines behind DIRECTORY there are three servers with a Redis, which answer a batch
of so many lines beside the streams. Before the restarts one is killed, and Redis is stopped for a
while, and both again when half of the lines are answered and no streams are left. Only streams of
the killed server may fail, and each line is answered once.
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
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from urllib.request import urlopen

from kvasir.loadtest.client import Answer, Target, complete
from tests.deploy.batch_job import Job
from tests.faults.server_process import ServerProcess
from tests.kit.redis_server import RedisServer, redis_server

N_CLIENTS = 8
# Long and different enough that some stream runs whenever a server is stopped.
MAX_TOKENS = range(136, 248, 16)
BETWEEN = N_CLIENTS  # streams that end before, between and after the restarts

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
    {servers}
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://kvasir;
      proxy_set_header Host $http_host;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_read_timeout 1h;
      client_max_body_size 200m;
      # No part of a refused request has run, so a POST may be retried on the other server.
      proxy_next_upstream error http_503 non_idempotent;
    }}
  }}
}}
"""


class Server:
    """`kvasir serve` on a port that it keeps over restarts."""

    def __init__(self, directory: Path, port: int, *options: str) -> None:
        self._directory, self._port = directory, port
        self._options = "--threads", "1", *options
        self._process: ServerProcess | None = None

    async def start(self) -> None:
        """Start the server and wait until it is ready."""
        start = partial(ServerProcess, self._port, *self._options, directory=self._directory)
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

    async def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        await asyncio.to_thread(self._process.close)


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
async def nginx(folder: Path, *ports: int) -> AsyncIterator[str]:
    """Run a proxy of ports and yield its URL. `tries.log` gets the statuses of each request."""
    port, config = free_port(), folder / "nginx.conf"
    servers = " ".join(f"server 127.0.0.1:{one} max_fails=0;" for one in ports)
    text = NGINX.format(folder=folder, servers=servers, port=port)
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


async def disturb_alone(server: Server, job: Job, redis: RedisServer) -> None:
    """Kill a server, and stop Redis for a while, when half of the batch is answered."""
    await job.half()
    print(f"at SIGKILL and the end of Redis: {await job.counts()}")  # noqa: T201
    await server.kill()
    redis.stop()
    await asyncio.sleep(5)
    redis.start()
    await server.start()


async def disturb(servers: list[Server], load: Load, job: Job, redis: RedisServer) -> int:
    """Kill a server, and stop Redis for a while. Return how many streams may fail."""
    while not (await job.counts())["completed"]:
        await load.wait_for(1)
    print(f"at SIGKILL: {await job.counts()}")  # noqa: T201
    n_running = await servers[-1].n_running()
    await servers[-1].kill()
    await load.wait_for(BETWEEN)
    await servers[-1].start()
    redis.stop()
    n_ended, begun_at = len(load.answers), monotonic()
    refused = await job.answer()
    await load.wait_for(3 * BETWEEN)
    redis.start()
    seconds, n_ended = monotonic() - begun_at, len(load.answers) - n_ended
    print(f"Redis away for {seconds:.0f} s: {n_ended} streams ended")  # noqa: T201
    print(f"  the batch: {refused.status_code} {refused.json()}")  # noqa: T201
    while (await job.answer()).status_code == 503:
        await load.wait_for(1)
    return n_running


async def restart_each(servers: list[Server], load: Load) -> tuple[list[int], list[int | None]]:
    """Restart servers under load; return the streams that ran at each SIGTERM, and exit codes."""
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
    return running, codes


async def main(directory: Path, n_lines: int = 0) -> int:
    n_may_fail, is_right, options = 0, True, list[str]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if n_lines:
            redis = stack.enter_context(redis_server(Path(folder)))
            options = ["--state-url", redis.url, "--batch-dir", f"{folder}/batches"]
        ports = [free_port() for _ in range(3 if n_lines else 2)]
        servers = [Server(directory, port, *options) for port in ports]
        try:
            await asyncio.gather(*(server.start() for server in servers))
            async with nginx(Path(folder), *ports) as url:
                load, job = Load(url), Job(url, n_lines)
                clients = [asyncio.create_task(load.client()) for _ in range(N_CLIENTS)]
                if n_lines:
                    await job.begin()
                    n_may_fail = await disturb(servers, load, job, redis)
                running, codes = await restart_each(servers, load)
                load.is_stopping = True
                await asyncio.gather(*clients)
                if n_lines:
                    await disturb_alone(servers[0], job, redis)
                    is_right = await job.is_right()
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
    return int(n_failed > n_may_fail or any(codes) or not n_retried or not is_right)


if __name__ == "__main__":
    if shutil.which("nginx") is None:
        sys.exit("this needs nginx, which Debian has as nginx-light")
    sys.exit(asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))

"""Requests of a file, answered without a server: by an application in each of several processes.

python -m kvasir.server.process.offline SETTINGS is such a process, with settings as JSON beside
those of the environment. Its input has lines of [custom id, path, body], its output of [custom id,
status, request id, body], after one with the number of requests that it takes at once. It ends with
its input, so it does not outlive the command that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio import StreamReader, StreamReaderProtocol
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NoReturn

from pydantic_core import from_json

from kvasir.server.api.openai.batches import Answers
from kvasir.server.batches.journal import Journal, Reply
from kvasir.server.errors import StartupError
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import check_model
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.settings import Settings, load_settings

Request = tuple[str, str, bytes]  # custom id, path, body

_LONGEST = 2**30  # bytes of a line between the processes
_END_SECONDS = 10  # for an engine without work to end
# Settings of what only a server has: clients, and what it keeps for them.
_OF_SERVERS = (
    *("api_key", "api_key_file", "adapter_admin_key"),
    *("batch_dir", "state_url", "state_url_file"),
)


async def answer_all(
    requests: Iterator[Request | None],
    journal: Journal,
    settings: Mapping[str, Any],
    n_engines: int,
    report: Callable[[], object],
) -> None:
    """Answer requests with `n_engines` processes, each in the order in which it gets them.

    An answer is written as it comes, and then reported. Raises ChildProcessError if a process ends,
    and the journal's errors.
    """
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(_engine(settings)) for _ in range(n_engines)]
        await asyncio.gather(*(_feed(engine, requests, journal, report) for engine in engines))
        journal.sync()


@asynccontextmanager
async def _engine(settings: Mapping[str, Any]) -> AsyncIterator[Process]:
    """Run a process until the block is left. Ctrl-C does not reach it."""
    command = [sys.executable, "-m", "kvasir.server.process.offline", json.dumps(settings)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LONGEST, process_group=0
    )
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _feed(
    engine: Process,
    requests: Iterator[Request | None],
    journal: Journal,
    report: Callable[[], object],
) -> None:
    """Give an engine as many requests as it takes at once, and another for each of its answers."""
    source, answers, errors = engine.stdin, engine.stdout, engine.stderr
    assert source is not None
    assert answers is not None
    assert errors is not None
    log = asyncio.create_task(_last_line(errors))

    def ask() -> bool:
        for request in requests:
            if request is not None:
                custom_id, path, body = request
                line = json.dumps([custom_id, path, body.decode()])
                source.write(line.encode() + b"\n")
                return True
        return False

    if not (line := await answers.readline()):
        raise ChildProcessError(await log or "an engine was killed while it loaded the model")
    n_asked = sum(ask() for _ in range(int(line)))
    while n_asked and (line := await answers.readline()).endswith(b"\n"):
        custom_id, status, request_id, body = from_json(line)
        journal.append(custom_id, Reply(status, request_id, body.encode(), from_json(body)))
        if journal.is_due:
            journal.sync()
        report()
        n_asked += ask() - 1
    if n_asked:
        cause = await log or "it was killed"
        raise ChildProcessError(f"an engine ended: {cause}; the same command goes on from here")


async def _last_line(log: StreamReader) -> str:
    line = b""
    async for line in log:  # noqa: B007
        pass
    return line.decode(errors="replace").strip().removeprefix("kvasir: ")


async def _answer_lines(settings: Settings) -> None:
    """Answer the lines of standard input until it ends. Raises StartupError."""
    app = create_app(settings, check_model(settings, settings.model_name))
    models: ModelRegistry = app.state.models
    answers, lines = Answers(app, None), StreamReader(limit=_LONGEST)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: StreamReaderProtocol(lines), sys.stdin)
    async with app.router.lifespan_context(app):
        await app.state.loading
        for error in models.failures.values():
            _fail(error)
        _send(models.find().settings.max_num_seqs)
        async with asyncio.TaskGroup() as group:
            tasks = set[asyncio.Task[None]]()
            while line := await lines.readline():
                task = group.create_task(_answer(answers, models, line))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            for task in tasks:  # whose answers nobody would read
                task.cancel()


async def _answer(answers: Answers, models: ModelRegistry, line: bytes) -> None:
    """Answer a line, as often as it takes."""
    custom_id, path, body = from_json(line)
    while not isinstance(reply := await answers(path, body.encode(), ""), Reply):
        if "unhealthy" in models.states.values():
            _fail("it has failed or hangs")
        await asyncio.sleep(reply)
    _send([custom_id, reply.status_code, reply.request_id, reply.body.decode()])


def _send(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _fail(error: object) -> NoReturn:
    """End this process while its engine may be inside ONNX Runtime."""
    sys.stderr.write(f"kvasir: {error}\n")
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    try:
        given = load_settings(**json.loads(sys.argv[1]))
        asyncio.run(_answer_lines(given.model_copy(update=dict.fromkeys(_OF_SERVERS))))
    except StartupError as error:
        _fail(error)

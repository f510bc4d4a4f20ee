"""Requests of a file, answered without a server: by an application in each of several processes.

python -m kvasir.server.process.offline SETTINGS is such a process, with settings as JSON beside
those of the environment. Its input has lines of [custom id, path, body], its output of [custom id,
status, request id, body], after one with the number of requests that it takes at once. It ends with
its input, so the command that started it leaves none behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio import StreamReader, StreamReaderProtocol
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from pydantic_core import from_json

from kvasir.model.platform.progress import Progress
from kvasir.server.api.openai.batches import Answers
from kvasir.server.batches.journal import Journal, Reply
from kvasir.server.errors import StartupError
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import check_model
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.settings import Settings, load_settings

AnswerLine = Callable[[bytes | str], Awaitable[str]]

_LONGEST = 2**30  # bytes of a line between the processes
_END_SECONDS = 10  # for an engine without work to end
# Settings of what only a server has: clients, and what it keeps for them.
_OF_SERVERS = dict.fromkeys(
    (
        *("api_key", "api_key_file", "adapter_admin_key", "batch_dir", "state_url"),
        *("state_url_file", "kv_events", "kv_events_replay"),
    )
)


async def answer_all(
    requests: Iterator[tuple[str, str, bytes]],
    journal: Journal,
    settings: Mapping[str, Any],
    n_engines: int,
    progress: Progress,
) -> None:
    """Answer requests with `n_engines` processes; write each answer as it comes.

    Raises ChildProcessError if a process ends, and the journal's errors.
    """

    async def run_engine() -> None:
        command = [sys.executable, "-m", "kvasir.server.process.offline", json.dumps(settings)]
        engine = await asyncio.create_subprocess_exec(  # in a group that Ctrl-C does not reach
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LONGEST, process_group=0
        )
        source, answers, errors = engine.stdin, engine.stdout, engine.stderr
        assert source is not None
        assert answers is not None
        assert errors is not None
        log = asyncio.create_task(_last_line(errors))

        def ask() -> bool:
            for custom_id, path, body in requests:
                source.write(f"{json.dumps([custom_id, path, body.decode()])}\n".encode())
                return True
            return False

        try:
            if not (line := await answers.readline()):
                raise ChildProcessError(await log or "an engine was killed while it started")
            n_asked = sum(ask() for _ in range(int(line)))
            while n_asked and (line := await answers.readline()).endswith(b"\n"):
                record(journal, line, progress)
                n_asked += ask() - 1
            if n_asked:
                cause = await log or "it was killed"
                raise ChildProcessError(f"an engine ended: {cause}; run the same command to go on")
            source.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.wait(), _END_SECONDS)
        finally:
            if engine.returncode is None:
                engine.kill()
                await engine.wait()

    progress("loading the model", 0, 0)
    await asyncio.gather(*(run_engine() for _ in range(n_engines)))
    journal.sync()


def record(journal: Journal, line: bytes | str, progress: Progress) -> None:
    """Write the answer that a line of `open_model` has."""
    custom_id, status, request_id, body = from_json(line)
    journal.append(custom_id, Reply(status, request_id, body.encode(), from_json(body)))
    if journal.is_due:
        journal.sync()
    progress("answering", len(journal.answered), journal.counts.total)


async def _last_line(log: StreamReader) -> str:
    line = b""
    async for line in log:  # noqa: B007
        pass
    return line.decode(errors="replace").strip().removeprefix("kvasir: ")


@asynccontextmanager
async def open_model(settings: Settings) -> AsyncIterator[tuple[AnswerLine, int]]:
    """Load a model without clients; yield how a line is answered, and how many at once.

    Such are the lines between the processes. Raises StartupError.
    """
    settings = settings.model_copy(update=_OF_SERVERS)
    app = create_app(settings, check_model(settings, settings.model_name))
    models: ModelRegistry = app.state.models
    async with app.router.lifespan_context(app):
        await app.state.loading
        for error in models.failures.values():
            raise error
        yield partial(_answer, Answers(app, None), models), models.find().settings.max_num_seqs


async def _answer_lines(settings: Settings) -> None:
    """Answer the lines of standard input until it ends. Raises StartupError and OSError."""
    lines = StreamReader(limit=_LONGEST)
    protocol = StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with open_model(settings) as (answer, n_at_once):
        _send(str(n_at_once))

        async def reply_to(line: bytes) -> None:
            _send(await answer(line))

        async with asyncio.TaskGroup() as group:
            while line := await lines.readline():
                group.create_task(reply_to(line))


async def _answer(answers: Answers, models: ModelRegistry, line: bytes | str) -> str:
    """Answer a line, as often as it takes."""
    custom_id, path, body = from_json(line)
    while not isinstance(reply := await answers(path, body.encode(), ""), Reply):
        if "unhealthy" in models.states.values():
            _fail("it has failed or hangs")
        await asyncio.sleep(reply)
    return json.dumps([custom_id, reply.status_code, reply.request_id, reply.body.decode()])


def _send(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _fail(error: object) -> NoReturn:
    """End this process while its engine may be inside ONNX Runtime."""
    try:
        sys.stderr.write(f"kvasir: {error}\n")
        sys.stderr.flush()
    finally:  # although the command is gone
        os._exit(1)


if __name__ == "__main__":
    try:
        given = load_settings(**json.loads(sys.argv[1]))
        asyncio.run(_answer_lines(given))
    except* (StartupError, OSError) as errors:
        _fail(errors.exceptions[0])

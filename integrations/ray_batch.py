"""The engines of `kvasir batch --ray`: actors of Ray Data, each with the model.

Requests go in blocks. Ray gives one whose actor has died to another, which answers all of it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext

from kvasir.integrations.node_share import of_this_node
from kvasir.model.platform.progress import Progress
from kvasir.server.batches.journal import Journal
from kvasir.server.process.engine_builder import check_model
from kvasir.server.process.offline import asked_line, open_model, record
from kvasir.server.settings import Settings

T = TypeVar("T")

_BLOCKS_AT_ONCE = 2  # of an actor: while the last answers of one come, another begins
_BLOCKS_PER_ACTOR = 4  # at least, where there are enough requests, to end at about the same time
_MOST_PER_ROW = 4  # requests of a block for each that runs at once
_MOST_DEATHS = 5  # of actors that had a block, until the block is taken for the cause


class Engine:
    """An actor with a model: answers blocks, several at once, in an event loop of its own."""

    def __init__(self, settings: Settings) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="event loop", daemon=True).start()
        self._stack = AsyncExitStack()  # is never left: Ray ends the process
        opening = self._stack.enter_async_context(open_model(of_this_node(settings)))
        self._answer, n_at_once = self._wait(opening)
        self._room = asyncio.Semaphore(n_at_once)

    def __call__(self, block: pa.Table) -> pa.Table:
        """Return the answers to lines, in the column `line`."""
        return pa.table({"line": self._wait(self._answer_all(block["line"].to_pylist()))})

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _answer_all(self, lines: list[str]) -> list[str]:
        return await asyncio.gather(*map(self._answer_in_turn, lines))

    async def _answer_in_turn(self, line: str) -> str:
        async with self._room:
            return await self._answer(line)


def answer_on_ray(
    requests: Iterator[tuple[str, str, bytes]],
    journal: Journal,
    settings: Settings,
    address: str,
    n_engines: int | None,
    progress: Progress,
) -> None:
    """Answer requests by actors, each with `settings`; write the answers of each block.

    address: of a cluster, whose nodes have the model's folder; `auto` is one that runs here,
    `local` a new one. n_engines: actors; None is as many as have room. Raises StartupError for the
    model, ChildProcessError with Ray's reason, ConnectionError without a cluster, and the journal's
    errors.
    """
    (name, directory), device = *settings.models.items(), check_model(settings).manifest.device
    settings = settings.model_copy(update={"model": [Path(f"{name}={directory.resolve()}")]})
    progress("connecting to Ray", 0, 0)
    with _connected(address):
        size, options = _actors(settings, n_engines, device)
        n_left = journal.counts.total - len(journal.answered)
        n_lines = math.ceil(n_left / (_BLOCKS_PER_ACTOR * size))
        n_lines = min(n_lines, _MOST_PER_ROW * settings.max_num_seqs)
        answers = ray.data.from_arrow_refs(list(_blocks(requests, n_lines))).map_batches(
            Engine,
            batch_size=None,
            batch_format="pyarrow",
            fn_constructor_args=[settings],
            compute=ActorPoolStrategy(
                size=size,
                max_tasks_in_flight_per_actor=_BLOCKS_AT_ONCE,
                max_concurrent_calls_per_actor=_BLOCKS_AT_ONCE,
                enable_true_multi_threading=True,
            ),
            ray_remote_args_fn=lambda: {"max_task_retries": _MOST_DEATHS},
            **options,
        )
        progress("loading the model", 0, 0)
        for row in answers.iter_rows():
            record(journal, row["line"], progress)
        journal.sync()


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Use a cluster; what Ray prints goes to standard error. Raises ChildProcessError."""
    with redirect_stdout(sys.stderr):
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        context = DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # our error says it
        try:
            yield
        except ray.exceptions.RayError as error:
            cause = str(error).strip().splitlines()[-1]
            raise ChildProcessError(f"Ray: {cause}; run the same command to go on") from None
        finally:
            ray.shutdown()


def _actors(settings: Settings, n_engines: int | None, device: str) -> tuple[int, dict[str, float]]:
    """Return the number of actors, and what each takes of its node: a GPU, or its threads.

    Without `threads` these are the processors of the smallest node, or, of so many actors, a part.
    """
    free = ray.available_resources()
    if device != "cpu":
        return n_engines or max(1, int(free.get("GPU", 0))), {"num_gpus": 1}
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    smallest = min(filter(None, nodes), default=1.0)
    part = smallest if n_engines is None else sum(nodes) / n_engines
    threads = settings.threads or max(1, int(min(part, smallest)))
    return n_engines or max(1, int(free.get("CPU", 0) // threads)), {"num_cpus": threads}


def _blocks(requests: Iterator[tuple[str, str, bytes]], n_lines: int) -> Iterator[ray.ObjectRef]:
    """Yield blocks of so many requests, in Ray's store, which writes to disk what exceeds it."""
    while block := list(islice(requests, n_lines)):
        yield ray.put(pa.table({"line": [asked_line(*request) for request in block]}))

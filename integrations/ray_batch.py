"""The engines of `kvasir batch --ray`: actors of Ray Data, each with the model.

Requests go in blocks. Ray gives one whose actor has died to another, which answers all of it again.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, redirect_stdout
from itertools import islice
from pathlib import Path
from threading import Thread

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext

from kvasir.integrations.node_share import of_this_node
from kvasir.model.platform.progress import Progress
from kvasir.server.batches.journal import Journal
from kvasir.server.process.engine_builder import check_model
from kvasir.server.process.offline import open_model, record
from kvasir.server.settings import Settings

_BLOCKS_AT_ONCE = 2  # of an actor: while the last answers of one come, another begins
_BLOCKS = 4  # for each actor at least, for all to end at about the same time
_MOST_RETRIES = 5  # of a block whose actor dies, before it is taken for the cause


class Engine:
    """An actor with a model: answers blocks, several at once, in an event loop of its own."""

    def __init__(self, settings: Settings) -> None:
        self._loop, self._stack = asyncio.new_event_loop(), AsyncExitStack()
        Thread(target=self._loop.run_forever, daemon=True).start()
        opening = self._stack.enter_async_context(open_model(of_this_node(settings)))
        opened = asyncio.run_coroutine_threadsafe(opening, self._loop)
        self._answer, n_at_once = opened.result()
        self._room = asyncio.Semaphore(n_at_once)

    def __call__(self, block: pa.Table) -> pa.Table:
        """Return the answers to lines, in the column `line`."""
        work = self._answer_all(block["line"].to_pylist())
        return pa.table({"line": asyncio.run_coroutine_threadsafe(work, self._loop).result()})

    async def _answer_all(self, lines: list[str]) -> list[str]:
        async def answer(line: str) -> str:
            async with self._room:
                return await self._answer(line)

        return await asyncio.gather(*map(answer, lines))


def answer_on_ray(
    requests: Iterator[tuple[str, str, bytes]],
    journal: Journal,
    settings: Settings,
    address: str,
    n_engines: int | None,
    progress: Progress,
) -> None:
    """Answer requests by actors, each with `settings`; write the answers of each block.

    address: of a cluster, or `auto` or `local`, see `ray.init`. n_engines: None is as many as have
    room. Raises StartupError for the model, ChildProcessError with Ray's reason, ConnectionError
    without a cluster, and the journal's errors.
    """
    (name, directory), device = *settings.models.items(), check_model(settings).manifest.device
    settings = settings.model_copy(update={"model": [Path(f"{name}={directory.resolve()}")]})
    progress("connecting to Ray", 0, 0)
    with redirect_stdout(sys.stderr):  # Ray prints
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # our error says it
        size, needs = _actors(settings, n_engines, device)
        n_left = journal.counts.total - len(journal.answered)
        n_lines = min(-(-n_left // (_BLOCKS * size)), 4 * settings.max_num_seqs)
        try:
            answers = ray.data.from_arrow_refs(list(_blocks(requests, n_lines))).map_batches(
                Engine,
                batch_size=None,
                batch_format="pyarrow",
                fn_constructor_args=[settings],
                compute=ActorPoolStrategy(
                    size=size,
                    max_concurrent_calls_per_actor=_BLOCKS_AT_ONCE,
                    enable_true_multi_threading=True,
                ),
                ray_remote_args_fn=lambda: {"max_task_retries": _MOST_RETRIES},
                **needs,
            )
            progress("loading the model", 0, 0)
            for row in answers.iter_rows():
                record(journal, row["line"], progress)
            journal.sync()
        except ray.exceptions.RayError as error:
            cause = (str(error).strip() or repr(error)).splitlines()[-1]
            raise ChildProcessError(f"Ray: {cause}; run the same command to go on") from None
        finally:
            ray.shutdown()


def _actors(settings: Settings, n_engines: int | None, device: str) -> tuple[int, dict[str, float]]:
    """Return the number of actors, and what each takes of its node: a GPU, or its threads.

    Without `threads` these are the processors of the smallest node, or, of so many actors, a part.
    """
    kind, per_actor = ("CPU" if device == "cpu" else "GPU"), 1
    if device == "cpu":
        nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        smallest = min(filter(None, nodes), default=1)
        per_actor = settings.threads or max(1, int(min(smallest, sum(nodes) / (n_engines or 1))))
    n_free = int(ray.available_resources().get(kind, 0) // per_actor)
    return n_engines or max(1, n_free), {f"num_{kind.lower()}s": per_actor}


def _blocks(requests: Iterator[tuple[str, str, bytes]], n_lines: int) -> Iterator[ray.ObjectRef]:
    """Yield blocks of so many requests, in Ray's store, which writes to disk what exceeds it."""
    lines = (json.dumps([custom_id, path, body.decode()]) for custom_id, path, body in requests)
    while block := list(islice(lines, n_lines)):
        yield ray.put(pa.table({"line": block}))

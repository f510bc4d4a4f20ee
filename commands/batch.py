"""kvasir batch: a file of requests, answered as the batches of a server are, without a server."""

from __future__ import annotations

import asyncio
import fcntl
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from kvasir.commands.console.options import CacheDir, Json
from kvasir.commands.console.output import fail, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar
from kvasir.commands.pull import served_directory
from kvasir.model.platform.machine import available_memory, usable_cpus
from kvasir.server.settings import Settings, load_settings

if TYPE_CHECKING:
    from kvasir.server.batches.journal import Journal
    from kvasir.server.batches.requests import RequestFile

_PIPE = Path("-")
_MOST_FAULTS = 10  # that are shown


def batch(
    requests: Path = Argument(help="Lines of custom_id, method, url and body; - reads a pipe."),
    output: Path = Argument(help="File of answers; - writes them to a pipe at the end."),
    model: Path = Argument(help="A model directory or reference; NAME=DIR gives it a name."),
    engines: int = Option(1, min=1, max=256, help="Processes; threads and memory are divided."),
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Answer a file of requests, as a server's batches do, without a server.

    Answers are written as they come; their custom_id tells which request is theirs. Those that are
    errors go into OUTPUT.errors.jsonl, for an OUTPUT.jsonl.

    The same command goes on where it was interrupted. The settings of `kvasir serve` are those of
    the environment, such as KVASIR_MAX_NUM_SEQS.
    """
    started = monotonic()
    with one_line_errors(), TemporaryDirectory() as folder:
        settings = load_settings(model=[model], cache_dir=cache_dir)
        source, out, name = requests, output, str(requests)
        if requests == _PIPE:
            source, name = Path(folder, "requests.jsonl"), "standard input"
            with source.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        if output == _PIPE:
            out = Path(folder, "answers.jsonl")
        failures = out.with_name(f"{out.stem}.errors{out.suffix}")
        with ProgressBar(quiet=as_json) as progress:
            lines, asked = _read(source, name, settings, progress)
        with _writing(out, failures, asked) as journal:
            if len(journal.answered) < len(asked):
                _answer(lines, journal, settings, engines, quiet=as_json)
        if output == _PIPE:
            for path in filter(Path.exists, (out, failures)):
                sys.stdout.buffer.write(path.read_bytes())
    counts, usage = journal.counts, journal.usage
    if output != _PIPE:
        values: dict[str, Any] = counts.model_dump() | {"usage": usage.model_dump()}
        tokens = f"{usage.input_tokens:,} tokens in, {usage.output_tokens:,} out"
        seconds = monotonic() - started
        summary = f"{output} has {counts.completed:,} answers: {tokens}; {seconds:.1f} s"
        show(as_json, values | {"seconds": seconds}, summary)
    if counts.failed:
        where = "" if output == _PIPE else f"; {failures} has their errors"
        fail(f"{counts.failed} of {counts.total} requests failed{where}")


def _read(
    source: Path, name: str, settings: Settings, progress: ProgressBar
) -> tuple[RequestFile, set[int]]:
    """Check a file of requests; return it with hashes of its custom ids.

    Raises ValueError, which names lines that are no requests.
    """
    from kvasir.server.api.openai.batches import parse_line
    from kvasir.server.api.routes import ENDPOINTS
    from kvasir.server.batches.requests import RequestFile

    lines = RequestFile(source, ENDPOINTS, parse_line, settings.max_body_bytes, math.inf)
    asked, faults = set[int](), list[str]()
    for fault in lines.faults(asked):
        progress("reading the requests", len(asked), 0)
        if fault is not None:
            place = "" if fault.line is None else f"line {fault.line}: "
            faults.append(place + fault.message.rstrip("."))
    if faults:
        n_more = len(faults) - _MOST_FAULTS
        more = f"; and {n_more} more" if n_more > 0 else ""
        raise ValueError(f"{name}: {'; '.join(faults[:_MOST_FAULTS])}{more}")
    return lines, asked


@contextmanager
def _writing(out: Path, failures: Path, asked: set[int]) -> Iterator[Journal]:
    """Open the files of answers, which hold those of an interrupted run, for this process alone.

    Raises ValueError for files that are in use, or hold anything else.
    """
    from kvasir.server.batches.journal import Journal

    with out.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process writes {out}; wait for its end") from None
        try:
            with closing(Journal({False: out, True: failures}, len(asked))) as journal:
                for _ in journal.read(asked):
                    pass
                yield journal
        finally:
            if failures.is_file() and not failures.stat().st_size:
                failures.unlink()


def _answer(
    lines: RequestFile, journal: Journal, settings: Settings, n_engines: int, *, quiet: bool
) -> None:
    """Answer what is not answered yet. Raises ChildProcessError and OSError."""
    from kvasir.server.process.offline import answer_all

    (given,), cache_dir = settings.model, settings.cache_dir
    directory = served_directory(given, settings.served_model_name, cache_dir, settings.precision)
    options: dict[str, Any] = {"model": [str(directory)], "cache_dir": cache_dir and str(cache_dir)}
    if n_engines > 1:
        memory = settings.kv_cache_memory or available_memory() // 2
        options["kv_cache_memory"] = max(1, memory // n_engines)
        options["threads"] = max(1, (settings.threads or usable_cpus()) // n_engines)
    with ProgressBar(quiet=quiet, takes_minutes=True) as progress:
        progress("loading the model", 0, 0)

        def report() -> None:
            n_failed = journal.counts.failed
            note = f"{n_failed:,} failed" if n_failed else ""
            progress("answering", len(journal.answered), journal.counts.total, note)

        requests = lines.unanswered(journal.answered)
        asyncio.run(answer_all(requests, journal, options, n_engines, report))

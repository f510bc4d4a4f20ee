"""kvasir batch: a file of requests, answered as the batches of a server are, without a server."""

from __future__ import annotations

import asyncio
import fcntl
import math
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from typer import Argument, Option

from kvasir.commands.console.options import CacheDir, Json
from kvasir.commands.console.output import fail, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar
from kvasir.commands.pull import served_directory
from kvasir.model.platform.machine import available_memory, usable_cpus
from kvasir.server.batches.journal import Journal
from kvasir.server.batches.requests import RequestFile
from kvasir.server.settings import Settings, load_settings

_PIPE = Path("-")


def batch(
    requests: Path = Argument(help="Lines of custom_id, method, url and body; - reads a pipe."),
    output: Path = Argument(help="File of answers; - writes them to a pipe at the end."),
    model: Path = Argument(help="A model directory or reference; NAME=DIR gives it a name."),
    engines: int | None = Option(None, min=1, max=256, help="Processes that share this machine."),
    ray: str | None = Option(
        None, metavar="ADDRESS", help="Run them as actors of Ray; auto finds it, local starts it."
    ),
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
        source = Path(folder, "requests") if requests == _PIPE else requests
        out = Path(folder, "answers") if output == _PIPE else output
        if requests == _PIPE:
            source.write_bytes(sys.stdin.buffer.read())
        with ProgressBar(quiet=as_json) as progress:
            lines, asked = _read(source, settings, progress)
        failures = out.with_name(f"{out.stem}.errors{out.suffix}")
        try:
            with out.open("ab") as lock, closing(Journal([out, failures], len(asked))) as journal:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for _ in journal.read(asked):
                    pass
                if len(journal.answered) < len(asked):
                    _answer(lines, journal, settings, engines, ray, quiet=as_json)
        except BlockingIOError:
            raise ValueError(f"another process writes {out}; wait for its end") from None
        if output == _PIPE:
            sys.stdout.buffer.write(out.read_bytes() + failures.read_bytes())
    counts, usage, seconds = journal.counts, journal.usage, monotonic() - started
    if output != _PIPE:
        values = counts.model_dump() | {"usage": usage.model_dump(), "seconds": seconds}
        tokens = f"{usage.input_tokens:,} tokens in, {usage.output_tokens:,} out"
        show(as_json, values, f"answered {counts.completed:,} in {seconds:.1f} s: {tokens}")
    if counts.failed:
        where = "" if output == _PIPE else f"; {failures} has their errors"
        fail(f"{counts.failed} of {counts.total} requests failed{where}")


def _read(source: Path, settings: Settings, progress: ProgressBar) -> tuple[RequestFile, set[int]]:
    """Check a file of requests; return it with hashes of its custom ids. Raises ValueError."""
    from kvasir.server.api.openai.batches import parse_line
    from kvasir.server.api.routes import ENDPOINTS

    lines = RequestFile(source, ENDPOINTS, parse_line, settings.max_body_bytes)
    lines.max_requests = math.inf
    asked, faults = set[int](), list[str]()
    for fault in lines.faults(asked):
        progress("reading the requests", len(asked), 0)
        if fault is not None:
            faults.append(f"line {fault.line or 1}: {fault.message.rstrip('.')}")
    if faults:
        raise ValueError(f"{source.name}: {'; '.join(faults)}")
    return lines, asked


def _answer(
    lines: RequestFile,
    journal: Journal,
    settings: Settings,
    n_engines: int | None,
    ray_address: str | None,
    *,
    quiet: bool,
) -> None:
    """Answer what is not answered yet. Raises ChildProcessError and OSError."""
    from kvasir.server.process.offline import answer_all

    (given,), cache_dir = settings.model, settings.cache_dir
    directory = served_directory(given, settings.served_model_name, cache_dir, settings.precision)
    options: dict[str, Any] = {"model": [str(directory)], "cache_dir": cache_dir and str(cache_dir)}
    if n_engines is not None and n_engines > 1 and ray_address is None:
        memory = settings.kv_cache_memory or available_memory() // 2
        options["kv_cache_memory"] = max(1, memory // n_engines)
        options["threads"] = max(1, (settings.threads or usable_cpus()) // n_engines)
    with ProgressBar(quiet=quiet, takes_minutes=True) as progress:
        requests = filter(None, lines.unanswered(journal.answered))
        if ray_address is None:
            asyncio.run(answer_all(requests, journal, options, n_engines or 1, progress))
            return
        from kvasir.integrations.ray_batch import answer_on_ray

        shared = load_settings(**options)
        answer_on_ray(requests, journal, shared, ray_address, n_engines, progress)

"""kvasir bench: a model with random weights, the engine alone, or servers over HTTP."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from itertools import chain
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from typer import Argument, Option

from kvasir.commands.cached import models_in
from kvasir.commands.console.options import (
    CacheDir,
    Device,
    Json,
    Precision,
    Preset,
    complete_precision,
)
from kvasir.commands.console.output import fail, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar, loading
from kvasir.model.directory import PRECISIONS

_WORKLOAD = (
    "text, embed, seq2seq (suites), or CONCURRENCYx[SHARED+]INPUT/OUTPUT: 16x128/64 is 16 requests "
    "at a time, of 128 tokens in and 64 out. INPUT may be a range; nine in ten are short after "
    "'long:'. OUTPUT: 'vector' embeds; 'same' is as long as its source, and 'same/4' with 4 beams."
)


def bench_model(
    preset: Preset = "smollm2-135m",
    precision: str = Option("int8", help="int8, int4 or fp32.", autocompletion=complete_precision),
    out: Path | None = Option(None, help="Default: a folder in the cache."),
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Write a model directory with random weights; kept until the exporter changes."""
    with loading(quiet=as_json):
        from kvasir.loadtest.random_model import folder_name, make_random_model

    with one_line_errors(), ProgressBar(quiet=as_json, takes_minutes=True) as progress:
        folder = out or models_in(cache_dir) / folder_name(preset, precision, "cpu")
        made = make_random_model(preset, precision, folder, progress=progress)
    show(as_json, {"directory": str(made)}, str(made), then=("bench", "serve", made))


def bench_engine(
    preset: Preset = "smollm2-135m",
    device: Device = "cpu",
    precision: Precision = None,
    threads: int | None = Option(None, min=1, help="Default: all usable processors."),
    kernels: str | None = Option(
        None,
        help="Operators of Kvasir's own: on, off, or their instructions, such as avx2; with ',off' "
        "stock ones in turn. Default: on, if they work here.",
    ),
    prompt: list[int] | None = Option(
        None,
        min=1,
        max=131_072,
        help="Tokens of a prompt that is timed; repeatable. Default: 128 and 512.",
    ),
    plot: Path | None = Option(None, help="With --kernels on,off: a picture of the ratios."),
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Measure the engine in this process, with random weights and without HTTP."""
    with loading(quiet=as_json):
        from kvasir.loadtest import bench_engine as bench
        from kvasir.loadtest.engine_figures import Comparison
        from kvasir.loadtest.random_model import folder_name

    precision = precision or PRECISIONS[device][0]
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        libraries = bench.find_libraries(kernels, device)
        if plot and len(libraries) < 2:
            raise ValueError("--plot draws ratios, which need --kernels on,off")
        models = models_in(cache_dir)
        measured = preset, precision, threads, models, device, progress, libraries
        figures = bench.bench_engine(*measured, prompts=prompt or ())
        if plot and isinstance(figures, Comparison):
            figures.draw(plot)
    shape = bench.longer_context(preset, prompt or ())
    then = ("bench", "serve", models / folder_name(preset, precision, device, **shape))
    show(as_json, figures.as_json(), *figures.tables(), then=then)


def bench_serve(
    server: str = Argument(help="URL of an OpenAI-compatible server, or a model directory."),
    compare: list[str] | None = Option(None, help="Another, measured in turn; repeatable."),
    workload: list[str] | None = Option(None, help=f"{_WORKLOAD} Default: text."),
    requests: int | None = Option(
        None, min=1, help="Per round. Default: 3 times the concurrency; 12 times for vectors."
    ),
    warmup: int | None = Option(None, min=0, help="Requests before them. Default: concurrency."),
    rounds: int = Option(3, min=1, help="Each figure is their median."),
    rate: float | None = Option(None, min=0.001, help="Open loop: Poisson arrivals a second."),
    goodput: str = Option("", help="Limits in ms, such as 'ttft:500 itl:50 e2e:5000'."),
    model: str | None = Option(None, help="Model id to ask for."),
    extra_body: str = Option("{}", help="JSON object: more request fields."),
    extra_body_b: str = Option("{}", help="The same for the compared servers."),
    vocab_size: int = Option(2048, min=2, help="Prompts are random ids below it."),
    seed: int | None = Option(None, min=0, help="Of the prompts. Default: a new one."),
    timeout: float = Option(300.0, min=0.001, help="Seconds for a request."),
    api_key: str | None = Option(None, help="Sent to every server."),
    as_json: Json = False,
) -> None:
    """Measure latency and throughput over HTTP, of one server or of several in turn."""
    from kvasir.loadtest import bench_serve as bench
    from kvasir.loadtest.load import SUITES, VECTOR, Workload
    from kvasir.loadtest.serve_figures import parse_limits

    named = {} if model is None else {"model": model}
    with one_line_errors():
        servers = {"A": bench.Server(server, named | _parse_object("--extra-body", extra_body))}
        body = named | _parse_object("--extra-body-b", extra_body_b)
        if len(compare or ()) >= len(ascii_uppercase):
            raise ValueError(f"--compare is given {len(compare or ())} times; 25 are enough")
        for letter, address in zip(ascii_uppercase[1:], compare or (), strict=False):
            servers[letter] = bench.Server(address, body)
        texts = workload or ["text"]
        workloads = [*chain(*(SUITES.get(text) or [Workload.parse(text)] for text in texts))]
        plan = bench.Plan(
            workloads=workloads,
            rounds=rounds,
            requests=requests,
            warm_up=warmup,
            rate=rate,
            timeout=timeout,
            vocab_size=vocab_size,
            seed=secrets.randbits(32) if seed is None else seed,
            limits=parse_limits(goodput),
        )
        with ProgressBar(quiet=as_json) as progress:
            figures = bench.bench_serve(servers, plan, api_key, progress)
    has_text = any(workload.output_len != VECTOR for workload in workloads)
    then = () if figures.errors else ("chat", server) if has_text else ("doctor",)
    show(as_json, figures.as_json(), *figures.tables(), then=then)
    if figures.errors:
        fail(f"{len(figures.errors)} requests failed, the first: {figures.errors[0]}")


def bench_reproducibility(
    servers: list[str] = Argument(help="URLs of OpenAI-compatible servers, or model directories."),
    requests: int = Option(24, min=2, help="Different ones; each is asked four times."),
    max_tokens: int = Option(32, min=1, help="New tokens of each."),
    model: str | None = Option(None, help="Model id to ask for."),
    extra_body: str = Option("{}", help="JSON object: more request fields."),
    seed: int = Option(0, min=0, help="Of prompts and times."),
    timeout: float = Option(300.0, min=0.001, help="Seconds for a request."),
    api_key: str | None = Option(None, help="Sent to every server."),
    as_json: Json = False,
) -> None:
    """Count answers that differ from those of the same requests alone; exits with 1 if any do."""
    from kvasir.loadtest import bench_reproducibility as bench

    more = {} if model is None else {"model": model}
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        more |= _parse_object("--extra-body", extra_body)
        bodies = [body | more for body in bench.make_requests(requests, max_tokens, seed)]
        figures = bench.bench_reproducibility(
            servers, bodies, seed, timeout=timeout, api_key=api_key, progress=progress
        )
    show(as_json, figures.as_json(), *figures.tables())
    if figures.n_different:
        fail(f"{figures.n_different} texts or log-probabilities differ from the same alone")


def bench_steps(
    server: str = Argument(help="URL of a Kvasir server that computes, or has done so."),
    out: Path = Option(Path("steps.png"), help="The picture."),
    model: str | None = Option(None, help="Of several models. Default: the first."),
    api_key: str | None = Option(None, help="Sent to the server."),
    as_json: Json = False,
) -> None:
    """Draw a server's last steps: whose prompts they computed when, and whose streams went on."""
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        progress(f"drawing {out.name}", 0, 0)
        from kvasir.loadtest.steps import draw_steps, read_steps, rows_of

        steps = read_steps(server, api_key, model)
        rows = rows_of(steps)
        draw_steps(rows, out)
    figures = {"steps": len(steps), "sequences": len(rows), "picture": str(out)}
    show(as_json, figures, f"{out} shows {len(steps)} steps of {len(rows)} sequences")


def _parse_object(option: str, text: str) -> dict[str, Any]:
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise ValueError(f"{option} takes a JSON object, not {text!r}")

"""kvasir bench: a model with random weights, the engine alone, or servers over HTTP."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typer import Argument, Option

from kvasir.commands.console.options import Device, Json, Precision, Preset, complete_precision
from kvasir.commands.console.output import fail, make_table, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar, loading
from kvasir.model.bundle import PRECISIONS

_RANDOM_MODELS = Path("artifacts/bench")
_WORKLOAD = (
    "CONCURRENCYx[SHARED+]INPUT/OUTPUT: 16x128/64 is 16 requests at a time, of 128 tokens in and "
    "64 out."
)


def bench_model(
    preset: Preset = "smollm2-135m",
    precision: str = Option("int8", help="int8, int4 or fp32.", autocompletion=complete_precision),
    out: Path | None = Option(None, help="Default: artifacts/bench/PRESET-PRECISION."),
    as_json: Json = False,
) -> None:
    """Write a model directory with random weights; kept until the exporter changes."""
    with loading(quiet=as_json):
        from kvasir.loadtest.random_model import folder_name, make_random_model

    with one_line_errors(), ProgressBar(quiet=as_json, takes_minutes=True) as progress:
        folder = out or _RANDOM_MODELS / folder_name(preset, precision, "cpu")
        made = make_random_model(preset, precision, folder, progress=progress)
    show(as_json, {"directory": str(made)}, str(made), then=("bench", "serve", made))


def bench_engine(
    preset: Preset = "smollm2-135m",
    device: Device = "cpu",
    precision: Precision = None,
    threads: int | None = Option(None, min=1, help="Default: all usable processors."),
    cache: Path = Option(_RANDOM_MODELS, help="Folder of random models."),
    as_json: Json = False,
) -> None:
    """Measure the engine in this process, with random weights and without HTTP."""
    with loading(quiet=as_json):
        from kvasir.loadtest.bench_engine import bench_engine as measure
        from kvasir.loadtest.random_model import folder_name

    precision = precision or PRECISIONS[device][0]
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        figures = measure(preset, precision, threads, cache, device, progress)
    then = ("bench", "serve", cache / folder_name(preset, precision, device))
    show(as_json, asdict(figures), *figures.tables(), then=then)


def bench_serve(
    server: str = Argument(help="URL of an OpenAI-compatible server, or a model directory."),
    compare: str | None = Option(None, help="A second one, measured in turn."),
    workload: list[str] | None = Option(None, help=_WORKLOAD),
    requests: int | None = Option(None, min=1, help="Per round. Default: 3 times the concurrency."),
    warmup: int | None = Option(None, min=0, help="Requests before them. Default: concurrency."),
    rounds: int = Option(3, min=1, help="Each figure is their median."),
    rate: float | None = Option(None, min=0.001, help="Open loop: Poisson arrivals a second."),
    goodput: str = Option("", help="Limits in ms, such as 'ttft:500 itl:50 e2e:5000'."),
    model: str | None = Option(None, help="Model id to ask for."),
    extra_body: str = Option("{}", help="JSON object: more request fields."),
    extra_body_b: str = Option("{}", help="The same for the compared server."),
    vocab_size: int = Option(2048, min=2, help="Prompts are random ids below it."),
    seed: int | None = Option(None, min=0, help="Of the prompts. Default: a new one."),
    timeout: float = Option(300.0, min=0.001, help="Seconds for a request."),
    api_key: str | None = Option(None, help="Sent to every server."),
    as_json: Json = False,
) -> None:
    """Measure latency and throughput over HTTP, of one server or of two in turn.

    The default is a suite of six workloads.
    """
    from kvasir.loadtest import bench_serve as bench
    from kvasir.loadtest.load import SUITE, Workload
    from kvasir.loadtest.serve_figures import parse_limits

    named = {} if model is None else {"model": model}
    with one_line_errors():
        servers = {"A": bench.Server(server, named | _parse_object("--extra-body", extra_body))}
        if compare is not None:
            body = named | _parse_object("--extra-body-b", extra_body_b)
            servers["B"] = bench.Server(compare, body)
        plan = bench.Plan(
            workloads=[Workload.parse(one) for one in workload] if workload else list(SUITE),
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
    then = () if figures.errors else ("chat", server)
    show(as_json, figures.as_json(), *figures.tables(), then=then)
    if figures.errors:
        fail(f"{len(figures.errors)} requests failed, the first: {figures.errors[0]}")


def bench_embed(
    servers: list[str] = Argument(help="URLs with /v1/embeddings, or model directories."),
    concurrency: int = Option(16, min=1, help="Clients of the closed loop."),
    requests: int = Option(200, min=1, help="Texts of a round."),
    lengths: tuple[int, int] = Option((8, 256), help="Least and most tokens, log-uniform."),
    rounds: int = Option(3, min=1, help="Each figure is their median."),
    model: str | None = Option(None, help="Model id to ask for."),
    seed: int | None = Option(None, min=0, help="Of the texts. Default: a new one."),
    as_json: Json = False,
) -> None:
    """Measure embeddings over HTTP, of several servers in turn."""
    from kvasir.loadtest import bench_embed as bench

    drawn = secrets.randbits(32) if seed is None else seed
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        plan = bench.Plan(concurrency, requests, lengths, rounds, model, drawn)
        figures = [asdict(row) for row in bench.bench_embed(servers, plan, progress)]
    then = ("doctor",) if "://" in servers[0] else ("serve", servers[0])
    _show_servers("Embeddings", drawn, figures, as_json, then)


def bench_seq2seq(
    servers: list[str] = Argument(help="URLs with /v1/completions, or model directories."),
    concurrency: int = Option(16, min=1, help="Clients of the closed loop."),
    requests: int = Option(64, min=1, help="Sources of a round."),
    lengths: tuple[int, int] = Option((8, 64), help="Least and most tokens, log-uniform."),
    num_beams: int = Option(4, min=2, help="Beams of the search."),
    rounds: int = Option(3, min=1, help="Each figure is their median."),
    vocab_size: int = Option(58101, min=6, help="Sources are random ids below it."),
    model: str | None = Option(None, help="Model id to ask for."),
    seed: int | None = Option(None, min=0, help="Of the sources. Default: a new one."),
    as_json: Json = False,
) -> None:
    """Measure encoder-decoders over HTTP, of several servers in turn."""
    from kvasir.loadtest import bench_seq2seq as bench

    drawn = secrets.randbits(32) if seed is None else seed
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        plan = bench.Plan(
            concurrency, requests, lengths, num_beams, rounds, vocab_size, model, drawn
        )
        figures = [asdict(row) for row in bench.bench_seq2seq(servers, plan, progress)]
    _show_servers("Encoder-decoders", drawn, figures, as_json, ("chat", servers[0]))


def _show_servers(
    title: str, seed: int, figures: list[dict[str, Any]], as_json: bool, then: tuple[str, ...]
) -> None:
    columns = list(figures[0])
    rows = [
        [f"{value:,.1f}" if isinstance(value, float) else value for value in row.values()]
        for row in figures
    ]
    names = [name.replace("_", " ") for name in columns]
    values = {"seed": seed, "servers": figures}
    show(as_json, values, make_table(title, names, rows), then=then)


def _parse_object(option: str, text: str) -> dict[str, Any]:
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise ValueError(f"{option} takes a JSON object, not {text!r}")

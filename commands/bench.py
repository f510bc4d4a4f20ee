"""kvasir bench: a model with random weights, the engine alone, or servers over HTTP."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from commands.export import complete_precision
from commands.output import Json, complete_preset, fail, show
from commands.progress import ProgressBar, loading
from model.bundle import PRECISIONS, Device

_RANDOM_MODELS = Path("artifacts/bench")


def bench_model(
    preset: Annotated[
        str, typer.Option(help="Shape of the decoder.", autocompletion=complete_preset)
    ] = "smollm2-135m",
    precision: Annotated[
        str, typer.Option(help="int8, int4 or fp32.", autocompletion=complete_precision)
    ] = "int8",
    out: Annotated[
        Path | None, typer.Option(help="Default: artifacts/bench/PRESET-PRECISION.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a model directory with random weights, for measuring; kept while the exporter stays as it is."""
    with loading("PyTorch", quiet=as_json):
        from export.verify import VerificationError
        from loadtest.random_model import make_random_model
        from model.config import ConfigError

    try:
        with ProgressBar(quiet=as_json) as progress:
            wanted = out or _RANDOM_MODELS / f"{preset}-{precision}"
            made = make_random_model(preset, precision, wanted, progress=progress)
    except (ConfigError, OSError, VerificationError) as error:
        fail(error)
    typer.echo(json.dumps({"directory": str(made)}) if as_json else made)


def bench_engine(
    preset: Annotated[
        str,
        typer.Option(
            help="Shape of the decoder; its weights are random.", autocompletion=complete_preset
        ),
    ] = "smollm2-135m",
    device: Annotated[Device, typer.Option(help="Where it runs.")] = "cpu",
    precision: Annotated[
        str | None, typer.Option(help="As of kvasir export.", autocompletion=complete_precision)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: every processor this process may use.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where random models are kept.")] = _RANDOM_MODELS,
    as_json: Json = False,
) -> None:
    """Measure the engine in this process, without HTTP."""
    with loading("PyTorch", quiet=as_json):
        from export.verify import VerificationError
        from loadtest.bench_engine import bench_engine as measure

    try:
        with ProgressBar(quiet=as_json) as progress:
            figures = measure(
                preset, precision or PRECISIONS[device][0], threads, cache, device, progress
            )
    except (OSError, ValueError, VerificationError) as error:
        fail(error)
    show(as_json, figures.as_json(), *figures.tables())


def bench_serve(
    server: Annotated[
        str,
        typer.Argument(help="URL of an OpenAI-compatible server, or a model directory to serve."),
    ],
    compare: Annotated[
        str | None, typer.Option(help="Another one, measured in turn with the first.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="CONCURRENCYx[SHARED+]INPUT/OUTPUT: 16x128/64 is 16 at a time, 128 tokens in and 64 out."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="A round. Default: 3 times the concurrency.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Requests before the rounds. Default: concurrency.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each figure is their median.")] = 3,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Open loop: Poisson arrivals, requests a second."),
    ] = None,
    goodput: Annotated[
        str, typer.Option(help="Limits in ms, such as 'ttft:500 itl:50 e2e:5000'.")
    ] = "",
    model: Annotated[str | None, typer.Option(help="Model id to ask for.")] = None,
    extra_body: Annotated[
        str, typer.Option(help="JSON object: more fields of each request.")
    ] = "{}",
    extra_body_b: Annotated[str, typer.Option(help="The same for the compared server.")] = "{}",
    vocab_size: Annotated[
        int, typer.Option(min=2, help="Prompts are random token ids below it.")
    ] = 2048,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the prompts. Default: others each time.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a request may take.")
    ] = 300.0,
    api_key: Annotated[str | None, typer.Option(help="Sent to every server.")] = None,
    as_json: Json = False,
) -> None:
    """Measure latency and throughput over HTTP, of one server or of two in turn. Default: a suite of six workloads."""
    from loadtest import bench_serve as bench
    from loadtest.load import SUITE, Workload
    from loadtest.serve_figures import parse_limits

    named = {} if model is None else {"model": model}
    try:
        servers = {"A": bench.Server(server, named | _parse_object("--extra-body", extra_body))}
        if compare is not None:
            servers["B"] = bench.Server(
                compare, named | _parse_object("--extra-body-b", extra_body_b)
            )
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
    except (OSError, ValueError, bench.ServeBenchError) as error:
        fail(error)
    show(as_json, figures.as_json(), *figures.tables())
    if figures.errors:
        fail(f"{len(figures.errors)} requests failed, the first: {figures.errors[0]}")


def _parse_object(option: str, text: str) -> dict[str, Any]:
    """A JSON object that an option holds."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        fail(f"{option} takes a JSON object, not {text!r}")
    return value

"""The command: train, import, export, verify, serve, generate, bench. Each calls its room, imported when needed."""

from __future__ import annotations

import inspect
import json
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from model.bundle import Device
from model.train import train
from server.settings import PREFIX, Settings

if TYPE_CHECKING:
    from model.bundle import Verification

_RANDOM_MODELS = Path("artifacts/bench")
# What is missing where only a part of Kvasir is installed, and the extra that brings it.
_EXTRAS = {"onnxruntime": "cpu", "tensorboard": "tensorboard"} | dict.fromkeys(
    ("torch", "onnx", "onnx_ir", "safetensors", "matplotlib"), "train"
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def command() -> None:
    """Train a decoder language model, export it to ONNX, serve it. Start with: kvasir serve examples/stdlib"""


def fail(error: object) -> NoReturn:
    """End with one line on standard error."""
    typer.echo(f"kvasir: {error}", err=True)
    raise typer.Exit(1)


app.command()(train)


@app.command("import")
def import_(
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json.")
    ],
    out: Annotated[Path, typer.Option(help="The checkpoint directory to write.")],
) -> None:
    """Make a checkpoint directory of a Hugging Face checkpoint, to export, to serve or to train on."""
    from model.huggingface import HuggingFaceError, import_checkpoint

    started = time.monotonic()
    try:
        imported = import_checkpoint(folder, out)
    except (HuggingFaceError, OSError) as error:
        fail(error)
    config = imported.config
    rows = {
        "family": imported.family,
        "layers": str(config.n_layer),
        "parameters": f"{imported.n_parameters:,}",
        "weights": imported.dtype,
        "vocabulary": f"{config.vocab_size:,}",
        "max model len": f"{config.max_model_len:,}",
        "chat template": "yes" if imported.has_chat_template else "no",
        "seconds": f"{time.monotonic() - started:.1f}",
        "peak memory": f"{peak_memory() / 2**20:,.0f} MiB",
    }
    table = Table(title=out.name, show_header=False)
    for row in rows.items():
        table.add_row(*row)
    Console().print(table)
    for note in imported.notes:
        typer.echo(f"note: {note}")


def peak_memory() -> int:
    """Bytes that this process has had in memory at most."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A training run, or a checkpoint directory.")],
    out: Annotated[Path, typer.Option(help="The model directory to write.")],
    device: Annotated[Device, typer.Option(help="What it is to run on.")] = "cpu",
    precision: Annotated[
        str | None, typer.Option(help="int8 (default), int4 or fp32; for cuda bf16 (default), fp16, int8 or int4.")
    ] = None,
    kv_cache: Annotated[str | None, typer.Option(help="Keys and values on cuda: int8 or fp8.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Measure perplexity on this; default: held-out, or English.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=100.0, help="Served requests' default.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Served requests' default.")] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-6, max=1.0, help="Served requests' default.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="The longest row; default: the checkpoint's.")
    ] = None,
) -> None:
    """Export a checkpoint to a model directory, and prove that it computes what PyTorch does."""
    from export.directory import export_checkpoint
    from export.verify import VerificationError
    from model.bundle import GenerationDefaults
    from model.checkpoint import CheckpointError

    started = time.monotonic()
    generation = GenerationDefaults(temperature=temperature, top_k=top_k, top_p=top_p)
    try:
        manifest = export_checkpoint(
            checkpoint,
            out,
            device=device,
            precision=precision,
            kv_cache=kv_cache,
            text=text,
            generation=generation,
            max_model_len=max_model_len,
        )
    except (CheckpointError, VerificationError, OSError, ValueError) as error:
        fail(error)
    Console().print(verification_table(out.name, exported=manifest.verification))
    Console().print(f"{time.monotonic() - started:.0f} seconds, {peak_memory() / 2**20:,.0f} MiB of memory at most")


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="A model directory.")],
    checkpoint: Annotated[Path | None, typer.Option(help="The run or checkpoint it was exported from.")] = None,
    text: Annotated[Path | None, typer.Option(help="Measure perplexity on this; default: held-out text.")] = None,
) -> None:
    """Check a model directory's hashes, and measure it against PyTorch again."""
    from export.directory import SourceMismatchError, verify_directory
    from export.verify import VerificationError
    from model.bundle import BundleError
    from model.checkpoint import CheckpointError

    try:
        noted, measured = verify_directory(directory, checkpoint, text)
    except (BundleError, CheckpointError, SourceMismatchError, VerificationError, OSError, ValueError) as error:
        fail(error)
    Console().print(verification_table(directory.name, manifest=noted, measured=measured))


def verification_table(title: str, **columns: Verification) -> Table:
    """Figures side by side, a column for each set of them."""
    table = Table(title=title)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for key in ("max_logit_error", "greedy_agreement", "perplexity_torch", "perplexity_onnx", "text"):
        values = [getattr(column, key) for column in columns.values()]
        if any(value is not None for value in values):
            cells = [f"{value:.4g}" if isinstance(value, float) else value or "-" for value in values]
            table.add_row(key.replace("_", " "), *cells)
    return table


def serve_parameters() -> list[inspect.Parameter]:
    """`kvasir serve`'s argument, the model, and its options: one for each other setting."""
    parameters = []
    for name, field in Settings.model_fields.items():
        envvar = PREFIX + name.upper()
        kind: Any
        if name == "model":
            kind = Annotated[Path | None, typer.Argument(help=field.description, envvar=envvar)]
        else:
            default = False if field.default is None else str(field.default)
            option = typer.Option(help=field.description, envvar=envvar, show_default=default)
            kind = Annotated[bool | None if field.annotation is bool else str | None, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    return parameters


def serve(**options: Path | str | bool | None) -> None:
    """Serve a model directory over HTTP."""
    from server import serve
    from server.errors import StartupError
    from server.settings import load_settings

    try:
        serve.run(load_settings(**options))
    except StartupError as error:
        fail(error)


serve.__signature__ = inspect.Signature(serve_parameters())  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in serve_parameters()}
app.command()(serve)


@app.command()
def generate(
    directory: Annotated[Path, typer.Argument(help="A model directory.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=100.0, help="0: the likeliest token.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-6, max=1.0)] = None,
    seed: Annotated[int | None, typer.Option(help="Default: another one each time.")] = None,
) -> None:
    """Continue a prompt here, without a server, and stream it to the terminal; sampled as the model advises."""
    from model.bundle import BundleError, load_bundle
    from server import terminal
    from server.app import build_engine
    from server.engine.sampling import SamplingParams
    from server.errors import KvasirError, StartupError
    from server.settings import load_settings

    drawn = secrets.randbits(64) if seed is None else seed
    wanted = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    try:
        bundle = load_bundle(directory)
        fields = bundle.generation.given() | {name: value for name, value in wanted.items() if value is not None}
        params = SamplingParams(max_tokens=max_tokens, seed=drawn, **fields)  # type: ignore[arg-type]
        engine = build_engine(load_settings(model=directory, max_num_seqs=1), bundle)
        for piece in terminal.generate(engine, bundle, prompt, params):
            typer.echo(piece, nl=False)
    except (BundleError, KvasirError, StartupError, ValueError) as error:
        fail(error)
    typer.echo()


@app.command()
def explain(
    directory: Annotated[Path, typer.Argument(help="A model directory.")],
    text: Annotated[str, typer.Argument(help="What the model is to read.")],
    layer: Annotated[int, typer.Option(min=0, help="Which layer's attention.")] = 0,
    head: Annotated[int | None, typer.Option(min=0, help="Which of its heads. Default: all, side by side.")] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many of the likeliest next tokens.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Draw the weights: a PNG.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write tokens, weights and next tokens here.")] = None,
) -> None:
    """Show what the exported model attends to in a text, and what it would say next."""
    from model.bundle import BundleError, load_bundle
    from server.errors import KvasirError
    from server.explain import Explainer, check_index

    try:
        bundle = load_bundle(directory)
        if head is not None:
            check_index("head", head, bundle.config.n_head)
        explanation = Explainer(bundle).explain(text, [layer], top_k=top_k)
        heads = list(range(bundle.config.n_head)) if head is None else [head]
        if out is not None:
            from server.heatmap import draw_attention

            window = bundle.config.window_of(layer)
            draw_attention(explanation, directory.name, layer, heads, out, window)
        if output is not None:
            output.write_text(json.dumps(explanation.as_json(layer, heads)) + "\n", encoding="utf-8")
    except (BundleError, KvasirError, OSError) as error:
        fail(error)
    table = Table(title=f"after {len(explanation.tokens)} tokens")
    for column in ("next token", "id", "probability"):
        table.add_column(column, justify="left" if column == "next token" else "right")
    for token in explanation.next_tokens:
        table.add_row(escape(repr(token.text)), str(token.token_id), f"{token.probability:.4f}")
    Console().print(table)


def parse_object(option: str, text: str) -> dict[str, Any]:
    """A JSON object that an option holds."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        fail(f"{option} takes a JSON object, not {text!r}")
    return value


bench = typer.Typer(no_args_is_help=True, help="Measure speed.")
app.add_typer(bench, name="bench")


@bench.command("model")
def bench_model(
    preset: Annotated[str, typer.Option(help="Shape of the decoder.")] = "smollm2-135m",
    precision: Annotated[str, typer.Option(help="int8, int4 or fp32.")] = "int8",
    out: Annotated[Path | None, typer.Option(help="Default: artifacts/bench/PRESET-PRECISION.")] = None,
) -> None:
    """Write a model directory with random weights, for measuring; kept while the exporter stays as it is."""
    from export.verify import VerificationError
    from loadtest.random_model import make_random_model
    from model.config import ConfigError

    try:
        made = make_random_model(preset, precision, out or _RANDOM_MODELS / f"{preset}-{precision}")
    except (ConfigError, OSError, VerificationError) as error:
        fail(error)
    typer.echo(made)


@bench.command("engine")
def bench_engine(
    preset: Annotated[str, typer.Option(help="Shape of the decoder; its weights are random.")] = "smollm2-135m",
    device: Annotated[Device, typer.Option(help="Where it runs.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="As of kvasir export.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: every processor this process may use.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
    cache: Annotated[Path, typer.Option(help="Where random models are kept.")] = _RANDOM_MODELS,
) -> None:
    """Measure the engine in this process, without HTTP."""
    from export.directory import PRECISIONS
    from export.verify import VerificationError
    from loadtest.bench_engine import bench_engine as measure

    try:
        figures = measure(preset, precision or PRECISIONS[device][0], threads, cache, device)
    except (OSError, ValueError, VerificationError) as error:
        fail(error)
    Console().print(*figures.tables(), sep="\n")
    if output is not None:
        output.write_text(json.dumps(figures.as_json(), indent=2) + "\n", encoding="utf-8")


@bench.command("serve")
def bench_serve(
    server: Annotated[str, typer.Argument(help="URL of an OpenAI-compatible server, or a model directory to serve.")],
    compare: Annotated[str | None, typer.Option(help="Another one, measured in turn with the first.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="CONCURRENCYx[SHARED+]INPUT/OUTPUT: 16x128/64 is 16 at a time, 128 tokens in and 64 out."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="A round. Default: 3 times the concurrency.")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Requests before the rounds. Default: concurrency.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop: Poisson arrivals, requests a second.")
    ] = None,
    goodput: Annotated[str, typer.Option(help="Limits in ms, such as 'ttft:500 itl:50 e2e:5000'.")] = "",
    model: Annotated[str | None, typer.Option(help="Model id to ask for.")] = None,
    extra_body: Annotated[str, typer.Option(help="JSON object: more fields of each request.")] = "{}",
    extra_body_b: Annotated[str, typer.Option(help="The same for the compared server.")] = "{}",
    vocab_size: Annotated[int, typer.Option(min=2, help="Prompts are random token ids below it.")] = 2048,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the prompts. Default: others each time.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 300.0,
    api_key: Annotated[str | None, typer.Option(help="Sent to every server.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
) -> None:
    """Measure latency and throughput over HTTP, of one server or of two in turn. Default: a suite of six workloads."""
    from loadtest import bench_serve as bench
    from loadtest.load import SUITE, Workload
    from loadtest.serve_figures import parse_limits

    named = {} if model is None else {"model": model}
    try:
        servers = {"A": bench.Server(server, named | parse_object("--extra-body", extra_body))}
        if compare is not None:
            servers["B"] = bench.Server(compare, named | parse_object("--extra-body-b", extra_body_b))
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
        figures = bench.bench_serve(servers, plan, api_key, lambda line: typer.echo(line, err=True))
    except (OSError, ValueError, bench.ServeBenchError) as error:
        fail(error)
    Console().print(*figures.tables(), sep="\n")
    if output is not None:
        output.write_text(json.dumps(figures.as_json(), indent=2) + "\n", encoding="utf-8")
    if figures.errors:
        fail(f"{len(figures.errors)} requests failed, the first: {figures.errors[0]}")


def main() -> None:
    """Entry point of the `kvasir` command. A package that is not installed is named, with the extra that brings it."""
    try:
        app()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sys.exit(f"kvasir: this needs {error.name}; install it with: pip install -c constraints.txt -e '.[{extra}]'")


if __name__ == "__main__":
    main()

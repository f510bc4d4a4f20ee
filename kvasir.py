"""The command. Its parts, in the order in which a model goes through them, are in `commands`."""

# ruff: noqa: E402  a signal comes before the imports

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated

# Ctrl-C while the rest is imported ends the process as a signal does, rather than with a traceback.
_on_interrupt = signal.getsignal(signal.SIGINT)
if _on_interrupt is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import typer

from commands.bench import bench_engine, bench_model, bench_serve
from commands.explain import explain
from commands.export import export, verify
from commands.generate import generate
from commands.group import CommandGroup
from commands.import_ import import_
from commands.serve import serve
from commands.train import train

signal.signal(signal.SIGINT, _on_interrupt)

_Part = tuple[Callable[..., None], str]  # a command, and an example of it
_PARTS: dict[str, dict[str, _Part]] = {
    "Make a model": {
        "train": (train, "kvasir train my-texts/ --out runs/mine"),
        "import": (import_, "kvasir import SmolLM2-135M/ --out runs/smollm2"),
        "export": (export, "kvasir export runs/mine --out artifacts/mine"),
        "verify": (verify, "kvasir verify artifacts/mine --checkpoint runs/mine"),
    },
    "Use it": {
        "serve": (serve, "kvasir serve artifacts/mine"),
        "generate": (generate, 'kvasir generate artifacts/mine "Once upon a time"'),
        "explain": (explain, 'kvasir explain artifacts/mine "Once upon a time" --out map.png'),
    },
}
_BENCHES: dict[str, _Part] = {
    "model": (bench_model, "kvasir bench model --preset smollm2-135m --precision int8"),
    "engine": (bench_engine, "kvasir bench engine --preset smollm2-135m --precision int8"),
    "serve": (bench_serve, "kvasir bench serve artifacts/mine --workload 16x128/64"),
}
_FLOW = [example for parts in _PARTS.values() for _, example in parts.values()] + [
    "kvasir bench serve artifacts/mine"
]
_HELP = "\n".join(
    [
        "Train a decoder language model, or import one; export it to ONNX, serve it.\n",
        *_FLOW,
        "\nTo see it at once: kvasir serve examples/stdlib",
    ]
)

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True)


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  slow

        typer.echo(f"kvasir {version('kvasir-lm')}")
        raise typer.Exit


@app.callback(help=_HELP)
def command(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `kvasir` itself."""


for panel, parts in _PARTS.items():
    for name, (function, example) in parts.items():
        app.command(name, rich_help_panel=panel, epilog=f"For example: {example}")(function)
for name, (function, example) in _BENCHES.items():
    bench.command(name, epilog=f"For example: {example}")(function)
app.add_typer(
    bench, name="bench", rich_help_panel="Measure it", help="Measure speed: the engine, or servers."
)


def main() -> None:
    """Entry point of the `kvasir` command."""
    app()


if __name__ == "__main__":
    main()

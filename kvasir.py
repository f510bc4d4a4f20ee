"""The `kvasir` command, with the subcommands of `commands` in the order of a model's life."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated

from commands.progress import on_interrupt

# Ctrl-C during these imports ends the process as a signal does, without a traceback.
with on_interrupt(signal.SIG_DFL):
    import typer

    from commands.bench import bench_engine, bench_model, bench_serve
    from commands.explain import explain
    from commands.export import export, verify
    from commands.generate import generate
    from commands.import_ import import_
    from commands.output import CommandGroup
    from commands.serve import serve
    from commands.train import train

_EXAMPLES = {
    "train": "kvasir train my-texts/ --out runs/mine",
    "import": "kvasir import SmolLM2-135M/ --out runs/smollm2",
    "export": "kvasir export runs/mine --out artifacts/mine",
    "verify": "kvasir verify artifacts/mine --checkpoint runs/mine",
    "serve": "kvasir serve artifacts/mine",
    "generate": 'kvasir generate artifacts/mine "Once upon a time"',
    "explain": 'kvasir explain artifacts/mine "Once upon a time" --out map.png',
    "bench": "kvasir bench serve artifacts/mine",
}
_BENCH_EXAMPLES = {
    "model": "kvasir bench model --preset smollm2-135m --precision int8",
    "engine": "kvasir bench engine --preset smollm2-135m --precision int8",
    "serve": "kvasir bench serve artifacts/mine --workload 16x128/64",
}
_ABOUT = "Train a decoder language model, or import one; export it to ONNX, serve it.\n"
_AT_ONCE = "\nTo see it at once: kvasir serve examples/stdlib"

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure speed: the engine, or servers.")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  slow

        typer.echo(f"kvasir {version('kvasir-lm')}")
        raise typer.Exit


_Version = typer.Option(
    "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
)


@app.callback(help="\n".join([_ABOUT, *_EXAMPLES.values(), _AT_ONCE]))
def command(_version: Annotated[bool, _Version] = False) -> None:
    """Take the options of `kvasir` itself."""


_PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Make a model": {"train": train, "import": import_, "export": export, "verify": verify},
    "Use it": {"serve": serve, "generate": generate, "explain": explain},
}
for panel, functions in _PANELS.items():
    for name, function in functions.items():
        epilog = f"For example: {_EXAMPLES[name]}"
        app.command(name, rich_help_panel=panel, epilog=epilog)(function)
for function in (bench_model, bench_engine, bench_serve):
    name = function.__name__.removeprefix("bench_")
    bench.command(name, epilog=f"For example: {_BENCH_EXAMPLES[name]}")(function)
app.add_typer(bench, name="bench", rich_help_panel="Measure it")


def main() -> None:
    """Run the command: the entry point of the package."""
    app()


if __name__ == "__main__":
    main()

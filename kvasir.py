"""The `kvasir` command, with the subcommands of `commands` in the order of a model's life."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated

from commands.interrupts import on_interrupt

# Ctrl-C during these imports ends the process as a signal does, without a traceback.
with on_interrupt(signal.SIG_DFL):
    import typer

    from commands.bench import bench_engine, bench_model, bench_serve
    from commands.explain import explain
    from commands.export import export, verify
    from commands.generate import generate
    from commands.group import CommandGroup
    from commands.import_ import import_
    from commands.serve import serve
    from commands.train import train

_Command = tuple[Callable[..., None], str]  # a function, and an example
_PANELS: dict[str, dict[str, _Command]] = {
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
_BENCHES: dict[str, _Command] = {
    "model": (bench_model, "kvasir bench model --preset smollm2-135m --precision int8"),
    "engine": (bench_engine, "kvasir bench engine --preset smollm2-135m --precision int8"),
    "serve": (bench_serve, "kvasir bench serve artifacts/mine --workload 16x128/64"),
}
_EXAMPLES = [example for panel in _PANELS.values() for _, example in panel.values()]
_HELP = "\n".join(
    [
        "Train a decoder language model, or import one; export it to ONNX, serve it.\n",
        *_EXAMPLES,
        "kvasir bench serve artifacts/mine",
        "\nTo see it at once: kvasir serve examples/stdlib",
    ]
)

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure speed: the engine, or servers.")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  slow

        typer.echo(f"kvasir {version('kvasir-lm')}")
        raise typer.Exit


@app.callback(help=_HELP)
def command(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options of `kvasir` itself."""


for panel, parts in _PANELS.items():
    for name, (function, example) in parts.items():
        app.command(name, rich_help_panel=panel, epilog=f"For example: {example}")(function)
for name, (function, example) in _BENCHES.items():
    bench.command(name, epilog=f"For example: {example}")(function)
app.add_typer(bench, name="bench", rich_help_panel="Measure it")


def main() -> None:
    """Run the command: the entry point of the package."""
    app()


if __name__ == "__main__":
    main()

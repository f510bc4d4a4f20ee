"""The `kvasir` command, with the subcommands of `commands` in the order of a model's life."""

from __future__ import annotations

import signal
from collections.abc import Callable

from kvasir.model.platform.progress import handling

# Ctrl-C during these imports ends the process as a signal does, without a traceback.
with handling(signal.SIG_DFL, signal.SIGINT):
    import typer

    from kvasir.commands.batch import batch
    from kvasir.commands.bench import (
        bench_engine,
        bench_model,
        bench_reproducibility,
        bench_serve,
        bench_steps,
    )
    from kvasir.commands.cached import list_models, remove_models
    from kvasir.commands.chat import chat
    from kvasir.commands.console.output import Command, CommandGroup
    from kvasir.commands.doctor import doctor
    from kvasir.commands.explain import explain
    from kvasir.commands.export import evaluate, export
    from kvasir.commands.generate import embed, generate
    from kvasir.commands.merge import merge
    from kvasir.commands.pull import pull
    from kvasir.commands.serve import serve
    from kvasir.commands.train import train

# The panel of the help, the function, and an example, which also names the command.
_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("Make a model", train, "kvasir train my-texts/ --out runs/mine"),
    ("Make a model", pull, "kvasir pull hf://HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("Make a model", export, "kvasir export runs/mine --out artifacts/mine"),
    ("Make a model", merge, "kvasir merge SmolLM2-135M/ runs/mine --out merged/mine"),
    ("Make a model", evaluate, "kvasir eval artifacts/mine --against runs/mine"),
    ("Use it", serve, "kvasir serve artifacts/mine"),
    ("Use it", chat, "kvasir chat artifacts/mine"),
    ("Use it", generate, 'kvasir generate artifacts/mine "Once upon a time"'),
    ("Use it", embed, 'kvasir embed artifacts/minilm "A cat sat." "A kitten lay."'),
    ("Use it", batch, "kvasir batch requests.jsonl answers.jsonl artifacts/mine"),
    ("Use it", explain, 'kvasir explain artifacts/mine "Once upon a time" --out map.png'),
    ("Keep it", list_models, "kvasir list"),
    ("Keep it", remove_models, "kvasir rm mine-54bd20c651ab"),
    ("Measure it", doctor, "kvasir doctor"),
)
_BENCHES: tuple[tuple[Callable[..., None], str], ...] = (
    (bench_model, "kvasir bench model --preset smollm2-135m --precision int8"),
    (bench_engine, "kvasir bench engine --preset smollm2-135m --precision int8"),
    (bench_serve, "kvasir bench serve artifacts/mine --workload 16x128/64"),
    (bench_reproducibility, "kvasir bench reproducibility http://localhost:8000"),
    (bench_steps, "kvasir bench steps http://localhost:8000 --out steps.png"),
)
_ABOUT = (
    "Train a Transformer or take a published one, and serve it: decoders write and chat, encoders "
    "embed, rank and classify, encoder-decoders translate."
)
_EXAMPLES = "\n".join([example for _, _, example in _COMMANDS] + [_BENCHES[2][1]])
_PUBLISHED = "A published model: kvasir serve SmolLM2-135M/, or hf://org/name, or model.gguf"
_AT_ONCE = "To see it at once: kvasir serve"

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of all commands
)
bench = typer.Typer(no_args_is_help=True, help="Measure speed: the engine, or servers.")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  slow

        typer.echo(f"kvasir {version('kvasir-lm')}")
        raise typer.Exit


_VERSION = typer.Option(
    False, "--version", "-V", callback=_show_version, is_eager=True, help="Show the version."
)


@app.callback(help=f"{_ABOUT}\n\n{_EXAMPLES}\n\n{_PUBLISHED}\n\n{_AT_ONCE}")
def command(_version: bool = _VERSION) -> None:
    """Take the options of `kvasir` itself."""


for panel, function, example in _COMMANDS:
    about = f"For example: {example}"
    app.command(example.split()[1], cls=Command, rich_help_panel=panel, epilog=about)(function)
for function, example in _BENCHES:
    about = f"For example: {example}"
    bench.command(example.split()[2], cls=Command, epilog=about)(function)
app.add_typer(bench, name="bench", rich_help_panel="Measure it")


def main() -> None:
    """Run the command: the entry point of the package."""
    app()


if __name__ == "__main__":
    main()

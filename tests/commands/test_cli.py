"""The command line: help, mistakes in one line, pipes, Ctrl-C, and shell completion."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvasir.__main__ import app
from kvasir.commands.console import output, progress
from kvasir.commands.console.output import console, show
from kvasir.commands.serve import _PANELS
from kvasir.model import directory
from kvasir.model.training import report
from kvasir.model.training.metrics import StepMetrics
from kvasir.server.settings import Settings

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples/stdlib")
COMMANDS = (
    *("train", "pull", "export", "merge", "eval"),
    *("serve", "chat", "generate", "embed", "batch", "explain"),
    *("list", "rm", "doctor", "bench serve"),
)
BENCHES = ("bench model", "bench engine", "bench serve")
PLAIN = {"COLUMNS": "80", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}


def kvasir(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment, prog_name="kvasir")


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *arguments]
    return subprocess.run(command, text=True, cwd=ROOT, check=False, **pipes | options)


def test_help_shows_the_whole_flow_in_order() -> None:
    lines = kvasir("--help", **PLAIN).stdout.splitlines()
    examples = [f"{line.strip()} " for line in lines if line.startswith(" kvasir ")]
    assert len(examples) == len(COMMANDS)
    assert all(map(str.startswith, examples, (f"kvasir {command} " for command in COMMANDS)))
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", [*COMMANDS[:-1], *BENCHES])
def test_the_help_of_each_has_an_example_and_cuts_no_name_at_80_columns(command: str) -> None:
    whole, narrow = (
        kvasir(*command.split(), "--help", **PLAIN | {"COLUMNS": columns}).stdout
        for columns in ("500", "80")
    )
    assert f"For example: kvasir {command}" in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    names, shown = (set(re.findall(r"(?<!\S)--[a-z0-9-]+", text)) for text in (whole, narrow))
    assert "--help" in names
    assert names <= shown


def test_each_setting_is_an_option_with_its_description() -> None:
    shown = "".join(kvasir("serve", "--help", **PLAIN | {"COLUMNS": "500"}).stdout.split())
    for name, field in Settings.model_fields.items():
        option = "model" if name == "model" else f"--{name.replace('_', '-')}"
        assert option in shown
        assert "".join(str(field.description).split()) in shown


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_the_packages(option: str) -> None:
    assert kvasir(option).stdout == f"kvasir {version('kvasir-lm')}\n"


@pytest.mark.parametrize("command", ["", "serve", "bench", "bench serve"])
def test_help_has_a_short_name(command: str) -> None:
    assert kvasir(*command.split(), "-h").stdout == kvasir(*command.split(), "--help").stdout


@pytest.mark.parametrize("columns", ["80", "130"])
def test_options_of_serve_are_in_groups_with_choices_and_one_default_each(columns: str) -> None:
    shown = kvasir("serve", "-h", **PLAIN | {"COLUMNS": columns}).stdout
    places = [shown.index(panel) for panel in (*_PANELS, "--help") if panel != "--help"]
    assert places == sorted(places)
    assert "<int8|int4|fp32>" in shown
    assert "4MiB" in shown
    options = re.split(r"\s--(?=[a-z])", " ".join(re.sub("[│╭╰─╮╯]", "", shown).split()))
    assert [one for one in options if one.count("Default:") > 1] == []


def test_help_imports_nothing_that_takes_seconds() -> None:
    heavy = {"torch", "onnxruntime", "onnx", "fastapi", "uvicorn", "numpy", "matplotlib", "jinja2"}
    code = "import atexit, sys; from kvasir.__main__ import main; sys.argv[1:] = ['--help']; "
    code += f"atexit.register(lambda: sys.stderr.write(str({heavy} & sys.modules.keys()))); "
    assert run_python("-c", code + "main()").stderr == "set()"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("export", "missing argument 'checkpoint'; see kvasir export --help"),
        ("exprot", "no such command 'exprot'; did you mean 'export'; see kvasir --help"),
        (
            "serve --prot 1",
            "no such option: --prot; did you mean --host, --port; see kvasir serve --help",
        ),
        ("serve x --port abc", "setting port (KVASIR_PORT) = 'abc' must be a whole number"),
        ("export x --out y --top-p nan", "'--top-p': must be at most 1.0"),
        ("generate x y --max-tokens 9.5", "'--max-tokens': must be a whole number"),
        ("explain x y --out a.jpg", "'--out': 'a.jpg' does not end in .png, the only format"),
        ("train x --out y --seed -1", "'--seed': -1 is not from 0 to 2**63 - 1"),
        ("bench engine --device gpu", "'--device': 'gpu' is not one of 'cpu', 'cuda', 'webgpu'"),
    ],
)
def test_a_command_line_that_cannot_be_read_ends_in_one_line(line: str, message: str) -> None:
    if message.startswith("'--"):
        command = " ".join(line.split()[: 1 + line.startswith("bench")])
        message = f"invalid value for {message}; see kvasir {command} --help"
    result = kvasir(*line.split())
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"kvasir: {message}\n")


def test_without_a_model_the_example_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Settings] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVASIR_MODEL", raising=False)
    monkeypatch.setattr("kvasir.server.process.serve.serve", served.append)
    assert kvasir("serve").exit_code == 0
    assert served[0].model_name == "stdlib"
    assert directory.load_model_dir(served[0].models["stdlib"]).tokenizer.get_vocab_size() > 0


def test_bytes_that_are_not_text_are_refused() -> None:
    for command in ("generate", "embed", "explain"):
        result = kvasir(command, EXAMPLE, os.fsdecode(b"\xff"))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert "is not UTF-8 text; see kvasir" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_output_that_cannot_be_written_ends_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        arguments = ["generate", EXAMPLE, "a", "--max-tokens", "2"]
        ended = run_python("-m", "kvasir", *arguments, stdout=full)
    told = "kvasir: standard output: no space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, told)


def test_a_closed_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        assert run_python("-m", "kvasir", "--help", stdout=pipe).stderr == ""


def test_a_package_that_an_image_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvasir.export.evaluation", None)
    result = kvasir("eval", EXAMPLE)
    message = "this needs export/, which is not installed here; run it in a checkout of Kvasir"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"kvasir: {message}\n")


def test_an_explanation_of_an_encoder_decoder_asks_for_its_target() -> None:
    result = kvasir("explain", str(ROOT / "examples/numbers"), "one")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "--target" in result.stderr


def test_a_picture_needs_only_the_package_that_draws() -> None:
    told = output._missing(ModuleNotFoundError("", name="matplotlib.figure"))
    assert told.endswith("install it with: pip install matplotlib")


def test_control_c_ends_without_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def press(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvasir.server.process.engine_builder.load_model_dir", press)
    result = kvasir("generate", EXAMPLE, "x")
    assert (result.exit_code, result.output) == (130, "")


LOADING = """
import signal
from kvasir.commands.console.progress import loading
with loading():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass  # as imports of extensions may do
print("went on")
"""
IMPORTING = """
import signal, sys
class Press:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
import kvasir.__main__
"""


@pytest.mark.parametrize(("code", "exit_code"), [(LOADING, 130), (IMPORTING, -signal.SIGINT)])
def test_control_c_ends_imports_at_once(code: str, exit_code: int) -> None:
    ended = run_python("-c", code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (exit_code, "", "")


@pytest.mark.parametrize("swallows", [True, False])
def test_control_c_is_not_lost_in_libraries(swallows: bool) -> None:
    """PyTorch's tracing swallowed it, and lost an input of a graph; or raised AttributeError."""

    def trace(bar: progress.ProgressBar) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not swallows:
                raise AttributeError from None
        bar("tracing", 1, 2)
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt), progress.ProgressBar() as bar:
        trace(bar)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


HELP_TWICE = """
import os
from kvasir.__main__ import app
app(["--help"], standalone_mode=False)
print("\\0")
os.environ["NO_COLOR"] = "1"
app(["--help"], standalone_mode=False)
"""


def test_colours_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer reads it when it is imported, so its help is asked in a process."""
    forced = {"FORCE_COLOR": "1", "TERM": "xterm", "_TYPER_FORCE_DISABLE_TERMINAL": ""}
    told = run_python("-c", HELP_TWICE, env=os.environ | PLAIN | forced).stdout.split("\0")
    assert ["\x1b[" in text for text in told] == [True, False]
    for name, value in forced.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert console().color_system is not None
    monkeypatch.setenv("NO_COLOR", "1")
    assert console().color_system is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
@pytest.mark.parametrize("quiet", [False, True])
def test_bars_are_for_terminals(
    kind: type[io.StringIO], quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = kind()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "_DELAY", 0)
    monkeypatch.setenv("TERM", "xterm")
    with progress.ProgressBar(quiet=quiet) as bar:
        bar("writing", 1, 1234)
        bar._timer.join()
    shown = screen.isatty() and not quiet
    assert ("writing" in screen.getvalue(), "1/1,234" in screen.getvalue()) == (shown, shown)
    assert bool(screen.getvalue()) == shown


def test_lines_of_a_result_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    show(False, {}, "wrote " + "long name " * 20, "done")
    assert capsys.readouterr().out == "wrote " + "long name " * 20 + "\ndone\n"


@pytest.mark.parametrize("colours", [True, False])
def test_training_shows_its_bar_beside_lines_that_go_into_a_pipe(
    colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    monkeypatch.setenv("COLUMNS", "60")  # lines of a pipe are not broken
    monkeypatch.setattr(progress, "_DELAY", 0)
    losses = {"train_loss": 2.5, "held_out_loss": 3.25, "held_out_accuracy": 0.25}
    more = {"learning_rate": 1e-3, "gradient_norm": 1.0, "seconds": 0.1, "mfu": 0.5}
    metrics = StepMetrics(step=1, tokens=8, **losses, **more)
    with progress.ProgressBar() as bar:
        report.console_report(console(), bar, 2)(metrics, 1e3, ("a" * 90, "[b]\n 12"))
        bar._timer.join()
    figures = "step 1  held-out loss 3.2500, accuracy 25.0%, perplexity 25.8"
    assert pipe.getvalue() == f"{figures}\n    {'a' * 90}[b]\n     12\n"
    assert "loss 2.500" in screen.getvalue()
    assert ("\x1b[1m" in screen.getvalue()) == colours


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("", [*COMMANDS[:-1], "bench"]),
        ("train x --preset smol", ["smollm2-135m"]),
        (
            "bench engine --preset tiny-",
            ["tiny-hybrid", "tiny-encoder", "tiny-seq2seq", "tiny-lstm", "tiny-lstm-attention"],
        ),
        ("export x --device ", ["cpu", "cuda", "webgpu"]),
        ("export x --precision ", ["int8", "int4", "fp32"]),
        ("export x --device cuda --precision ", ["bf16", "fp16", "int8", "int4"]),
        ("serve --drain", ["--drain-timeout"]),
        ("serve ", [""]),  # so that the shell offers paths
    ],
)
def test_the_shell_offers_names(line: str, offered: list[str]) -> None:
    words = f"kvasir {line}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    lines = kvasir(_KVASIR_COMPLETE="complete_bash", **asked).stdout.rstrip("\n").split("\n")
    assert lines == offered

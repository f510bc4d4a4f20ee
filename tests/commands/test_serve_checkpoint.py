"""`kvasir serve CHECKPOINT`: what is taken for one, and that each content is exported once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.commands import pull
from kvasir.model.download import local
from kvasir.model.download.local import find_local
from kvasir.server.errors import StartupError
from kvasir.server.process.engine_builder import check_model
from kvasir.server.settings import Settings, load_settings
from tests.kit.fake_runner import TIMEOUT

# Takes the place of Python: exports, by noting how it was called.
_EXPORTER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
while [ "$1" != --out ]; do shift; done
mkdir -p "$2" && echo '{}' > "$2/manifest.json" && echo made
"""


def write(folder: Path, *names: str, content: bytes = b"{}") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def revision(path: Path) -> str:
    found = find_local(path)
    assert found is not None
    return found.revision


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    write(folder / "llama", "config.json", "tokenizer.json", "model.safetensors")
    write(folder / "run/step-00000001", "config.json", "model.safetensors")
    write(folder / "run/step-00000002.part-x", "config.json", "model.safetensors")
    write(folder, "a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")
    exported = ("config.json", "model.onnx", "manifest.json", "someone's.safetensors")
    write(folder / "exported", *exported)
    write(folder / "empty", "README.md")
    return folder


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the export's process, and serving; returns where its calls are noted."""
    script = write(tmp_path, "python", content=_EXPORTER.encode()) / "python"
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path / "calls"


@pytest.mark.parametrize("name", ["exported", "empty", "absent", "absent.gguf", "run/metrics.csv"])
def test_other_paths_are_served_or_refused_as_they_are(name: str, sources: Path) -> None:
    assert find_local(sources / name) is None
    assert pull.served_directory(sources / name, None, sources / "cache") == sources / name
    assert not (sources / "cache").exists()


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama", "llama/model.safetensors"),
        ("llama", "llama/1_Pooling/config.json"),
        ("run", "run/step-00000001/config.json"),
        ("a.gguf", "a.gguf"),
        ("b-00001-of-00002.gguf", "b-00002-of-00002.gguf"),
    ],
)
def test_a_revision_is_that_of_the_content(
    name: str, changed: str, is_large: bool, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(local, "_WHOLE", 16)
        monkeypatch.setattr(local, "_PIECE", 4)
    file = write(sources, changed, content=bytes(100)) / changed
    before, times = revision(sources / name), file.stat()
    copy = shutil.copytree(sources, sources.parent / "copy")  # keeps times
    assert revision(copy / name) == before
    write(sources / name if (sources / name).is_dir() else sources, "README.md", "x.png")
    assert revision(sources / name) == before
    file.write_bytes(bytes(50) + b"x" + bytes(49))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as some unpackers set it
    assert revision(sources / name) != before
    shutil.copy2(copy / changed, file)
    assert revision(sources / name) == before
    os.utime(file, ns=(0, 0))
    assert revision(sources / name) != before


def test_each_content_and_precision_is_exported_once(
    sources: Path, exporter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("kvasir.server.process.serve.serve", served.append)

    def serve(*arguments: object) -> tuple[str, Path, list[str]]:
        line = ["serve", *map(str, arguments), "--cache-dir", str(sources / "cache")]
        result = CliRunner().invoke(app, line)
        assert (result.exit_code, result.stdout) == (0, "")
        ((name, directory),) = served.pop().models.items()
        assert (directory / "manifest.json").is_file()
        return name, directory, exporter.read_text().splitlines()

    name, first, calls = serve(sources / "llama")
    assert name == "llama"
    assert calls[0].endswith(f"export {sources}/llama --out {first} --precision int8")
    assert serve(f"chat={sources}/llama", "--precision", "int8") == ("chat", first, calls)
    _, fp32, calls = serve(sources / "llama", "--precision", "fp32")
    assert (len(calls), calls[-1].split()[-1]) == (2, "fp32")
    assert fp32 != first
    write(sources / "llama", "model.safetensors", content=b"trained on")
    _, changed, calls = serve(sources / "llama")
    assert (len(calls), changed in (first, fp32)) == (3, False)
    assert [serve(sources / one)[0] for one in ("run", "a.gguf")] == ["run", "a"]


def test_what_is_kept_is_listed_and_removed(
    sources: Path, exporter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir.server.process.serve.serve", lambda _: None)
    cache = sources / "cache"
    write(cache / "oci/host/org/name_v1/0a1b", "config.json", "model.safetensors")
    write(cache / "s3/bucket/name/2c.part", "config.json")  # interrupted

    def kvasir(*arguments: object, exit_code: int = 0) -> Any:
        line = [*map(str, arguments), "--cache-dir", str(cache)]
        result = CliRunner().invoke(app, line)
        assert result.exit_code == exit_code, result.output
        return result.stdout if exit_code == 0 else result.stderr

    kvasir("serve", sources / "run")
    kvasir("serve", sources / "a.gguf", "--precision", "fp32")
    old = next((cache / "models").glob("run-*"))
    (old / "manifest.json").write_text('{"precision": "int8"}')
    os.utime(old, (0, 0))
    models = json.loads(kvasir("list", "--json"))["models"]
    assert [one["name"].partition("-")[0] for one in models[-1:]] == ["run"]
    assert (models[-1]["precision"], models[-1]["bytes"]) == ("int8", 21)
    assert "oci/host/org/name_v1/0a1b" in kvasir("list")
    kvasir("serve", sources / "run")
    assert json.loads(kvasir("list", "--json"))["models"][-1]["name"] != old.name  # used again
    assert len(exporter.read_text().splitlines()) == 2
    assert f"did you mean {old.name!r}?" in kvasir("rm", old.name[:-1], exit_code=1)
    kvasir("rm", old.name, "oci/host/org/name_v1/0a1b")
    assert [
        one["name"].partition("-")[0] for one in json.loads(kvasir("list", "--json"))["models"]
    ] == ["a"]


def test_what_a_killed_export_left_is_removed_and_an_export_that_runs_is_waited_for(
    sources: Path, exporter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of an export outlives its server, and holds the lock."""
    line = sources / "llama", None, sources / "cache"
    directory = Path(str(pull.served_directory(*line)).partition("=")[2])
    shutil.rmtree(directory)
    part = write(directory.with_name(f"{directory.name}.part-x"), f"{directory.name}/model.onnx")
    waits, flock = threading.Event(), fcntl.flock

    def waiting(file: Any, how: int) -> None:
        if not how & fcntl.LOCK_NB:
            waits.set()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", waiting)
    with (
        directory.with_name(f".{directory.name}.lock").open("w") as lock,
        ThreadPoolExecutor() as threads,
    ):
        flock(lock, fcntl.LOCK_EX)
        held: dict[str, Any] = {"stdin": subprocess.PIPE, "pass_fds": [lock.fileno()]}
        with subprocess.Popen(["/bin/cat"], **held) as orphan:
            lock.close()
            serving = threads.submit(pull.served_directory, *line)
            assert waits.wait(TIMEOUT)
            write(directory, "manifest.json")
            assert (part.exists(), serving.done()) == (True, False)
            orphan.communicate()
        assert serving.result() == Path(f"llama={directory}")
    assert len(exporter.read_text().splitlines()) == 1
    shutil.rmtree(directory)
    pull.served_directory(*line)
    assert not part.exists()
    assert len(exporter.read_text().splitlines()) == 2


def test_a_failed_export_ends_the_command(
    sources: Path, exporter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(sys.executable).write_text("#!/bin/sh\necho wrong >&2; exit 3\n")
    assert CliRunner().invoke(app, ["serve", str(sources / "run")]).exit_code == 3
    assert not exporter.exists()
    monkeypatch.setattr(pull, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["serve", str(sources / "run")])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "[train]'" in result.stderr


def test_a_directory_in_another_precision_is_refused() -> None:
    example = Path(__file__).parents[2] / "examples/stdlib"
    assert check_model(load_settings(model=example, precision="int8")).path == example
    with pytest.raises(StartupError, match="is in int8, not fp32"):
        check_model(load_settings(model=example, precision="fp32"))

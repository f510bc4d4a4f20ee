"""`kvasir batch`: the answers are those of a server's batches, however often it is interrupted."""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.model.directory import load_model_dir
from kvasir.server.api.openai.batches import Answers
from kvasir.server.batches.journal import Reply
from kvasir.server.process import offline
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import build_engine
from kvasir.server.settings import load_settings
from tests.kit.commands import kvasir
from tests.kit.serving import running

STDLIB = Path(__file__).parents[2] / "examples/stdlib"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
_DRAWN = rb'"((?:request_)?id)":"[^"]*"|"(created)":\d+'  # anew for each answer


def line(number: int, url: str = TEXT, **body: Any) -> bytes:
    if url == TEXT:
        prompt = f"def f{number}(" * (1 + number % 5)
        body |= {"prompt": prompt, "max_tokens": 12, "seed": number}
    request = {"custom_id": f"é{number}", "method": "POST", "url": url, "body": body}
    return json.dumps(request).encode() + b"\n"


LINES = [line(i, logprobs=2 if i % 9 == 0 else None) for i in range(90)]
LINES[7], LINES[30], LINES[31] = line(7, temperature=-1), line(30, CHAT), line(31, CHAT)


def by_id(lines: Iterable[bytes]) -> dict[str, bytes]:
    """Return answers by custom id, without what is drawn anew; each is there once."""
    lines = list(lines)
    found = {json.loads(one)["custom_id"]: re.sub(_DRAWN, rb'"\1\2":0', one) for one in lines}
    assert len(found) == len(lines)
    return found


def files(out: Path) -> list[Path]:
    return [out, out.with_name(f"{out.stem}.errors.jsonl")]


def written(out: Path) -> list[dict[str, bytes]]:
    """Return the answers and the failures."""
    return [by_id(path.read_bytes().splitlines(keepends=True)) for path in files(out)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The answers and the failures of a server's batches, one of each path."""
    folder = tmp_path_factory.mktemp("batches")
    return asyncio.run(answered_by_server(folder))


async def answered_by_server(folder: Path) -> list[dict[str, bytes]]:
    settings = load_settings(model=[STDLIB], batch_dir=folder)
    model_dir = load_model_dir(STDLIB)
    application = create_app(settings, model_dir, build_engine(settings, model_dir))
    found: list[dict[str, bytes]] = [{}, {}]
    async with running(application) as client:
        for url in (TEXT, CHAT):
            content = b"".join(one for one in LINES if json.loads(one)["url"] == url)
            form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", content)}}
            file = (await client.post("/v1/files", **form)).json()  # type: ignore[arg-type]
            asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
            batch = (await client.post("/v1/batches", json=asked)).json()
            await application.state.batches.tasks[batch["id"]]
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
            for i, file_id in enumerate((batch["output_file_id"], batch["error_file_id"])):
                if file_id is not None:
                    content = (await client.get(f"/v1/files/{file_id}/content")).content
                    found[i] |= by_id(content.splitlines(keepends=True))
    return found


def test_answers_have_the_bytes_of_a_servers(
    served: list[dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose keys, routers and folder of batches, set in the environment, are left alone."""
    monkeypatch.setenv("KVASIR_API_KEY", "a key")
    monkeypatch.setenv("KVASIR_KV_EVENTS", "tcp://*:5557")  # which one process alone could have
    monkeypatch.setenv("KVASIR_BATCH_DIR", str(tmp_path / "batches"))
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(b"".join(LINES))
    assert "3 of 90 requests failed" in kvasir(
        "batch", asked, out, STDLIB, "--engines", 2, fails=True
    )
    assert written(out) == served
    assert len(served[1]) == 3
    assert {path.name for path in tmp_path.iterdir()} == {asked.name, out.name, "out.errors.jsonl"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_run_goes_on(
    number: signal.Signals, code: int, served: list[dict[str, bytes]], tmp_path: Path
) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(b"".join(LINES))
    command: list[str | Path] = [sys.executable, "-m", "kvasir", "batch", asked, out, STDLIB]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "answering" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
    assert process.returncode == code
    first, failed = (path.read_bytes() for path in files(out))
    assert 0 < (first + failed).count(b"\n") < len(LINES)
    cut_off = next(iter(served[0].values()))[:-9]
    out.write_bytes(first + (cut_off if first.endswith(b"\n") else b""))
    kvasir("batch", asked, out, STDLIB, fails=True)
    assert written(out) == served
    assert out.read_bytes().startswith(first[: first.rfind(b"\n") + 1])
    whole = [path.read_bytes() for path in files(out)]
    kvasir("batch", asked, out, STDLIB, fails=True)  # nothing is left to do
    assert [path.read_bytes() for path in files(out)] == whole


def test_pipes(served: list[dict[str, bytes]]) -> None:
    lines = b"".join(LINES[:12])
    result = CliRunner().invoke(app, ["batch", "-", "-", str(STDLIB)], input=lines)
    assert result.exit_code == 1
    found = by_id(result.stdout_bytes.splitlines(keepends=True))
    every = served[0] | served[1]
    assert found == {custom_id: every[custom_id] for custom_id in found}
    assert len(found) == 12


def test_lines_that_are_no_requests_are_named_before_anything_runs(tmp_path: Path) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(LINES[0] + b"{\n" + LINES[1] + LINES[0] + line(3, "/v1/models"))
    error = kvasir("batch", asked, out, "no-model", fails=True)
    assert [int(number) for number in re.findall(r"line (\d+): ", error)] == [2, 4, 5]
    assert list(tmp_path.iterdir()) == [asked]


@pytest.mark.parametrize(
    "content",
    [b"a text", b"".join(LINES), b'{"custom_id":"b","response":null,"error":null}\n', b"{}\n"],
)
def test_a_file_of_anything_else_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(b"".join(LINES))
    out.write_bytes(content)
    assert "line 1 of" in kvasir("batch", asked, out, STDLIB, fails=True)
    assert out.read_bytes() == content


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(b"".join(LINES))
    with out.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process" in kvasir("batch", asked, out, STDLIB, fails=True)


def test_an_engine_that_ends_is_an_error_and_its_answers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes two requests at once, answers one, and begins to answer the other."""
    asked, out, engine = tmp_path / "asked.jsonl", tmp_path / "out.jsonl", tmp_path / "engine"
    asked.write_bytes(b"".join(LINES))
    answer = json.dumps([json.loads(LINES[0])["custom_id"], 200, "a", "{}"])
    code = (
        f"import sys; print(2); input(); print('''{answer}\\n[1''', end=''); sys.exit('no memory')"
    )
    engine.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    engine.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(engine))
    assert "an engine ended: no memory;" in kvasir("batch", asked, out, STDLIB, fails=True)
    assert list(by_id(out.read_bytes().splitlines())) == ["é0"]


def test_a_model_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    asked, out, model = tmp_path / "asked.jsonl", tmp_path / "out.jsonl", tmp_path / "none"
    asked.write_bytes(LINES[0])
    assert f"{model}" in kvasir("batch", asked, out, model, fails=True)
    assert not any(path.read_bytes() for path in files(out))


def test_without_ray_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make ray-smoke` tests the command with it."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    asked = tmp_path / "asked.jsonl"
    asked.write_bytes(LINES[0])
    error = kvasir("batch", asked, tmp_path / "out", STDLIB, "--ray", "local", fails=True)
    assert "this needs pyarrow; install it with: pip install" in error
    assert "[ray]" in error


async def test_a_line_that_is_refused_for_load_is_tried_again() -> None:
    tried: list[Reply | float] = [0.0, 0.0, Reply(200, "an-id", b'{"a": "\xc3\xa9"}', None)]

    class Busy(Answers):
        def __init__(self) -> None: ...

        async def __call__(self, *_: object) -> Reply | float:
            return tried.pop(0)

    models = Mock(states={"a": "ready"})
    answer = await offline._answer(Busy(), models, b'["x", "/v1/completions", "{}"]')
    assert json.loads(answer) == ["x", 200, "an-id", '{"a": "é"}']

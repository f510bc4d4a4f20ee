"""Replay a newcomer's first hour outside the clone, and print what was typed, seen and waited for.

python -m tests.deploy.newcomer works in build/package and in a folder that it deletes. It installs
the wheel into an empty environment, serves, trains, exports, and serves what there is: a run, a
checkpoint folder, a GGUF file, an encoder; a client generated from /openapi.json asks last. Needs a
package index, and curl. Exit code 1 at the first thing that does not work.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from kvasir.server.process.local_server import run_server
from tests.deploy.package_check import BUILD, ROOT, environment, run
from tests.kit.gguf_files import write_gguf
from tests.kit.huggingface_checkpoints import make_model
from tests.kit.serving import CHAT_TEMPLATE

_SHOWN_LINES, _SHOWN_CHARS = 6, 240
_SMALL = ("--context", "64", "--batch-size", "8", "--steps")
_CLIENT = "openapi-python-client==0.29.1"
_USE = """import sys
from kvasir_client import Client
from kvasir_client.api.default import get_v1_models
print(get_v1_models.sync(client=Client(base_url=sys.argv[1])).data[0].id)"""


class Hour:
    """Commands of an environment, run in a folder that is also their home, and their times."""

    def __init__(self, commands: Path, folder: Path, began: float) -> None:
        self.folder, self._began = folder, began
        path = f"{commands}:{os.environ['PATH']}"
        home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PATH": path}
        self._environment = os.environ | home

    def type(self, *command: str) -> str:
        """Run a command as typed, and return what it prints on standard output."""
        began = monotonic()
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False,
            cwd=self.folder, env=self._environment,
        )  # fmt: skip
        self.tell(shlex.join(command), f"{ran.stderr}\n{ran.stdout}", monotonic() - began)
        if ran.returncode:
            raise subprocess.CalledProcessError(ran.returncode, command, ran.stdout, ran.stderr)
        return ran.stdout

    def tell(self, command: str, printed: str, seconds: float) -> None:
        """Print a command with its last lines."""
        minutes, rest = divmod(monotonic() - self._began, 60)
        print(f"\n[{minutes:.0f}:{rest:04.1f}] $ {command}", flush=True)  # noqa: T201
        for line in [line for line in printed.splitlines() if line.strip()][-_SHOWN_LINES:]:
            print(f"    {line[:_SHOWN_CHARS]}")  # noqa: T201
        print(f"    ({seconds:.1f} s)", flush=True)  # noqa: T201

    @contextmanager
    def serve(self, *models: str) -> Iterator[str]:
        """Serve models, and yield the URL once they are ready."""
        began, command = monotonic(), ["kvasir", "serve", *models]
        given = [f"{name}={value}" for name, value in self._environment.items()]
        inside = ["env", "-C", str(self.folder), *given, *command, "--host", "127.0.0.1"]
        with run_server([*inside, "--port", "0"]) as ready:
            about = f"{ready['model']} is ready, kernels {ready['kernels']}"
            self.tell(shlex.join(command), about, monotonic() - began)
            yield f"http://127.0.0.1:{ready['port']}"

    def ask(self, url: str, body: dict[str, Any], *options: str) -> Any:
        """Return the JSON of an answer, which curl gets."""
        curl = ("curl", "-sS", "--fail-with-body", *options, url, "-d", json.dumps(body))
        return json.loads(self.type(*curl))


def main() -> None:
    """Print the transcript."""
    dist = BUILD / "newcomer"
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", dist, ROOT)
    wheel = max(dist.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), monotonic()
        commands = environment("newcomer-environment", f"{wheel}[cpu,train]")
        hour = Hour(commands, folder, began)
        hour.tell(f"pip install '{wheel.name}[cpu,train]'", "", monotonic() - began)
        _first_minutes(hour)
        _train_and_export(hour)
        _serve_what_there_is(hour)
        _embed_and_rank(hour)
        _generate_a_client(hour)
        hour.type("kvasir", "list")


def _first_minutes(hour: Hour) -> None:
    hour.type("kvasir", "-V")
    hour.type("kvasir", "doctor")
    brief = {"prompt": "def ", "temperature": 0}
    with hour.serve() as url:
        text = hour.ask(f"{url}/v1/completions", brief | {"max_tokens": 8})["choices"][0]["text"]
        options = {"options": {"num_predict": 8, "temperature": 0}, "stream": False}
        asked = {"model": "stdlib", "prompt": "def ", "raw": True, **options}
        assert hour.ask(f"{url}/api/generate", asked)["response"] == text


def _train_and_export(hour: Hour) -> None:
    chats = [
        [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}."}]
        for n in range(3000)
    ]
    lines = "\n".join(json.dumps({"messages": chat}) for chat in chats)
    (hour.folder / "chats.jsonl").write_text(lines, encoding="utf-8")
    (hour.folder / "chat.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    templated = ("--chat-template", "chat.jinja", "--set", "n_layer=2", "--set", "d_model=64")
    hour.type("kvasir", "train", "chats.jsonl", "--out", "run", *templated, *_SMALL, "40")
    hour.type("kvasir", "export", "run", "--out", "model")
    hour.type("kvasir", "generate", "model", "1 + 1?", "--max-tokens", "4")


def _serve_what_there_is(hour: Hour) -> None:
    """Serve the exported directory, the run's folder twice, and a GGUF file."""
    write_gguf(hour.folder / "small.gguf", make_model("llama"))
    texts = {}
    for model in ("model", "run", "run", "small.gguf"):
        with hour.serve(model) as url:
            body = {"messages": [{"role": "user", "content": "1 + 1?"}], "max_tokens": 4}
            answer = hour.ask(f"{url}/v1/chat/completions", body | {"temperature": 0})
            texts[model] = answer["choices"][0]["message"]["content"]
    assert texts["model"] == texts["run"]


def _embed_and_rank(hour: Hour) -> None:
    pairs = [{"query": f"{n} + 1?", "document": f"It is {n + 1}."} for n in range(2000)]
    lines = "\n".join(map(json.dumps, pairs))
    (hour.folder / "pairs.jsonl").write_text(lines, encoding="utf-8")
    shape = ("--preset", "tiny-encoder", *_SMALL, "20")
    hour.type("kvasir", "train", "pairs.jsonl", "--out", "encoder", *shape)
    with hour.serve("encoder") as url:
        (vector,) = hour.ask(f"{url}/v1/embeddings", {"input": "1 + 1?"})["data"]
        ranked = {"query": "1 + 1?", "documents": ["It is 2.", "It is 12."]}
        results = hour.ask(f"{url}/v1/rerank", ranked, "-D", "headers.txt")["results"]
        said = (hour.folder / "headers.txt").read_text(encoding="utf-8")
    assert vector["embedding"]
    assert len(results) == 2
    assert "x-kvasir-scores: cosine" in said


def _generate_a_client(hour: Hour) -> None:
    venv.create(BUILD / "newcomer-client", clear=True, with_pip=True)
    client = BUILD / "newcomer-client/bin"  # it needs other versions than constraints.txt has
    run(client / "pip", "install", "--quiet", "--disable-pip-version-check", _CLIENT)
    (hour.folder / "client.yaml").write_text("literal_enums: true\n", encoding="utf-8")
    with hour.serve() as url:
        document = hour.type("curl", "-sS", f"{url}/openapi.json")
        (hour.folder / "openapi.json").write_text(document, encoding="utf-8")
        generate = [f"{client}/openapi-python-client", "generate", "--meta", "none"]
        named = ["--path", "openapi.json", "--output-path", "kvasir_client"]
        hour.type(*generate, *named, "--config", "client.yaml")
        assert hour.type(f"{client}/python", "-c", _USE, url).strip() == "stdlib"


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stdout}{error.stderr}")

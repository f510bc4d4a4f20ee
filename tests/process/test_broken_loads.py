"""Loads that a kill or a client's disconnect breaks off, in servers of a real model."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvasir.model.adapters.config import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE
from kvasir.model.adapters.layout import Layout
from kvasir.model.adapters.peft import TENSOR
from kvasir.model.directory import ADAPTERS_FILE
from tests.kit.fake_runner import TIMEOUT
from tests.process.test_serve import Process, process

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"
# In the middle of each load: the file of an adapter is read, the session of a model is open.
HELD = {
    "adapter": "kvasir.server.engine.adapters.loaded:read_adapter",
    "model": "kvasir.server.process.engine_builder:warm_up",
}
LOADED = {"adapter": "adapter loaded", "model": "ready"}  # lines of the log


def save_adapter(folder: Path, seed: int) -> None:
    """Save an adapter of one layer of the example."""
    module, sizes = next(iter(Layout.load(EXAMPLE / ADAPTERS_FILE).sizes.items()))
    shapes, draw = {"A": (4, sizes[1]), "B": (sizes[0], 4)}, np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tensors = {
        TENSOR.format(module, part): draw.standard_normal(shape).astype(np.float32)
        for part, shape in shapes.items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS_FILE)
    (folder / ADAPTER_FILE).write_text(json.dumps({"r": 4, "lora_alpha": 4}))


class Server:
    """A server process with one thing to load after another: adapters, or models of a folder."""

    def __init__(self, kind: str, started: Process) -> None:
        self.kind, self.started = kind, started
        self.port = started.log_until("listening")["port"]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=TIMEOUT)
        if kind == "adapter":
            started.log_until("ready")

    def load(self, name: str) -> socket.socket:
        """Ask for a load by a large body, whose work ends with its client."""
        path, body = "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name}
        if self.kind == "model":
            path, body = "/v1/completions", {"model": name, "prompt": "def"}
        content = json.dumps(body).encode() + b" " * 5000
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer admin\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), TIMEOUT)
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def wait_until_held(self) -> None:
        assert self.started.popen.stdout.readline() == "held\n"

    def complete(self, name: str) -> str:
        body = {"model": name, "prompt": "def", "max_tokens": 6, "temperature": 0.0}
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def states(self) -> dict[str, str]:
        listed = self.client.get("/v1/models").json()["data"]
        return {one["id"]: one["state"] for one in listed if one["id"] != "base"}


@contextmanager
def serving(kind: str, folder: Path, **options: Any) -> Iterator[Server]:
    known: dict[str, Any] = {"models_dir": str(folder)}
    if kind == "adapter":
        known = {"model": f"base={EXAMPLE}", "adapter_dir": str(folder)}
        known |= {"adapter_admin_key": "admin"}
    known |= {"loading": "real", "threads": 1, "kv_cache_memory": 2**24, "prefix_cache_memory": 0}
    with process(known | options) as started:
        server = Server(kind, started)
        yield server
        server.client.close()


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the bytes of each file, and when it was changed last."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


@pytest.mark.parametrize("kind", LOADED)
def test_a_load_outlives_its_client_and_a_kill_leaves_no_trace(kind: str, tmp_path: Path) -> None:
    folder, names = tmp_path / "served", ["first", "second"]
    for seed, name in enumerate(names):
        if kind == "adapter":
            save_adapter(folder / name, seed)
        else:
            shutil.copytree(EXAMPLE, folder / name)
    before = content(tmp_path), content(EXAMPLE)
    with serving(kind, folder, held=HELD[kind]) as server:
        with server.load("first"):
            server.wait_until_held()
        assert server.started.log_until("request")["status"] == 499  # its client has gone
        server.started.tell_runner("")
        server.started.log_until(LOADED[kind])
        assert server.states()["first"] == "ready"
        text = server.complete("first")
        with server.load("second"):
            server.wait_until_held()
            server.started.popen.kill()
            server.started.popen.wait(TIMEOUT)
    assert (content(tmp_path), content(EXAMPLE)) == before
    with serving(kind, folder) as server:
        assert server.states() == dict.fromkeys(names, "unloaded")
        for name in names:
            with server.load(name) as connection:
                assert b" 200 " in connection.recv(64)
        assert server.states() == dict.fromkeys(names, "ready")
        assert server.complete("first") == text
    assert (content(tmp_path), content(EXAMPLE)) == before

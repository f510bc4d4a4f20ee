"""Run all clients against small real models: `make conformance`.

The argument is the folder of the environments that hold the clients. Prints a line for each client.
Exit code 1 if one of them fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer import echo

from kvasir.server.process.local_server import serve_locally
from tests.conformance.anthropic_client import use_anthropic
from tests.conformance.heavy import Tools, use_aiperf, use_guidellm, use_lm_eval, use_node
from tests.conformance.huggingface_client import use_huggingface
from tests.conformance.model import MAX_MODEL_LEN, make_model, make_tokenizer
from tests.conformance.openai_batches import use_openai_batches
from tests.conformance.openai_client import use_openai
from tests.conformance.server import CAPACITY, Conformed, Server
from tests.kit.fake_encoder import encoder_app, encoder_model_dir
from tests.kit.live import live_app

_KEY = "a-key"
_NODE = {
    "@anthropic-ai/sdk": "anthropic.cjs",
    "openai": "openai.cjs",
    "@ai-sdk/openai": "openai.cjs",
}


def main(build: Path) -> int:
    encoders, chats = build / "encoder-clients", build / "chat-clients"
    with TemporaryDirectory() as folder:
        model, tokenizer = Path(folder) / "random-model", Path(folder) / "tokenizer"
        make_model(model)
        make_tokenizer(model, tokenizer)
        limits = ("--max-num-seqs", str(CAPACITY), "--max-queue", str(CAPACITY))
        passed = _try("schemathesis", use_schemathesis)
        passed &= _try("embedding clients", lambda: use_embedding_clients(encoders))
        options = (*limits, "--api-key", _KEY, "--batch-dir", str(Path(folder) / "batches"))
        with serve_locally(model, *options) as url:
            server = Server(url, model.name, _KEY, MAX_MODEL_LEN)
            passed &= _try("openai", lambda: use_openai(server))
            passed &= _try("openai batches", lambda: use_openai_batches(server))
            passed &= _try("anthropic", lambda: use_anthropic(server))
            passed &= _try("huggingface_hub", lambda: use_huggingface(server))
            for client in ("openai-agents", "pydantic-ai-slim"):
                passed &= _try(client, partial(use_agents, build / "agent-clients", server, client))
            for client, folder_of in (
                ("litellm", chats),
                ("instructor", chats),
                ("langchain-openai", encoders),
                ("ollama", encoders),
                ("langchain-anthropic", build / "claude-clients"),
            ):
                passed &= _try(client, partial(use_chats, folder_of, server, client))
        with serve_locally(model, *limits) as url:  # lm_eval's local-completions sends no key
            server = Server(url, model.name, "", MAX_MODEL_LEN)
            tools = Tools(build / "conformance", Path(folder), server, tokenizer)
            passed &= _try("lm_eval", lambda: use_lm_eval(tools, model))
            for package, script in _NODE.items():
                passed &= _try(package, partial(use_node, tools, script, package))
            passed &= _try("guidellm", lambda: use_guidellm(tools))
            loading = replace(tools, environment=build / "aiperf")
            passed &= _try("aiperf", lambda: use_aiperf(loading))
    return int(not passed)


def use_schemathesis() -> Conformed:
    """Run its tests over the OpenAPI document. They need a fake model that obeys every request."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/api/test_openapi.py"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    note = "tests, each of many calls"
    return Conformed("schemathesis", version("schemathesis"), int(passed[1]), note)


def use_agents(environment: Path, server: Server, client: str) -> Conformed:
    """Run agents of a package, which speaks Responses by default."""
    printed = _run(environment, "agent_clients.py", server.openai_url, server.model, _KEY, client)
    return Conformed(client, _versions(environment)[client], int(printed))


def use_chats(environment: Path, server: Server, client: str) -> Conformed:
    """Run a package that speaks to several APIs."""
    printed = _run(environment, "chat_clients.py", server.url, server.model, _KEY, client)
    return Conformed(client, _versions(environment)[client], int(printed))


def use_embedding_clients(environment: Path) -> Conformed:
    """Compare what clients get with what fake encoders make."""
    texts = ("def", "read json", "x" * 40)
    vectors, reranker = (
        encoder_app(encoder_model_dir()),
        encoder_app(encoder_model_dir(("relevant",))),
    )
    with live_app(vectors[0]) as one, live_app(reranker[0]) as other:
        arguments = (one.url, other.url, "fake-encoder", _KEY, *texts)
        found = json.loads(_run(environment, "embedding_clients.py", *arguments))
        with one.http() as client:
            data = client.post("/v1/embeddings", json={"input": texts}).json()["data"]
        with other.http() as client:
            body: dict[str, Any] = {"query": texts[0], "documents": texts, "top_n": 2}
            results = client.post("/v2/rerank", json=body).json()["results"]
    for got in found["vectors"].values():
        assert got == [vector["embedding"] for vector in data]
    for got in found["ranks"].values():
        assert got == [[rank["index"], rank["relevance_score"]] for rank in results]
    versions = _versions(environment)
    names = ("langchain-openai", "llama-index-embeddings-openai", "cohere", "ollama")
    note = ", ".join(f"{name} {versions[name]}" for name in names)
    return Conformed("encoders", "", len(found["vectors"]) * 2 + len(found["ranks"]), note)


def _run(environment: Path, script: str, *arguments: str) -> str:
    """Return what a script of this folder prints, run in an environment of its own."""
    command = [str(environment / "bin/python"), str(Path(__file__).with_name(script)), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def _versions(environment: Path) -> dict[str, str]:
    listed = [str(environment / "bin/pip"), "list", "--format=json"]
    installed = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    return {one["name"]: one["version"] for one in json.loads(installed)}


def _try(name: str, use: Callable[[], Conformed]) -> bool:
    try:
        found = use()
    except Exception as error:
        echo(f"{name:16} failed: {type(error).__name__}: {error}")
        return False
    echo(f"{found.client:16} {found.version:10} {found.calls:4} calls, passed  {found.note}")
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

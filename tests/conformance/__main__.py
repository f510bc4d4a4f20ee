"""Run all clients against small real models: python -m tests.conformance ENVIRONMENT ENCODERS

ENVIRONMENT holds lm_eval, guidellm and the packages of Node, ENCODERS the clients of vectors and
ranks. Prints a line for each client. Exit code 1 if one of them fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer import echo

from loadtest.local_server import serve_locally
from tests.conformance.anthropic_client import use_anthropic
from tests.conformance.heavy import Tools, use_anthropic_node, use_guidellm, use_lm_eval
from tests.conformance.huggingface_client import use_huggingface
from tests.conformance.model import MAX_MODEL_LEN, make_model, make_tokenizer
from tests.conformance.openai_batches import use_openai_batches
from tests.conformance.openai_client import use_openai
from tests.conformance.server import CAPACITY, Conformed, Server
from tests.fake_encoder import encoder_app, encoder_bundle
from tests.live import live_app

_KEY = "a-key"


def main(environment: Path, encoders: Path) -> int:
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
        with serve_locally(model, *limits) as url:  # lm_eval's local-completions sends no key
            server = Server(url, model.name, "", MAX_MODEL_LEN)
            tools = Tools(environment, Path(folder), server, tokenizer)
            passed &= _try("lm_eval", lambda: use_lm_eval(tools, model))
            passed &= _try("anthropic (Node)", lambda: use_anthropic_node(tools))
            passed &= _try("guidellm", lambda: use_guidellm(tools))
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


def use_embedding_clients(environment: Path) -> Conformed:
    """Compare what clients get with what fake encoders make."""
    texts = ("def", "read json", "x" * 40)
    vectors, reranker = encoder_app(encoder_bundle()), encoder_app(encoder_bundle(("relevant",)))
    with live_app(vectors[0]) as one, live_app(reranker[0]) as other:
        script = str(Path(__file__).with_name("embedding_clients.py"))
        command = [str(environment / "bin/python"), script, one.url, other.url]
        ran = subprocess.run(
            [*command, "fake-encoder", _KEY, *texts], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        with one.http() as client:
            data = client.post("/v1/embeddings", json={"input": texts}).json()["data"]
        with other.http() as client:
            body: dict[str, Any] = {"query": texts[0], "documents": texts, "top_n": 2}
            results = client.post("/v2/rerank", json=body).json()["results"]
    found = json.loads(ran.stdout)
    for got in found["vectors"].values():
        assert got == [vector["embedding"] for vector in data]
    for got in found["ranks"].values():
        assert got == [[rank["index"], rank["relevance_score"]] for rank in results]
    listed = [str(environment / "bin/pip"), "list", "--format=json"]
    installed = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    versions = {one["name"]: one["version"] for one in json.loads(installed)}
    names = ("langchain-openai", "llama-index-embeddings-openai", "cohere")
    note = ", ".join(f"{name} {versions[name]}" for name in names)
    return Conformed("encoders", "", len(found["vectors"]) * 2 + len(found["ranks"]), note)


def _try(name: str, use: Callable[[], Conformed]) -> bool:
    try:
        found = use()
    except Exception as error:
        echo(f"{name:16} failed: {type(error).__name__}: {error}")
        return False
    echo(f"{found.client:16} {found.version:10} {found.calls:4} calls, passed  {found.note}")
    return True


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))

"""Run all clients against a small real model: python -m tests.conformance ENVIRONMENT

ENVIRONMENT holds lm_eval, guidellm and the packages of Node. Prints a line for each client. Exit
code 1 if one of them fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from typer import echo

from loadtest.local_server import serve_locally
from tests.conformance.anthropic_client import use_anthropic
from tests.conformance.heavy import Tools, use_anthropic_node, use_guidellm, use_lm_eval
from tests.conformance.huggingface_client import use_huggingface
from tests.conformance.model import MAX_MODEL_LEN, make_model, make_tokenizer
from tests.conformance.openai_batches import use_openai_batches
from tests.conformance.openai_client import use_openai
from tests.conformance.server import CAPACITY, Conformed, Server

_KEY = "a-key"


def main(environment: Path) -> int:
    with TemporaryDirectory() as folder:
        model, tokenizer = Path(folder) / "random-model", Path(folder) / "tokenizer"
        make_model(model)
        make_tokenizer(model, tokenizer)
        limits = ("--max-num-seqs", str(CAPACITY), "--max-queue", str(CAPACITY))
        passed = _try("schemathesis", use_schemathesis)
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

"""All clients against a small real model: python -m tests.conformance ENVIRONMENT, which holds lm_eval and guidellm.

A line for each; the exit code is 1 if one of them finds something else than it expects.
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
from tests.conformance.heavy import Tools, use_guidellm, use_lm_eval
from tests.conformance.huggingface_client import use_huggingface
from tests.conformance.model import MAX_MODEL_LEN, make_model, make_tokenizer
from tests.conformance.openai_client import use_openai
from tests.conformance.target import CAPACITY, Conformed, Target

_KEY = "a-key"


def main(environment: Path) -> int:
    with TemporaryDirectory() as folder:
        model, tokenizer = Path(folder) / "random-model", Path(folder) / "tokenizer"
        make_model(model)
        make_tokenizer(model, tokenizer)
        limits = ("--max-num-seqs", str(CAPACITY), "--max-queue", str(CAPACITY))
        passed = _try("schemathesis", use_schemathesis)
        with serve_locally(model, *limits, "--api-key", _KEY) as url:
            target = Target(url, model.name, _KEY, MAX_MODEL_LEN)
            passed &= _try("openai", lambda: use_openai(target))
            passed &= _try("huggingface_hub", lambda: use_huggingface(target))
        with serve_locally(
            model, *limits
        ) as url:  # without a key: lm_eval's local-completions has none to send
            tools = Tools(
                environment, Path(folder), Target(url, model.name, "", MAX_MODEL_LEN), tokenizer
            )
            passed &= _try("lm_eval", lambda: use_lm_eval(tools, model))
            passed &= _try("guidellm", lambda: use_guidellm(tools))
    return int(not passed)


def use_schemathesis() -> Conformed:
    """Its tests over the OpenAPI document, which need a fake model that does whatever is asked."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/api/test_openapi.py"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    return Conformed(
        "schemathesis", version("schemathesis"), int(passed[1]), "tests, each of many calls"
    )


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

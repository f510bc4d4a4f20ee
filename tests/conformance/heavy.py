"""Tools in an environment of their own: lm_eval, checked against PyTorch, guidellm, and Node's."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from kvasir.export.graphs.decoder import load_weights
from kvasir.model.directory import load_model_dir
from kvasir.model.network.skeleton import build_decoder
from kvasir.model.network.transformer import Transformer
from tests.conformance.server import CAPACITY, Conformed, Server

LM_EVAL_ERROR = 1e-3  # of a log-likelihood; both sides use fp32

_TASKS = Path(__file__).parent / "lm_eval_tasks"
_REQUESTS = 40


@dataclass(frozen=True, slots=True)
class Tools:
    """Programs of an environment, which may write to `folder` and run offline."""

    environment: Path
    folder: Path
    server: Server
    tokenizer: Path

    def run_program(self, program: str, *arguments: str, offline: bool = True) -> None:
        """Run a program. Raises AssertionError with the end of its output if it fails.

        offline: tell Hugging Face's packages so; aiperf would then look for a local tokenizer in
        their cache.
        """
        told = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if offline else {}
        environment = os.environ | told | {"HF_HOME": str(self.folder / "huggingface")}
        command = [str(self.environment / "bin" / program), *arguments]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{program}: {(ran.stdout + ran.stderr)[-2000:]}"

    def version(self, package: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        command = [str(self.environment / "bin/python"), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def use_lm_eval(tools: Tools, model: Path) -> Conformed:
    """Run tasks of local files: choices, whole documents, continuations."""
    out = tools.folder / "lm_eval"
    arguments = {
        "model": tools.server.model,
        "base_url": f"{tools.server.openai_url}/completions",
        "tokenizer": tools.tokenizer,
        "tokenizer_backend": "huggingface",
        "max_length": tools.server.max_model_len,
        "num_concurrent": CAPACITY,
        "max_retries": 1,
    }
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    tasks = "kvasir_choices,kvasir_documents,kvasir_continuations"
    tools.run_program("lm_eval", "run", "--model", "local-completions", "--model_args", given,
              "--tasks", tasks, "--include_path", str(_TASKS), "--log_samples",
              "--output_path", str(out))  # fmt: skip
    oracle = _Oracle(model)
    choices = list(_samples(out, "kvasir_choices"))
    worst, n_continuations = 0.0, 0
    for sample in choices:
        for (response,), asked in zip(sample["resps"], sample["arguments"].values(), strict=True):
            expected, is_greedy = oracle.continuation(asked["arg_0"], asked["arg_1"])
            assert response[1] == str(is_greedy), f"{asked}: greedy is {is_greedy} in PyTorch"
            worst = max(worst, abs(float(response[0]) - expected))
            n_continuations += 1
    documents = list(_samples(out, "kvasir_documents"))
    for sample in documents:
        expected = oracle.document(sample["arguments"]["gen_args_0"]["arg_0"])
        worst = max(worst, abs(float(sample["resps"][0][0]) - expected))
    continued = list(_samples(out, "kvasir_continuations"))
    assert all(sample["resps"][0][0] for sample in continued)
    assert worst <= LM_EVAL_ERROR, f"a log-likelihood is off by {worst:g}"
    calls = n_continuations + len(documents) + len(continued)
    note = f"log-likelihoods within {worst:.0e} of PyTorch's"
    return Conformed("lm_eval", tools.version("lm_eval"), calls, note)


def use_guidellm(tools: Tools) -> Conformed:
    """Stream simultaneous completions, each of exactly the requested number of tokens."""
    out = tools.folder / "guidellm.json"
    backend = f"target={tools.server.url},model={tools.server.model},request_format=/v1/completions"
    tools.run_program("guidellm", "run", "--disable-console",
              "--backend", f"kind=openai_http,{backend}",
              "--profile", f"kind=concurrent,streams={CAPACITY}",
              "--constraint", f"kind=max_requests,count={_REQUESTS}",
              "--tokenizer", f"kind=hf_auto,model={tools.tokenizer}",
              "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
              "--output", f"kind=json,path={out}")  # fmt: skip
    (benchmark,) = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"][0]["info"]["error"]
    assert len(requests["successful"]) == _REQUESTS
    for one in requests["successful"]:
        counts = (one["input_metrics"]["text_tokens"], one["output_metrics"]["text_tokens"])
        assert counts == (64, 16), "tokens in and out"
    return Conformed("guidellm", tools.version("guidellm"), _REQUESTS)


def use_aiperf(tools: Tools) -> Conformed:
    """Stream simultaneous completions, each of exactly the requested number of tokens."""
    out = tools.folder / "aiperf"
    server = tools.server
    tools.run_program("aiperf", "profile", "--model", server.model, "--url", server.url,
              "--endpoint-type", "completions", "--streaming", "--ui-type", "none",
              "--concurrency", str(CAPACITY), "--request-count", str(_REQUESTS),
              "--tokenizer", str(tools.tokenizer), "--synthetic-input-tokens-mean", "64",
              "--output-tokens-mean", "16", "--use-server-token-count",
              "--extra-inputs", "ignore_eos:true", "--extra-inputs", "max_tokens:16",
              "--artifact-dir", str(out), offline=False)  # fmt: skip
    found = json.loads((out / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert found["completed_request_count"]["avg"] == _REQUESTS, found["error_summary"]
    lengths = found["output_sequence_length"]
    assert (lengths["min"], lengths["max"]) == (16, 16), "tokens out"
    return Conformed("aiperf", tools.version("aiperf"), _REQUESTS)


def use_node(tools: Tools, script: str, package: str) -> Conformed:
    """Run a script of Node, which uses a package and prints its number of calls."""
    server = tools.server
    path = str(Path(__file__).parent / "node" / script)
    command = ["node", path, str(tools.environment.resolve()), server.url, server.model, package]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    about = tools.environment / "node_modules" / package / "package.json"
    version = json.loads(about.read_text(encoding="utf-8"))["version"]
    return Conformed(package, version, int(ran.stdout), "Node")


def _samples(out: Path, task: str) -> Iterator[dict[str, Any]]:
    """Yield the documents of a task that lm_eval logged."""
    (path,) = out.rglob(f"samples_{task}_*.jsonl")
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


class _Oracle:
    """Log-likelihoods of the model in PyTorch, uncached."""

    def __init__(self, model: Path) -> None:
        model_dir = load_model_dir(model)
        self._decoder: Transformer = build_decoder(
            model_dir.config, load_weights(model_dir.config, model_dir.graph_path)
        )
        self._tokenizer: Tokenizer = model_dir.tokenizer
        self._first_id = model_dir.config.eos_token_ids[0]  # lm_eval puts it before a document

    def continuation(self, context: str, text: str) -> tuple[float, bool]:
        """Return the log-likelihood of `text` after `context`, and whether `text` is greedy."""
        n_context = len(self._tokenizer.encode(context).ids)
        return self._score(self._tokenizer.encode(context + text).ids, n_context)

    def document(self, text: str) -> float:
        return self._score([self._first_id, *self._tokenizer.encode(text).ids], 1)[0]

    def _score(self, ids: list[int], n_context: int) -> tuple[float, bool]:
        with torch.no_grad():
            logits = self._decoder(torch.tensor([ids]))[0].double()  # [n, vocab]
        logprobs = logits.log_softmax(-1)[n_context - 1 : -1]
        chosen = torch.tensor(ids[n_context:])
        is_greedy = bool((logprobs.argmax(-1) == chosen).all())
        return math.fsum(logprobs[torch.arange(len(chosen)), chosen].tolist()), is_greedy

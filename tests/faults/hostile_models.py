"""Models that attack the server beside the one that streams: templates and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults.client import Site, ask, post
from tests.faults.damage import with_file
from tests.faults.report import Report
from tests.faults.server_process import EXAMPLE

_TEMPLATES = (
    "{{ ('a' * 900000) | wordwrap(1) }}",
    "{{ ('a b' * 300000) | title | wordcount }}",
    "{{ ('<a>' * 300000) | striptags | urlize }}",
    "{{ ('(' * 60000) | urlize }}",
    "{% for m in messages %}{{ ('a' * 200000) | wordwrap(1) | length }}{% endfor %}",
    "{{ x }}" * 50_000,
)


def _replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


_NORMALIZERS: tuple[list[dict[str, Any]], ...] = (
    [_replace({"String": "a"}, "a" * 40)] * 6,
    [_replace({"Regex": "."}, "aa")] * 30,
    [{"type": "NFKD"}, _replace({"String": "a"}, "\ufdfa" * 1000), {"type": "NFKD"}] * 2,
)


def write_templates(folder: Path) -> list[str]:
    """Write the models, and return them as arguments of `kvasir serve`."""
    name = "chat_template.jinja"
    models = [with_file(folder / f"t{i}", name, one.encode()) for i, one in enumerate(_TEMPLATES)]
    return [f"{model.name}={model}" for model in models]


def write_tokenizers(folder: Path) -> list[str]:
    """Do the same with tokenizers."""
    tokenizer, models = json.loads((EXAMPLE / "tokenizer.json").read_bytes()), []
    for i, steps in enumerate(_NORMALIZERS):
        changed = tokenizer | {"normalizer": {"type": "Sequence", "normalizers": steps}}
        content = json.dumps(changed).encode()
        models.append(with_file(folder / f"t{i}", "tokenizer.json", content))
    return [f"{model.name}={model}" for model in models]


async def hostile_templates(site: Site, n: int, report: Report) -> None:
    """Chat n times with models whose templates cost too much."""
    for _ in range(n):
        model = f"t{site.chance.randrange(len(_TEMPLATES))}"
        messages = [{"role": "user", "content": "a"}] * site.chance.choice((1, 2, 30))
        body = {"model": model, "messages": messages, "max_tokens": 1}
        answer = await ask(site, post("/v1/chat/completions", body))
        report.answered(answer.status, f"{model}: {_TEMPLATES[int(model[1])][:40]}")


async def hostile_tokenizers(site: Site, n: int, report: Report) -> None:
    """Send a few characters n times to models whose normalizers multiply them."""
    for _ in range(n):
        model = f"t{site.chance.randrange(len(_NORMALIZERS))}"
        text = site.chance.choice(("a", "aaaa", "a" * 40))
        path, body = site.chance.choice(
            (
                ("/tokenize", {}),
                ("/v1/completions", {"max_tokens": 1}),
                ("/explain", {"layers": [0]}),
            )
        )
        name = "text" if path == "/explain" else "prompt"
        answer = await ask(site, post(path, {"model": model, name: text} | body))
        report.answered(answer.status, f"{model}: {len(text)} characters to {path}")

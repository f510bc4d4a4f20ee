"""Measure how many of a file's sources a server translates exactly; fail below 99 %.

KVASIR_URL=http://localhost:8000 python examples/exact_match.py runs/numbers/step-*/held_out.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

LEAST = 0.99


def translate(source: str) -> str:
    """Return the server's greedy target."""
    url = os.environ["KVASIR_URL"] + "/v1/completions"
    body = json.dumps({"prompt": source, "temperature": 0, "max_tokens": 64}).encode()
    request = Request(url, body, {"Content-Type": "application/json"})  # noqa: S310  (our server)
    with urlopen(request) as answer:  # noqa: S310
        return str(json.load(answer)["choices"][0]["text"])


def main(path: Path) -> None:
    """Translate every line's source, and print what differs from its target."""
    pairs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    n_exact = 0
    for pair in pairs:
        output = translate(pair["source"])
        if output == pair["target"]:
            n_exact += 1
        else:
            sys.stdout.write(f"{pair['source']}: {output}, not {pair['target']}\n")
    sys.stdout.write(f"{n_exact} of {len(pairs)} are exact\n")
    if n_exact < LEAST * len(pairs):
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

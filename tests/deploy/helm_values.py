"""Write helm/README.md from helm/values.yaml: python -m tests.deploy.helm_values > helm/README.md

`# -- text` documents the key under it; other comments document the section under them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.checking import parse

CHART = Path(__file__).resolve().parents[2] / "helm"
HEAD = """# Kvasir's chart

`helm install kvasir helm/ --set image.repository=REGISTRY/kvasir` serves the example model in the
image, which [you build and push](../docs/operations.md#install). Each file in `ci/` shows a
feature, and `values-gpu.yaml` a GPU. `router-values.yaml` is for the chart of llm-d's router, and
`adapter-values.yaml` for the chart of prometheus-adapter, which serves the metric of a
HorizontalPodAutoscaler; `kserve.yaml` is for clusters with KServe, without this chart. `kvasir
serve --help` lists all settings, [docs/api.md](../docs/api.md#limits) those that affect requests.
[docs/operations.md](../docs/operations.md) covers sizing, routing, upgrades and a runbook for each
alert.

`python -m tests.deploy.helm_values > helm/README.md` writes this table from the comments in
`values.yaml`.

| value | default | |
|---|---|---|
"""


def comments(text: str) -> dict[str, str]:
    """Return the comments above keys, by dotted key."""
    found: dict[str, str] = {}
    place: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"\s*# (?:-- )?(.*)", line):
            comment.append(match[1])
        elif match := re.match(r"( *)([A-Za-z]+):", line):
            place = [(depth, key) for depth, key in place if depth < len(match[1])]
            place.append((len(match[1]), match[2]))
            found[".".join(key for _, key in place)] = " ".join(comment)
            comment = []
        else:
            comment = []
    return found


def leaves(
    values: dict[str, Any], known: dict[str, str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values that have no values below them in the file, and documented sections."""
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, dict) and any(other.startswith(name + ".") for other in known):
            if known.get(name):
                yield name, None
            yield from leaves(value, known, name + ".")
        else:
            yield name, value


def document(values: Path) -> str:
    """Return the text of README.md."""
    text = values.read_text(encoding="utf-8")
    known = comments(text)
    lines = [HEAD]
    for name, value in leaves(parse(text), known):
        default = "" if value is None else f"`{json.dumps(value)}`"
        lines.append(f"| `{name}` | {default} | {known.get(name, '')} |\n")
    return "".join(lines)


def main() -> int:
    sys.stdout.write(document(CHART / "values.yaml"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A picture of a server's last steps: whose prompts they computed, and whose streams went on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvasir.model.platform.printable import error_message

_MOST_ROWS = 200
_WAITS, _PROMPT, _STREAM = "#c9ced6", "#1b4965", "#e9a23b"
_Spans = list[tuple[float, float]]  # begin and length, in seconds


def read_steps(url: str, api_key: str | None, model: str | None) -> list[dict[str, Any]]:
    """Return the last steps of a server, as GET /debug/steps gives them.

    Raises ValueError for another URL and where nothing has run, and OSError.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a URL such as http://localhost:8000")
    query = urlencode({"model": model} if model else {})
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    request = Request(f"{url.rstrip('/')}/debug/steps?{query}", headers=headers)  # noqa: S310
    try:
        with urlopen(request, timeout=60) as answer:  # noqa: S310
            steps: list[dict[str, Any]] = json.load(answer)["steps"]
    except HTTPError as error:
        raise ValueError(error_message(error.read())) from None
    except URLError as error:
        raise ValueError(f"no answer from {url}: {error.reason}") from None
    if not any(step["prompts"] or step["streams"] for step in steps):
        raise ValueError(f"{url} has computed no text yet")
    return steps


@dataclass(slots=True)
class Row:
    """A sequence: when it arrived, and the steps of its prompt and of its new tokens."""

    arrived: float
    n_prompt: int | None = None  # None if only its later steps are known
    prompts: _Spans = field(default_factory=list)
    streams: _Spans = field(default_factory=list)


def rows_of(steps: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the last sequences of steps, the first to arrive first; the first step begins at 0."""
    start = max(step["ago"] for step in steps)
    rows: dict[int, Row] = {}
    for step in steps:
        begin = start - step["ago"]
        for part in step["prompts"]:
            row = rows.setdefault(part["sequence_id"], Row(max(0.0, begin - part["waited"])))
            row.n_prompt = part["prompt_tokens"]
            row.prompts.append((begin, step["seconds"]))
        for number in step["streams"]:
            rows.setdefault(number, Row(0.0)).streams.append((begin, step["seconds"]))
    return sorted(rows.values(), key=lambda row: row.arrived)[-_MOST_ROWS:]


def draw_steps(rows: Sequence[Row], out: Path) -> None:
    """Write a PNG with a line for each sequence, the first on top."""
    figure = Figure(figsize=(12, 1.5 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        end = sum(max(row.prompts + row.streams))
        axes.broken_barh([(row.arrived, end - row.arrived)], (y - 0.05, 0.1), color=_WAITS)
        axes.broken_barh(row.streams, (y - 0.2, 0.4), color=_STREAM)
        axes.broken_barh(row.prompts, (y - 0.4, 0.8), color=_PROMPT)
    axes.set_yticks(range(len(rows)), [str(row.n_prompt or "") for row in rows])
    axes.set(xlabel="seconds", ylabel="prompt tokens of each sequence", ylim=(len(rows), -1))
    named = {"waits": _WAITS, "a step computes its prompt": _PROMPT, "it gets a token": _STREAM}
    handles = [Patch(color=color, label=name) for name, color in named.items()]
    axes.legend(handles=handles, ncols=3, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(out, dpi=100)

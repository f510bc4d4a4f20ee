"""Check names of metrics and labels in this repository against those of a running server."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

METRIC = re.compile(r"(?<![:\w])(?:kvasir|process)_[a-z0-9_]+\b")  # not in a recording rule's name
SELECTOR = re.compile(r"\b((?:kvasir|process)_[a-z0-9_]+)\{([^{}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*[\\]?[\"']")
GROUPING = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([\w\s,]*)\)")
VARIABLE = re.compile(r"label_values\((\w+)(?:\{[^{}]*\})?,\s*(\w+)\)")  # Grafana's
# Labels that Prometheus adds, the last one to ALERTS.
OF_THE_TARGET = {"namespace", "job", "pod", "instance", "alertstate"}
# An attribute of Locust, an option of subprocess, and the metric that prometheus-adapter computes.
ELSEWHERE = {"process_exit_code", "process_group", "kvasir_requests_in_system"}
TEXTS = (
    "README.md", "docs/*.md", "docker-compose*.yml", "helm/**/*", "server/static/**/*",
    "loadtest/**/*.py",
)  # fmt: skip


class Shown:
    """The metrics of one path of a server, in Prometheus' text format."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
            text = answer.read().decode()
        self.names = set(re.findall(r"^(?:# TYPE )?([a-z0-9_]+)", text, re.MULTILINE))
        # A histogram with labels may have no samples yet.
        histograms = re.findall(r"^# TYPE (\S+) histogram", text, re.MULTILINE)
        self.names |= {name + part for name in histograms for part in ("_bucket", "_sum", "_count")}
        self.labels: dict[str, set[str]] = {}  # of names that have samples
        for name, labels in re.findall(r"^([a-z0-9_]+)(?:\{(.*)\})? ", text, re.MULTILINE):
            self.labels.setdefault(name, set()).update(LABEL.findall(labels))


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and text of every file that may name metrics."""
    for pattern in TEXTS:
        for path in sorted(root.glob(pattern)):
            if path.is_file():
                yield str(path.relative_to(root)), path.read_text(encoding="utf-8")


def unknown_names(named: Iterable[tuple[str, str]], known: set[str]) -> set[str]:
    """Return `PLACE: NAME` of each unknown metric."""
    found = ((place, name) for place, text in named for name in METRIC.findall(text))
    return {f"{place}: {name}" for place, name in found if name not in known | ELSEWHERE}


def unknown_labels(
    expressions: Iterable[tuple[str, str]], shown: Shown, recorded: set[str]
) -> set[str]:
    """Return `PLACE: LABEL` of each label that its metric, or every metric, lacks."""
    every = OF_THE_TARGET.union(*shown.labels.values())
    wrong = set()
    for place, text in expressions:
        for name, selectors in SELECTOR.findall(text):
            has = shown.labels.get(name, every) if name not in recorded else every
            unknown = set(LABEL.findall(selectors)) - has - OF_THE_TARGET
            wrong |= {f"{place}: {name}{{{label}}}" for label in unknown}
        for name, label in VARIABLE.findall(text):
            if label not in shown.labels.get(name, every) | OF_THE_TARGET:
                wrong.add(f"{place}: {name}, {label}")
        for labels in GROUPING.findall(text):
            wrong |= {f"{place}: {label}" for label in set(re.findall(r"\w+", labels)) - every}
    return wrong

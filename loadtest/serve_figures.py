"""Figures of served requests: percentiles, throughput, goodput and ratios of servers.

TTFT: from sending a request to its first event with text. ITL: every gap between such events. TPOT:
the time after the first event divided by the number of tokens after the first. E2E: from sending to
the end, the only latency of an answer in one piece. Events of one read make no gap; an answer of
one read has neither ITL nor TPOT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
from rich.table import Column, Table

from kvasir.loadtest.client import Answer
from kvasir.loadtest.load import Workload

PERCENTILES = (50, 90, 95, 99)
_SHOWN = (50, 90, 99)  # in a table
LATENCIES: dict[str, Callable[[Answer], list[float]]] = {
    "ttft": lambda answer: [answer.ttft] if answer.event_times else [],
    "itl": lambda answer: answer.gaps,
    "tpot": lambda answer: [] if answer.tpot is None else [answer.tpot],
    "e2e": lambda answer: [answer.e2e],
}
Limits = dict[str, float]  # by latency: most milliseconds of a good request
Round = list[list[Answer]]  # waves, one after the other


def parse_limits(text: str) -> Limits:
    """Parse `ttft:500 itl:50`; `itl` limits the longest gap. Raises ValueError if it cannot."""
    limits = {}
    for limit in text.replace(",", " ").split():
        name, _, value = limit.partition(":")
        if name not in LATENCIES or not value.replace(".", "", 1).isdecimal():
            form = f"one of {', '.join(LATENCIES)} with milliseconds"
            raise ValueError(f"a goodput limit is {form}, not {limit!r}")
        limits[name] = float(value)
    return limits


def good(answers: list[Answer]) -> list[Answer]:
    """Return the answers without an error."""
    return [answer for answer in answers if answer.error is None]


def figures(waves: Round, limits: Limits) -> dict[str, float]:
    """Compute the figures of the requests that succeeded.

    Throughput is over the time from each wave's first request to its last answer.
    """
    waves = [succeeded for wave in waves if (succeeded := good(wave))]
    answers = list(chain(*waves))
    seconds = sum(max(a.ended for a in wave) - min(a.sent for a in wave) for wave in waves)
    measured: dict[str, float] = {}
    if answers:
        if n_tokens := sum(answer.n_tokens for answer in answers):
            measured["output_tokens_per_second"] = n_tokens / seconds
        else:
            n_tokens = sum((answer.usage or {}).get("prompt_tokens", 0) for answer in answers)
            measured["input_tokens_per_second"] = n_tokens / seconds
        measured["requests_per_second"] = len(answers) / seconds
        if limits:
            measured["goodput"] = sum(_keeps(answer, limits) for answer in answers) / seconds
    for name, latency in LATENCIES.items():
        if values := [value * 1e3 for answer in answers for value in latency(answer)]:
            measured |= {f"{name}_ms_p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return measured


def _keeps(answer: Answer, limits: Limits) -> bool:
    """Return whether an answer keeps all limits; an unknown latency of several tokens does not."""
    times = {name: LATENCIES[name](answer) for name in limits}
    return (answer.n_tokens <= 1 or all(times.values())) and all(
        value * 1e3 <= limits[name] for name, values in times.items() for value in values
    )


@dataclass(slots=True)
class Measured:
    """The answers of one server to one workload, or to a part of it, in each round."""

    workload: Workload
    limits: Limits
    waves: list[Round] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        """All answers of all rounds."""
        return [answer for waves in self.waves for answer in chain(*waves)]

    @property
    def errors(self) -> list[str]:
        """The errors of the requests that failed."""
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def notes(self) -> list[str]:
        """Caveats that a reader needs before comparing the figures."""
        answers, workload = good(self.answers), self.workload
        notes = []
        if errors := self.errors:
            share = f"{len(errors)} of {len(self.answers)}"
            notes.append(f"{share} requests failed, the first: {errors[0]}")
        if any(answer.usage is None for answer in answers):
            notes.append("the server sends no usage, so events are counted as tokens")
        if wanted := workload.lengths:
            lengths = {
                ((answer.usage or {}).get("prompt_tokens") or wanted[0], answer.n_tokens)
                for answer in answers
            }
            for n_in, n_out in sorted(lengths - {wanted}):
                notes.append(f"not what was asked for: {n_in} tokens in, {n_out} out")
        n_tokens = sum(answer.n_tokens for answer in answers)
        n_events = sum(len(answer.event_times) for answer in answers)
        if not n_events:  # the answers came in one piece
            return notes
        n_joined = n_events - sum(1 + len(answer.gaps) for answer in answers)
        if n_joined > 0.02 * n_events:
            share = f"{n_joined / n_events:.0%} of events"
            notes.append(f"{share} came in one read with the event before, and make no gap")
        if abs(n_events - n_tokens) > 0.02 * n_tokens:
            mean = f"an event holds {n_tokens / n_events:.2f} tokens"
            notes.append(f"{mean}, so ITL is not the time of a token")
        return notes

    def as_json(self) -> dict[str, Any]:
        """Return the figures of each round, and the median of each figure over the rounds."""
        rounds = [figures(waves, self.limits) for waves in self.waves]
        names = dict.fromkeys(chain(*rounds))
        medians = {
            name: median(values[name] for values in rounds if name in values) for name in names
        }
        failed = {"failed": len(self.errors), "notes": self.notes}
        return {"median": medians, "rounds": rounds} | failed


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """The result of `kvasir bench serve`."""

    about: dict[str, Any]  # settings
    rows: dict[str, dict[str, Measured]]  # by workload, or part of one, and by server

    @property
    def errors(self) -> list[str]:
        """The errors of all requests that failed."""
        return [
            e for row in self.rows.values() for measured in row.values() for e in measured.errors
        ]

    def as_json(self) -> dict[str, Any]:
        """Return all figures for scripts."""
        rows = {}
        for label, row in self.rows.items():
            servers = {letter: measured.as_json() for letter, measured in row.items()}
            rows[label] = {"servers": servers} | ratios(servers)
        return self.about | {"workloads": rows}

    def tables(self) -> list[str | Table]:
        """Return the settings, the tables and the notes for a terminal."""
        rows: dict[str, dict[str, dict[str, float]]] = {}
        notes: list[str] = []
        for label, row in self.as_json()["workloads"].items():
            servers = row.pop("servers")
            rows[label] = {letter: server["median"] for letter, server in servers.items()} | row
            if row and not notes:
                ratio = ", ".join(row)
                notes.append(f"{ratio}: A is better if throughput is above 1 and times are below 1")
            for letter, server in servers.items():
                notes += [f"{label}, {letter}: {note}" for note in server["notes"]]
        names = dict.fromkeys(name for row in rows.values() for name in chain(*row.values()))
        parts: list[str | Table] = [f"{key}: {value}" for key, value in self.about.items() if value]
        parts.append(_table("throughput", [name for name in names if "_ms_" not in name], rows))
        for pair in (("ttft", "itl"), ("tpot", "e2e")):
            latencies = [f"{name}_ms_p{p}" for name in pair for p in _SHOWN]
            if shown := [name for name in latencies if name in names]:
                parts.append(_table("milliseconds", shown, rows))
        return parts + notes


def _table(title: str, names: list[str], rows: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(Column("workload", no_wrap=True), "", title=title)
    for name in names:
        heading = name.replace("_ms_", "\n").replace("_per_second", "/s").replace("_", " ")
        table.add_column(heading, justify="right")
    for label, row in rows.items():
        for letter, values in row.items():
            if values:
                form = "{:.2f} x".format if "/" in letter else _significant
                cells = (form(values[name]) if name in values else "-" for name in names)
                table.add_row(label, letter, *cells)
        table.add_section()
    return table


def _significant(value: float) -> str:
    """Format a figure with fewer decimals the larger it is."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"


def ratios(servers: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Divide the first server's medians by those of each other, whose letter names the ratios."""
    medians = {letter: server["median"] for letter, server in servers.items()}
    first, *others = medians
    return {
        f"{first}/{other}": {
            name: value / medians[other][name]
            for name, value in medians[first].items()
            if medians[other].get(name)
        }
        for other in others
    }

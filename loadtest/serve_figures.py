"""Figures of served requests: percentiles, throughput, goodput, and two servers side by side.

TTFT is from sending a request to its first event with text; ITL every gap between such events, pooled; TPOT the time
after the first event divided by the tokens after the first; e2e from sending to the whole answer. Events that come in
one read make no gap, and an answer that comes in one has neither ITL nor TPOT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from loadtest.load import Workload
from loadtest.sse_client import Answer

PERCENTILES = (50, 90, 99)
LATENCIES: dict[str, Callable[[Answer], list[float]]] = {
    "ttft": lambda answer: [answer.ttft],
    "itl": lambda answer: answer.gaps,
    "tpot": lambda answer: [] if answer.tpot is None else [answer.tpot],
    "e2e": lambda answer: [answer.e2e],
}
Limits = dict[str, float]  # latency: the most milliseconds that a good request may take
Round = list[list[Answer]]  # waves, one after the other
RATIO = "A/B"


def parse_limits(text: str) -> Limits:
    """`ttft:500 itl:50`: milliseconds that a good request keeps to; for itl, in its longest gap. What cannot be told of
    several tokens is not kept. Raises ValueError.
    """
    limits = {}
    for limit in text.replace(",", " ").split():
        name, _, value = limit.partition(":")
        if name not in LATENCIES or not value.replace(".", "", 1).isdecimal():
            raise ValueError(
                f"a goodput limit is one of {', '.join(LATENCIES)} with milliseconds, not {limit!r}"
            )
        limits[name] = float(value)
    return limits


def good(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.error is None]


def figures(waves: Round, limits: Limits) -> dict[str, float]:
    """Of the requests that succeeded; throughput over the time from each wave's first request to its last answer."""
    waves = [succeeded for wave in waves if (succeeded := good(wave))]
    answers = list(chain(*waves))
    seconds = sum(max(a.ended for a in wave) - min(a.sent for a in wave) for wave in waves)
    found: dict[str, float] = {}
    if answers:
        found["output_tokens_per_second"] = sum(answer.n_tokens for answer in answers) / seconds
        found["requests_per_second"] = len(answers) / seconds
        if limits:
            found["goodput"] = sum(_keeps(answer, limits) for answer in answers) / seconds
    for name, seconds_of in LATENCIES.items():
        if values := [value * 1e3 for answer in answers for value in seconds_of(answer)]:
            found |= {f"{name}_ms_p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return found


def _keeps(answer: Answer, limits: Limits) -> bool:
    known = {name: LATENCIES[name](answer) for name in limits}
    if answer.n_tokens > 1 and not all(known.values()):
        return False
    return all(value * 1e3 <= limits[name] for name, values in known.items() for value in values)


@dataclass(slots=True)
class Measured:
    """One workload, or a part of it, on one server."""

    workload: Workload
    limits: Limits
    waves: list[Round] = field(default_factory=list)  # of each round

    @property
    def answers(self) -> list[Answer]:
        return [answer for waves in self.waves for answer in chain(*waves)]

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def rounds(self) -> list[dict[str, float]]:
        return [figures(waves, self.limits) for waves in self.waves]

    @property
    def medians(self) -> dict[str, float]:
        rounds = self.rounds
        return {
            key: median(found[key] for found in rounds if key in found)
            for key in dict.fromkeys(chain(*rounds))
        }

    @property
    def notes(self) -> list[str]:
        """What a reader has to know before comparing the figures."""
        answers, errors, workload = good(self.answers), self.errors, self.workload
        notes = (
            [f"{len(errors)} of {len(self.answers)} requests failed, the first: {errors[0]}"]
            if errors
            else []
        )
        if any(answer.usage is None for answer in answers):
            notes.append("the server sends no usage, so events are counted as tokens")
        lengths = {
            (answer.n_prompt_tokens or workload.n_prompt_tokens, answer.n_tokens)
            for answer in answers
        }
        for n_in, n_out in sorted(lengths - {(workload.n_prompt_tokens, workload.output_len)}):
            notes.append(f"not what was asked for: {n_in} tokens in, {n_out} out")
        n_tokens, n_events = (
            sum(a.n_tokens for a in answers),
            sum(len(a.event_times) for a in answers),
        )
        n_apart = sum(1 + len(a.gaps) for a in answers)
        if n_events - n_apart > 0.02 * n_events:
            notes.append(
                f"{1 - n_apart / n_events:.0%} of events came in one read with the one before, and make no gap"
            )
        if abs(n_events - n_tokens) > 0.02 * n_tokens:
            notes.append(
                f"an event holds {n_tokens / n_events:.2f} tokens, so ITL is not the time of a token"
            )
        return notes


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """What `kvasir bench serve` measures. about: what was run. rows: a workload's, or its part's, by server."""

    about: dict[str, Any]
    rows: dict[str, dict[str, Measured]]

    @property
    def errors(self) -> list[str]:
        return [
            error
            for row in self.rows.values()
            for measured in row.values()
            for error in measured.errors
        ]

    def as_json(self) -> dict[str, Any]:
        rows = {
            label: {
                "servers": {
                    letter: {
                        "median": m.medians,
                        "rounds": m.rounds,
                        "failed": len(m.errors),
                        "notes": m.notes,
                    }
                    for letter, m in row.items()
                },
                RATIO: ratios(row),
            }
            for label, row in self.rows.items()
        }
        return self.about | {"workloads": rows}

    def tables(self) -> list[str | Table]:
        throughput = [
            key
            for row in self.rows.values()
            for m in row.values()
            for key in m.medians
            if "_ms_" not in key
        ]
        pairs = (("ttft", "itl"), ("tpot", "e2e"))
        latencies = [[f"{name}_ms_p{p}" for name in pair for p in PERCENTILES] for pair in pairs]
        notes = [
            f"{label}, {letter}: {note}"
            for label, row in self.rows.items()
            for letter, measured in row.items()
            for note in measured.notes
        ]
        return [
            *(f"{name}: {value}" for name, value in self.about.items() if value),
            self._table("throughput", list(dict.fromkeys(throughput))),
            *(self._table("milliseconds", keys) for keys in latencies),
            *(
                ["A/B: throughput above 1, and times below 1, speak for A"]
                if any(map(ratios, self.rows.values()))
                else []
            ),
            *notes,
        ]

    def _table(self, title: str, keys: list[str]) -> Table:
        table = Table(title=title)
        table.add_column("workload", no_wrap=True)
        table.add_column("")
        for key in keys:
            table.add_column(
                key.replace("_ms_", "\n").replace("_per_second", "/s").replace("_", " "),
                justify="right",
            )
        for label, row in self.rows.items():
            for letter, found in (
                {letter: m.medians for letter, m in row.items()} | {RATIO: ratios(row)}
            ).items():
                if found:
                    form = "{:.2f} x".format if letter == RATIO else _figure
                    table.add_row(
                        label, letter, *(form(found[key]) if key in found else "-" for key in keys)
                    )
            table.add_section()
        return table


def _figure(value: float) -> str:
    """With decimals where they tell something."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"


def ratios(row: dict[str, Measured]) -> dict[str, float]:
    """The first server's medians divided by the second's; none for a single server."""
    first, *others = (measured.medians for measured in row.values())
    return {key: first[key] / second[key] for second in others for key in first if second.get(key)}

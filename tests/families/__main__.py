"""Try every causal type of transformers, and write the table of docs/checkpoints.md.

python -m tests.families [TYPE...], which writes nothing, or --part I/N for one of N parts that have
as many types that are read. Exit code 1 if one of them differs from transformers, fails, or ends
its process.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Annotated

from typer import Argument, BadParameter, Option, echo, run

from kvasir.commands.console.progress import ProgressBar
from kvasir.model.platform.machine import usable_cpus
from tests.families.trial import N_NEW, PROMPTS, TYPES, Outcome, is_read, try_alone

PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"
_MARKS = ("<!-- make families: begin -->", "<!-- make families: end -->")
# A process that imports once, and forks for each type: what a type leaves or breaks ends with it.
_CONTEXT = multiprocessing.get_context("forkserver")


def _in_own_process(kind: str) -> Outcome:
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        try:
            return pool.submit(try_alone, kind).result()
        except BrokenProcessPool:
            return Outcome("failed", "it ended its process")


def part_of(kinds: Iterable[str], i: int, n: int) -> list[str]:
    """Return the i-th of n parts of types, of which each has its share of those that are read.

    Hashes decide the rest, so that relatives are in different parts.
    """

    def place(kind: str) -> tuple[bool, str]:
        return not is_read(kind), hashlib.sha256(kind.encode()).hexdigest()

    return sorted(sorted(kinds, key=place)[i % n :: n])


def try_all(kinds: list[str], at_once: int) -> dict[str, Outcome]:
    """Try types, some at once."""
    _CONTEXT.set_forkserver_preload(["tests.families.preload"])
    outcomes: dict[str, Outcome] = {}
    threads = ThreadPoolExecutor(at_once)
    with ProgressBar(takes_minutes=True) as progress:
        try:
            futures = {threads.submit(_in_own_process, kind): kind for kind in kinds}
            for done, future in enumerate(as_completed(futures), 1):
                kind = futures[future]
                outcome = outcomes[kind] = future.result()
                kl = " ".join(f"{name} {value:.1e}" for name, value in outcome.mean_kl.items())
                line = f"{kind:26} {outcome.what:10} {outcome.seconds:5.1f} s  {kl}{outcome.why}"
                progress.lines.print(line, markup=False, highlight=False, soft_wrap=True)
                progress("trying types", done, len(kinds), kind)
        finally:
            threads.shutdown(cancel_futures=True)  # types that are being tried end first
    return {kind: outcomes[kind] for kind in kinds}


def table(outcomes: dict[str, Outcome]) -> str:
    """Return the section of the page: versions, counts, and a line for each type."""
    counts = Counter(outcome.what for outcome in outcomes.values())
    counted = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    lengths = ", ".join(map(str, PROMPTS[:-1])) + f" and {PROMPTS[-1]}"
    rows = ["| `model_type` | | int8 | int4 |", "|---|---|---|---|"]
    for kind, outcome in sorted(outcomes.items()):
        said = f"{outcome.what}: {outcome.why}" if outcome.why else outcome.what
        rows.append(f"| `{kind}` | {said} | {_kl(outcome, 'int8')} | {_kl(outcome, 'int4')} |")
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "onnxruntime"))
    return "\n".join(
        [
            f"Of {len(outcomes)} types: {counted} ({datetime.now(UTC):%Y-%m-%d}; {packages}).",
            f"Equal: {N_NEW} greedy tokens after each of {lengths} tokens.",
            "",
            *rows,
        ]
    )


def _kl(outcome: Outcome, precision: str) -> str:
    return f"{outcome.mean_kl[precision]:.1e}" if precision in outcome.mean_kl else ""


def write(text: str) -> None:
    """Put the section between its marks on the page."""
    begin, end = map(re.escape, _MARKS)
    section = f"{_MARKS[0]}\n{text}\n{_MARKS[1]}"
    page, n = re.subn(f"{begin}.*{end}", lambda _: section, PAGE.read_text(), flags=re.DOTALL)
    assert n == 1, f"{PAGE} has not the marks of the table"
    PAGE.write_text(page)


def main(
    kinds: Annotated[list[str] | None, Argument(help="Types; all by default.")] = None,
    part: Annotated[
        str, Option(help="I/N: the I-th of N parts of them; day/N: that of the day (UTC).")
    ] = "0/1",
    at_once: Annotated[int, Option(min=1, help="Types at once.")] = usable_cpus(),
) -> None:
    if unknown := set(kinds or ()) - TYPES.keys():
        raise BadParameter(f"transformers has no causal type {', '.join(sorted(unknown))}")
    if (match := re.fullmatch(r"(\d+|day)/([1-9]\d*)", part)) is None:
        raise BadParameter(f"--part is {part!r}, not I/N or day/N")
    n = int(match[2])
    i = (datetime.now(UTC).toordinal() if match[1] == "day" else int(match[1])) % n
    chosen = part_of(kinds or TYPES, i, n)
    started = monotonic()
    outcomes = try_all(chosen, at_once)
    spent = sum(outcome.seconds for outcome in outcomes.values())
    took = f"{monotonic() - started:.0f} s, {spent:.0f} s of CPU"
    echo(f"{len(outcomes)} types (part {i}/{n}) in {took}")
    if chosen == sorted(TYPES):
        write(table(outcomes))
        echo(f"wrote {PAGE}")
    faults = {kind: outcome for kind, outcome in outcomes.items() if outcome.is_fault}
    for kind, outcome in faults.items():
        echo(f'{kind} {outcome.what}: {outcome.why}; make families ARGS="{kind}" repeats it')
    sys.exit(bool(faults))


if __name__ == "__main__":
    run(main)

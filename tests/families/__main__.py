"""Try every causal type of transformers, and write the table of docs/checkpoints.md.

python -m tests.families [TYPE...], which writes nothing, or --part I/N for every N-th type. Exit
code 1 if one that is served differs from transformers, fails, or ends its process.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections import Counter
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
from tests.families.trial import N_NEW, PROMPTS, TYPES, Outcome, try_alone

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


def try_all(kinds: list[str]) -> dict[str, Outcome]:
    """Try types, as many at once as there are CPUs."""
    _CONTEXT.set_forkserver_preload(["tests.families.trial"])
    outcomes: dict[str, Outcome] = {}
    threads = ThreadPoolExecutor(usable_cpus())
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
    part: Annotated[str, Option(help="I/N: every N-th type, from the I-th on.")] = "0/1",
) -> None:
    if unknown := set(kinds or ()) - TYPES.keys():
        raise BadParameter(f"transformers has no causal type {', '.join(sorted(unknown))}")
    if (match := re.fullmatch(r"(\d+)/([1-9]\d*)", part)) is None:
        raise BadParameter(f"--part is {part!r}, not I/N")
    first, step = int(match[1]), int(match[2])
    chosen = sorted(kinds or TYPES)[first % step :: step]
    started = monotonic()
    outcomes = try_all(chosen)
    spent = sum(outcome.seconds for outcome in outcomes.values())
    echo(f"{len(outcomes)} types in {monotonic() - started:.0f} s, {spent:.0f} s of CPU")
    if chosen == sorted(TYPES):
        write(table(outcomes))
        echo(f"wrote {PAGE}")
    sys.exit(any(outcome.is_fault for outcome in outcomes.values()))


if __name__ == "__main__":
    run(main)

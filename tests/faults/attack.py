"""Attack `kvasir serve` beside two steady streams: python -m tests.faults.attack [NAME…]

Prints a row for each attack, and for random mixes of them; docs/operations.md says how to read it.
What each saw goes to standard error.
Names joined by + are one mix. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM, signal
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Annotated, Any

import psutil
import typer

from tests.faults.attacks import ATTACKS, MOST_GROWTH
from tests.faults.child import Child
from tests.faults.client import Site, ask, post
from tests.faults.victim import DRAIN, STREAM_KEY, Victim, attacked

ROOT = Path(__file__).parents[2]
_MOST_GAP, _MOST_ALONE, _MOST_END = 0.100, 0.050, DRAIN + 5
_ALONE = 2.0  # seconds of the streams before an attack
_LIMIT = 300.0  # seconds for an attack
_SETTLED = 10.0  # seconds in which memory is given back
_STARTED = 120.0
_PAUSE = 0.2
_OPENED = 4  # files that a server opens when it first needs them
_COLUMNS = (
    ("attack", 34), ("tried", 6), ("improper", 8), ("alone ms", 8), ("beside ms", 9),
    ("machine ms", 10), ("probe ms", 8), ("peak MiB", 8), ("after MiB", 9), ("SIGTERM s", 9),
)  # fmt: skip


Clients = tuple[Victim, Child, Child]  # of a server: the streams, and the attackers


@dataclass(slots=True)
class Row:
    """An attack's figures; None where there is none, because of what `lost` says.

    gaps, probe, machine: the longest, in seconds. grown, kept: bytes, at the peak and afterwards.
    """

    name: str
    alone: float | None = None
    beside: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    grown: int | None = None
    kept: int | None = None
    ended: str = ""
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        times = [self.alone, *map(self.beside.get, ("gap", "machine", "probe"))]
        sizes = (self.grown, self.kept)
        improper = self.told["n_lost"] if self.told else "-"
        return [
            self.name, str(self.told.get("tried", "-")), str(improper),
            *("-" if one is None else f"{one * 1000:.0f}" for one in times),
            *("-" if one is None else f"{one / 2**20:+.0f}" for one in sizes), self.ended or "-",
        ]  # fmt: skip

    def missed(self) -> list[str]:
        """Return the goals that it misses."""
        found = [*self.lost, *self.told.get("lost", ())]
        is_number = self.ended.replace(".", "").isdigit()
        wrong = {
            "the streams stood still": self.beside.get("gap", 1.0) > _MOST_GAP,
            "they did so alone": (self.alone or 0.0) > _MOST_ALONE,
            "memory grew": (self.grown or 0) > MOST_GROWTH,
            "memory was not given back": (self.kept or 0) > MOST_GROWTH / 2,
            "SIGTERM took too long": not is_number or float(self.ended) > _MOST_END,
        }  # fmt: skip
        return [*(what for what, is_so in wrong.items() if is_so), *found]


def watched(server: Victim, pause: float = 0.0) -> Child:
    """Return the prober and the streams, with a pause in seconds after each."""
    return Child("tests.faults.watch", str(server.port), STREAM_KEY, str(pause))


def attacking() -> Child:
    """Return attackers, which answer once they have started."""
    return Child("tests.faults.attackers")


def measure(names: list[str], checkout: Path, seed: int) -> Row:
    """Attack a fresh server, twice: beside the streams, and at the time of a SIGTERM."""
    row, chance = Row("+".join(names)), random.Random(f"{seed} {names}")
    with serving(names, checkout) as server, watched(server) as watch, attacking() as attackers:
        row.notes += [] if server.limited else ["no limit on memory is allowed here"]
        row.notes.append(f"started in {server.start_seconds:.0f} s")
        asyncio.run(_fill_caches(Site(server.port, server.folder)))
        started = perf_counter()
        stand(row, (server, watch, attackers), job(names, server, seed), alone=_ALONE)
        seconds = perf_counter() - started - _ALONE
        if server.popen.poll() is None:
            with attacking() as others:
                others.ask({}, _STARTED)
                others.tell(job(names, server, seed + 1))
                sleep(chance.uniform(0.0, min(seconds, 5.0)))
                row.ended = server.end()
        row.lost += server.errors[:3]
    return row


async def _fill_caches(site: Site) -> None:
    """Let a crowd ask for what a server keeps memory for: scores of long prompts, and chats."""
    common = {"model": "fake-model", "max_tokens": 20, "ignore_eos": True}
    requests: list[bytes] = []
    for _ in range(32):
        text = "".join(site.chance.choices("abc ", k=1000))
        scored, messages = {"prompt": text, "logprobs": 20}, [{"role": "user", "content": text}]
        requests.append(post("/v1/completions", common | scored))
        requests.append(post("/v1/chat/completions", common | {"messages": messages * 30}))
    await asyncio.gather(*(ask(site, one) for one in requests))


def job(names: list[str], server: Victim, seed: int, *, few: bool = False) -> dict[str, Any]:
    """Return what the attackers are told."""
    folder = str(server.folder)
    return {"names": names, "port": server.port, "folder": folder, "seed": seed, "few": few}


def stand(
    row: Row, clients: Clients, told: dict[str, Any], alone: float = 0.0, *, settles: bool = True
) -> None:
    """Fill in the figures of an attack beside streams that were alone for some seconds.

    settles: wait for the memory to be given back, too.
    """
    server, watch, attackers = clients
    before, n_files = server.reset_peak(), n_open(server)
    try:
        attackers.ask({}, _STARTED)
        watch.ask("begin", _STARTED)
        before = server.reset_peak()
        sleep(alone)
        row.alone = watch.ask("report", _STARTED)["gap"]
        row.told = attackers.ask(told, _LIMIT)
        row.notes.append(f"answers {row.told['statuses']} {row.told['note']}")
    except (TimeoutError, ChildProcessError) as error:
        row.lost.append(f"the attack: {error}")
    with suppress(TimeoutError, ChildProcessError):
        row.beside = watch.ask("end", _STARTED)
        row.lost += [f"beside it {error}" for error in row.beside["errors"][:3]]
    if server.popen.poll() is not None:
        row.lost.append(f"the server ended with {server.popen.returncode}")
        return
    row.grown, until = server.memory("VmHWM") - before, perf_counter() + _SETTLED
    most = before + MOST_GROWTH // 8 if settles else 2**62
    while (held := _held(server, most, n_files)) and perf_counter() < until:
        sleep(_PAUSE)
    row.kept = server.memory("VmRSS") - before
    row.lost += [what for what in held if "memory" not in what]  # of which the row has a figure


def _held(server: Victim, most: int, n_files: int) -> list[str]:
    """Return what the server has not given back, seen once: a client that has left can still
    be about to begin, if the end of its body has just been read."""
    n_bytes, files, rows = server.memory("VmRSS"), n_open(server) - n_files, n_rows(server)
    held = [f"{n_bytes} bytes of memory are kept"] if n_bytes > most else []
    held += [f"{files} files are left open"] if files > _OPENED else []
    return held + ([f"{rows:g} rows are still held"] if rows else [])


def n_rows(server: Victim) -> float:
    """Return the sequences that run or wait, which nothing announces."""
    with suppress(TimeoutError):
        return asyncio.run(Site(server.port, server.folder).n_running())
    return 0.0


def n_open(server: Victim) -> int:
    """Return the number of its open files and connections; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return int(psutil.Process(server.popen.pid).num_fds())
    return 0


@contextmanager
def serving(names: list[str], checkout: Path, *more: str) -> Iterator[Victim]:
    """Serve what these attacks are for, with more options.

    Raises PermissionError where that is not allowed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvasir-attack-")))
        (folder / "batches").mkdir()
        one = max((ATTACKS[name] for name in names), key=lambda attack: not attack.is_usual)
        if one.n_disk:
            at = str(folder / "batches")
            mount = ["mount", "-t", "tmpfs", "-o", f"size={one.n_disk}", "none", at]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                raise PermissionError(f"{names} needs a disk of its own, which root can mount")
            unmount = ["umount", "-l", at]
            stack.callback(lambda: subprocess.run(unmount, check=False))
        options = (*(one.models(folder) if one.models else ()), *one.options, *more)
        yield stack.enter_context(attacked(checkout, folder, options, one.n_files))


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Attacks, or mixes A+B. Default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attacks and the mixes.")] = 0,
    mixes: Annotated[int, typer.Option(help="Random mixes of attacks, after all.")] = 4,
    server: Annotated[Path, typer.Option(help="Checkout whose server is attacked.")] = ROOT,
) -> None:
    """Attack a server, and print a row for each attack."""
    signal(SIGTERM, lambda *_: sys.exit(1))  # leaves no server behind
    chance = random.Random(seed)
    usual = [name for name, one in ATTACKS.items() if one.is_usual][2:]
    wanted = [one.split("+") for one in names or ATTACKS]
    if not names:
        wanted += [sorted(chance.sample(usual, chance.choice((2, 3)))) for _ in range(mixes)]
    typer.echo("| " + " | ".join(f"{title:{width}}" for title, width in _COLUMNS) + " |")
    typer.echo("|" + "|".join("-" * (width + 2) for _, width in _COLUMNS) + "|")
    missed = False
    for one in wanted:
        try:
            row = measure(one, server.resolve(), seed)
        except PermissionError as error:
            typer.echo(f"skipped: {error}", err=True)
            continue
        except (ChildProcessError, TimeoutError) as error:
            row = Row("+".join(one), lost=[f"{error}"])
        cells = zip(row.cells(), _COLUMNS, strict=True)
        typer.echo("| " + " | ".join(f"{cell:{width}}" for cell, (_, width) in cells) + " |")
        for what in (*row.notes, *(f"MISSED: {goal[:300]}" for goal in row.missed()[:8])):
            typer.echo(f"{row.name}: {what}", err=True)
        missed |= bool(row.missed())
    raise typer.Exit(int(missed))


if __name__ == "__main__":
    typer.run(main)

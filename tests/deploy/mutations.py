"""Test the checks: put each fault of mutations.yaml into a copy of the deployment files, and look.

python -m tests.deploy.mutations [WORD]

Run it with the environment of `make validate`; WORD selects faults by name. Exit code 1 if a fault
was missed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.checking import ROOT, FailedError, RenderError, SkippedError, parse
from tests.deploy.validate import CHECKS

TABLE = Path(__file__).with_suffix(".yaml")
MUTATIONS: list[dict[str, str]] = parse(TABLE.read_text(encoding="utf-8"))


@contextmanager
def mutated(mutation: dict[str, str]) -> Iterator[Path]:
    """Yield a copy of the repository with the fault; what has no deployment files is linked."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path in ROOT.iterdir():
            if path.name == "helm":
                shutil.copytree(path, root / path.name)
            elif path.name == mutation["file"]:
                shutil.copy(path, root)
            else:
                (root / path.name).symlink_to(path)
        file = root / mutation["file"]
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(mutation["old"], mutation["new"], 1), encoding="utf-8")
        yield root


def caught_by(
    mutation: dict[str, str], checks: Sequence[Callable[[Path], str]]
) -> tuple[str, str] | None:
    """Return the first check that finds the fault, and what it says."""
    with mutated(mutation) as root:
        for check in checks:
            try:
                check(root)
            except SkippedError:
                continue
            except (FailedError, RenderError) as error:
                return check.__name__, str(error).strip().splitlines()[-1]
    return None


def main(word: str = "") -> int:
    chosen = [mutation for mutation in MUTATIONS if word in mutation["name"]]
    n_caught = 0
    for mutation in chosen:
        found = caught_by(mutation, CHECKS)
        n_caught += found is not None
        check, text = found or ("MISSED", "")
        print(f"{mutation['name']:40} {check:24} {text[:120]}", flush=True)  # noqa: T201
    print(f"{n_caught} of {len(chosen)} caught")  # noqa: T201
    return int(n_caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

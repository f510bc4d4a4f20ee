"""A model directory served and loaded for a while: python -m loadtest.locust.run LOCUST DIRECTORY FOLDER [OPTIONS]

LOCUST: the command, from an environment of its own. FOLDER gets report.html, Locust's CSV files, requests.csv and
report.png. OPTIONS go to Locust; its exit code is this one's, or 2 for limits or a directory that are none.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

from loadtest.local_server import serve_locally
from loadtest.locust.slo import parse_slo

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def main() -> int:
    if len(sys.argv) < 4:
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    locust, directory, folder = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    try:
        return run(locust, directory, folder, sys.argv[4:])
    except (ChildProcessError, ValueError) as error:
        print(f"no load test: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("the load test was interrupted", file=sys.stderr)  # noqa: T201
        return 130


def run(locust: Path, directory: Path, folder: Path, options: list[str]) -> int:
    """Locust's exit code. Raises ValueError for limits that are none, ChildProcessError for what cannot be served."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--slo", default="")
    slo = parser.parse_known_args(options)[0].slo  # the last one, as Locust has it
    parse_slo(slo)
    folder.mkdir(parents=True, exist_ok=True)
    requests, page, picture = (
        folder / name for name in ("requests.csv", "report.html", "report.png")
    )
    for old in (requests, page, picture):
        old.unlink(missing_ok=True)
    with serve_locally(directory) as url:
        ours = ["--host", url, "--headless", "--only-summary", "--requests-csv", str(requests)]
        ours += ["--csv", str(folder / "locust"), "--html", str(page)]
        done = subprocess.run([locust, "-f", LOCUSTFILE, *ours, *options], check=False)  # noqa: S603
    if not requests.exists():
        print(f"no load test: Locust ended with {done.returncode} before it", file=sys.stderr)  # noqa: T201
        return done.returncode or 1
    command = [locust.with_name("python"), "-m", "loadtest.locust.report", requests, picture, slo]
    subprocess.run(command, check=False)  # noqa: S603
    verdict = {0: "every limit was kept", 1: "a limit was missed: see above"}.get(
        done.returncode, "it did not end well"
    )
    written = ", ".join(str(path) for path in (page, picture) if path.exists())
    print(f"{verdict if slo or done.returncode else 'no limits were set'}; {written}")  # noqa: T201
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

"""Load-test a model: python -m kvasir.loadtest.locust.run LOCUST DIRECTORY FOLDER [OPTIONS].

LOCUST is the command, in an environment of its own. FOLDER gets report.html, Locust's CSV files,
requests.csv and report.png. OPTIONS go to Locust. The exit code is Locust's, or 2 for invalid
limits or an unusable directory.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from kvasir.loadtest.locust.slo import parse_slo
from kvasir.server.process.local_server import serve_locally

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def main() -> int:
    """Run the command and return its exit code."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name in ("locust", "directory", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--slo", default="", help="limits; the last one counts, as for Locust")
    ours, options = parser.parse_known_args()
    try:
        parse_slo(ours.slo)
        return _run_locust(ours, options)
    except (ChildProcessError, ValueError) as error:
        print(f"no load test: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("the load test was interrupted", file=sys.stderr)  # noqa: T201
        return 130


def _run_locust(ours: Namespace, options: list[str]) -> int:
    """Serve the directory, load it, draw the report, and return Locust's exit code."""
    ours.folder.mkdir(parents=True, exist_ok=True)
    names = ("requests.csv", "report.html", "report.png")
    requests, page, picture = (ours.folder / name for name in names)
    for old in (requests, page, picture):
        old.unlink(missing_ok=True)
    with serve_locally(ours.directory) as url:
        command = [ours.locust, "-f", LOCUSTFILE, "--host", url, "--headless", "--only-summary"]
        command += ["--requests-csv", requests, "--csv", ours.folder / "locust", "--html", page]
        command += ["--slo", ours.slo, *options]
        code = subprocess.run(command, check=False).returncode  # noqa: S603
    if not requests.exists():
        print(f"no load test: Locust ended with {code} before it", file=sys.stderr)  # noqa: T201
        return code or 1
    report = [ours.locust.with_name("python"), "-m", "kvasir.loadtest.locust.report"]
    subprocess.run([*report, requests, picture, ours.slo], check=False)  # noqa: S603
    verdict = "every limit was kept" if ours.slo else "no limits were set"
    if code:
        verdict = "a limit was missed: see above" if code == 1 else "Locust failed: see above"
    written = ", ".join(str(path) for path in (page, picture) if path.exists())
    print(f"{verdict}; {written}")  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())

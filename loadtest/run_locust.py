"""A model directory served and loaded for a while: python -m loadtest.run_locust LOCUST DIRECTORY FOLDER [OPTIONS]

LOCUST: the command, from an environment of its own. FOLDER gets report.html, Locust's CSV files, requests.csv and
report.png. OPTIONS go to Locust; its exit code is this one's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loadtest.local_server import serve_locally

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def main() -> int:
    if len(sys.argv) < 4:
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    locust, directory, folder = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    requests = folder / "requests.csv"
    with serve_locally(directory) as url:
        options = ["--host", url, "--headless", "--only-summary", "--requests-csv", str(requests)]
        options += ["--csv", str(folder / "locust"), "--html", str(folder / "report.html"), *sys.argv[4:]]
        done = subprocess.run([locust, "-f", LOCUSTFILE, *options], check=False)  # noqa: S603
    python = locust.with_name("python")
    subprocess.run([python, "-m", "loadtest.report", requests, folder / "report.png"], check=True)  # noqa: S603
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

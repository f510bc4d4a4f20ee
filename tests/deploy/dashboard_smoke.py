"""Check that every dashboard query returns data from a Prometheus that scrapes a loaded server.

KVASIR_URL=http://… python -m tests.deploy.dashboard_smoke [SECONDS] loads it for some seconds, and
longer while a query has no data. The server must speculate; make dashboard-smoke starts one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import yaml

from kvasir.loadtest.client import Target, complete
from tests.deploy.checking import ROOT
from tests.deploy.monitoring import RULES, expressions
from tests.deploy.rolling_restart import free_port

SCRAPE = 1  # seconds between scrapes
MOST = 60  # seconds until every query has data
JOB = "smoke/kvasir"  # as a PodMonitor names it
LABELS = {"namespace": "smoke", "pod": "kvasir-0"}


async def load(url: str, until: asyncio.Event) -> int:
    """Send streams in turn: some share a prefix, one in ten is cancelled, one in ten is invalid."""
    n = 0
    while not until.is_set():
        n += 1
        body: dict[str, Any] = {"prompt": "def read(path):\n" * (16 if n % 2 else 2), "seed": n}
        body |= {"max_tokens": 48, "stream": True, "ignore_eos": True}
        body |= {"n": 99} if n % 10 == 5 else {}
        await complete(Target(url), json.dumps(body).encode(), limit=0.02 if n % 10 == 0 else 60.0)
    return n


async def get(client: httpx.AsyncClient, path: str) -> Any:
    """Return the data of an answer of Prometheus."""
    return (await client.get(f"/api/v1/{path}")).raise_for_status().json()["data"]


async def query(client: httpx.AsyncClient, expr: str) -> list[float]:
    """Return the values of an expression's series, without NaN."""
    result = (await get(client, f"query?{urlencode({'query': expr})}"))["result"]
    values = [float(series["value"][1]) for series in result]
    return [value for value in values if not math.isnan(value)]


async def still_empty(
    client: httpx.AsyncClient, queries: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Wait until every query has data; return those that have none in time."""
    until = monotonic() + MOST
    while queries and monotonic() < until:
        queries = [one for one in queries if not await query(client, one[1])]
        await asyncio.sleep(SCRAPE if queries else 0)
    return queries


async def broken_rules(client: httpx.AsyncClient) -> list[str]:
    """Return the rules that cannot be evaluated, with the reason."""
    rules = [rule for group in (await get(client, "rules"))["groups"] for rule in group["rules"]]
    return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]


def lasting(alerts: list[dict[str, Any]]) -> list[str]:
    """Return alerts without new ones: in one scrape of a hundred more wait than run."""
    since = datetime.now(UTC) - timedelta(seconds=5 * SCRAPE)
    return [
        f"{one['labels']['alertname']} is {one['state']}"
        for one in alerts
        if datetime.fromisoformat(one["activeAt"]) < since
    ]


def scrapes(target: str) -> list[dict[str, Any]]:
    """Return two jobs with one target, which joins must keep apart."""
    targets = [{"targets": [target], "labels": LABELS}]
    return [{"job_name": name, "static_configs": targets} for name in (JOB, "another-job")]


async def main(url: str, seconds: float) -> int:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            "global": {"scrape_interval": f"{SCRAPE}s", "evaluation_interval": f"{SCRAPE}s"},
            "rule_files": [str(ROOT / RULES)],
            "scrape_configs": scrapes(urlsplit(url).netloc),
        }
        path = Path(folder) / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}"]
        process = await asyncio.create_subprocess_exec(*command, stderr=DEVNULL, stdout=DEVNULL)
        until = asyncio.Event()
        clients = [asyncio.create_task(load(url, until)) for _ in range(4)]
        try:
            await asyncio.sleep(seconds)
            prometheus = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=prometheus, timeout=60) as client:
                queries = list(expressions(ROOT, job=JOB, **LABELS))
                empty = await still_empty(client, queries)
                alerts = lasting((await get(client, "alerts"))["alerts"])
                broken = await broken_rules(client)
        finally:
            until.set()
            n_requests = sum(await asyncio.gather(*clients))
            process.terminate()
            await process.wait()
    figures = f"{len(queries)} queries, {len(empty)} without data"
    print(f"{n_requests} requests; {figures}")  # noqa: T201
    for panel, expr in empty:
        print(f"  {panel}: {expr}")  # noqa: T201
    print(f"{len(alerts)} alerts", *alerts, *broken, sep="\n  ")  # noqa: T201
    return int(bool(empty or alerts or broken))


if __name__ == "__main__":
    if shutil.which("prometheus") is None:
        sys.exit("this needs prometheus, which Debian has under that name")
    sys.exit(asyncio.run(main(os.environ["KVASIR_URL"], float([*sys.argv, "60"][1]))))

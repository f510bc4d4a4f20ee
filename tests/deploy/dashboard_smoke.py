"""A real Prometheus scrapes a loaded server that speculates, then every query of the dashboards must return data.

KVASIR_URL=http://… python -m tests.deploy.dashboard_smoke [SECONDS]; make dashboard-smoke starts the server too.
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
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import yaml

from loadtest.sse_client import Target, complete
from tests.deploy.rolling_restart import free_port
from tests.deploy.validate import RULES, expressions

SCRAPE = 1  # seconds between two
JOB = "smoke/kvasir"  # as a PodMonitor names it
LABELS = {"namespace": "smoke", "pod": "kvasir-0"}


async def load(url: str, until: asyncio.Event) -> int:
    """Streams, one after the other; some beginnings are shared, one in ten is left early, one in ten is refused."""
    n = 0
    while not until.is_set():
        n += 1
        body: dict[str, Any] = {
            "prompt": "def read(path):\n" * (16 if n % 2 else 2),
            "max_tokens": 48,
            "stream": True,
        }
        body |= {"ignore_eos": True, "seed": n} | ({"n": 99} if n % 10 == 5 else {})
        await complete(Target(url), json.dumps(body).encode(), limit=0.02 if n % 10 == 0 else 60.0)
    return n


async def query(client: httpx.AsyncClient, prometheus: str, expr: str) -> list[float]:
    answer = await client.get(f"{prometheus}/api/v1/query?{urlencode({'query': expr})}")
    values = [
        float(series["value"][1]) for series in answer.raise_for_status().json()["data"]["result"]
    ]
    return [value for value in values if not math.isnan(value)]


async def sick_rules(client: httpx.AsyncClient, prometheus: str) -> list[str]:
    """Rules that could not be evaluated, and why."""
    groups = (
        (await client.get(f"{prometheus}/api/v1/rules")).raise_for_status().json()["data"]["groups"]
    )
    rules = [rule for group in groups for rule in group["rules"]]
    return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]


def scrapes(target: str) -> list[dict[str, Any]]:
    """Two jobs with one target: joins have to tell them apart."""
    targets = [{"targets": [target], "labels": LABELS}]
    return [{"job_name": name, "static_configs": targets} for name in (JOB, "whoever-else")]


async def main(url: str, seconds: float) -> int:
    port = free_port()
    prometheus = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            "global": {"scrape_interval": f"{SCRAPE}s", "evaluation_interval": f"{SCRAPE}s"}
        }
        config |= {"rule_files": [str(RULES)], "scrape_configs": scrapes(urlsplit(url).netloc)}
        path = Path(folder) / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        options = [
            f"--config.file={path}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        process = await asyncio.create_subprocess_exec(
            "prometheus", *options, stderr=DEVNULL, stdout=DEVNULL
        )
        until = asyncio.Event()
        clients = [asyncio.create_task(load(url, until)) for _ in range(4)]
        try:
            await asyncio.sleep(seconds)
            async with httpx.AsyncClient() as client:
                queries = list(expressions(job=JOB, **LABELS))
                empty = [
                    (panel, expr)
                    for panel, expr in queries
                    if not await query(client, prometheus, expr)
                ]
                alerts = await query(client, prometheus, "ALERTS")
                sick = await sick_rules(client, prometheus)
        finally:
            until.set()
            n_requests = sum(await asyncio.gather(*clients))
            process.terminate()
            await process.wait()
    print(  # noqa: T201
        f"{n_requests} requests in {seconds:g} s; {len(queries)} queries, {len(empty)} without data"
    )
    for panel, expr in empty:
        print(f"  {panel}: {expr}")  # noqa: T201
    print(f"{len(alerts)} alerts", *sick, sep="\n  ")  # noqa: T201
    return int(bool(empty or alerts or sick))


if __name__ == "__main__":
    if shutil.which("prometheus") is None:
        sys.exit("this needs prometheus, which Debian has under that name")
    sys.exit(
        asyncio.run(
            main(os.environ["KVASIR_URL"], float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
        )
    )

"""Web pages of other origins that call a server without keys through their reader's browser."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx

from tests.faults.bodies import VALID
from tests.faults.client import Site
from tests.faults.report import Report

_READS = ("/debug/batch", "/version", "/v1/models", "/model", "/info", "/openapi.json", "/nothing")
_NAMES = (
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost"),
    *("evil.example:80", "EVIL.example.", "localhost@evil.example", "127.0.0.1x", "[::1].evil"),
    *("allowed.example.evil.example", "notallowed.example", "x.allowed.example", "below.example"),
    *("\xfc.example", "a b", "*", "localhost,evil.example", "%6c%6fcalhost", "0x7f.1"),
)
_ORIGINS = (
    *("https://evil.example", "null", "http://localhost", "http://localhost.evil.example:8000"),
    *("http://127.0.0.1:1", "http://localhost:1", "https://page.example.evil.example"),
    *("http://page.example", "file://", "chrome-extension://abc", "https://page.example:8443"),
)
ALLOWED: dict[str, Any] = {  # settings of the server, which has no keys
    "allowed_hosts": "allowed.example, *.below.example",
    "cors_origins": "https://page.example",
}


async def foreign_pages(site: Site, n: int, report: Report) -> None:
    """Send n requests as browsers would for hostile pages: all are refused."""
    async with site.http(None) as client:
        for _ in range(n):
            report.tried += 1
            await _attack(client, site.chance, report)
        for headers in _welcome(site.port):
            answer = await client.post(
                "/v1/completions", json=VALID["/v1/completions"], headers=headers
            )
            report.check(answer.status_code == 200, f"{headers} got {answer.status_code}")
        metrics = (await client.get("/metrics")).text
    told = re.findall(
        r'^kvasir_requests_rejected_total\{.*"permission_error".*\} (\S+)$', metrics, re.MULTILINE
    )
    report.check(sum(map(float, told)) == n, f"{told} of {n} refusals are in the metrics")


async def _attack(client: httpx.AsyncClient, chance: random.Random, report: Report) -> None:
    headers = {"content-type": "text/plain"}
    path = chance.choice(list(VALID))
    if is_rebound := chance.random() < 0.5:  # under a name that points here: the same origin
        path = chance.choice((*VALID, *_READS, "/", "/static/app.js"))
        headers["host"] = chance.choice(_NAMES)
        site = chance.choice(("same-origin", "none", None))
        origin = chance.choice((f"http://{headers['host']}", None))
    else:
        site = chance.choice(("cross-site", "same-site", None))
        origin = chance.choice(_ORIGINS)
    if site is not None:
        headers["sec-fetch-site"] = site
    if origin is not None:
        headers["origin"] = origin
    raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    is_read = is_rebound and path not in VALID
    body = None if is_read else json.dumps(VALID[path]).encode()
    answer = await client.request("GET" if is_read else "POST", path, content=body, headers=raw)
    allowed = answer.headers.get("access-control-allow-origin")
    report.statuses[answer.status_code] += 1
    is_refused = answer.status_code == 403 and allowed is None
    report.check(is_refused, f"{path} {headers}: {answer.status_code}, readable by {allowed}")


def _welcome(port: int) -> list[dict[str, str]]:
    """Return the headers of requests that must be answered."""
    at = f"127.0.0.1:{port}"
    hosts = (at, "127.9.9.9", "[::1]:8000", "[fd00::1]", "10.1.2.3:80", "localhost", "LocalHost:1")
    names = ("localhost.", "allowed.example", "Allowed.Example:8000", "a.b.below.example")
    return [
        *({"host": host} for host in (*hosts, *names)),
        {"origin": f"http://{at}"},
        {"origin": f"http://{at}", "sec-fetch-site": "same-origin"},
        {"origin": "https://published.example", "sec-fetch-site": "same-origin"},  # by a proxy
        {"sec-fetch-site": "none"},
        {"origin": "https://page.example", "sec-fetch-site": "cross-site"},
        {"origin": "https://page.example"},
    ]

"""The Compose files, checked against the server, the image, the disk and each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from tests.deploy.checking import parse
from tests.deploy.dockerfile import read_stages
from tests.deploy.server_container import ServerContainer
from tests.deploy.shapes import SHAPES, misfits

BASE = "docker-compose.yml"
OVERLAYS = tuple(f"docker-compose.{name}.yml" for name in ("gpu", "key", "models", "shared"))
VARIABLE = re.compile(r"\$\{\w+(?::?([-+])([^{}]*))?\}")
PATH = re.compile(r"(?<![\w/.:])/[a-z][\w./-]*")  # in a container, not in a URL
ADDRESS = re.compile(r"(?:http://|[\"'])([a-z][a-z.]*):(\d+)")
# What programs read or write without being told.
UNTOLD = {
    "server": "/models/stdlib", "prometheus": "/prometheus", "redis": "/data",
    "grafana": "/etc/grafana/provisioning/(datasources|dashboards)/.+[.]yaml",
}  # fmt: skip
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(duration: str) -> float:
    return float(duration[:-1]) * UNITS[duration[-1]]


def interpolate(text: str) -> str:
    """Replace variables as Compose does when none is set."""
    while (replaced := VARIABLE.sub(lambda m: m[2] if m[1] == "-" else "", text)) != text:
        text = replaced
    return text


def merge(base: Any, other: Any) -> Any:
    """Merge two Compose files as Compose does."""
    if isinstance(base, dict) and isinstance(other, dict):
        same = {key: merge(base[key], other[key]) for key in base.keys() & other.keys()}
        return base | other | same
    return base + other if isinstance(base, list) and isinstance(other, list) else other


def compose_faults(root: Path) -> Iterator[str]:
    """Yield what is wrong in docker-compose.yml, and in each overlay on top of it."""
    files = {path.name: path.read_text(encoding="utf-8") for path in root.glob("docker-compose*")}
    documents = {name: parse(interpolate(text)) for name, text in files.items()}
    if documents.keys() != {BASE, *OVERLAYS}:
        yield f"the files are {sorted(documents)}"
    for config in documents[BASE].get("configs", {}).values():
        config["content"] = parse(config["content"])
    for name in (BASE, *OVERLAYS):
        document = merge(documents[BASE], documents[name] if name != BASE else {})
        wrong = list(misfits(document, SHAPES["compose"], "compose"))
        for fault in wrong or document_faults(document, root):
            yield f"{name}: {fault}"


def document_faults(document: dict[str, Any], root: Path) -> Iterator[str]:
    """Yield wrong relations in a document whose fields are right."""
    services, configs = document["services"], document["configs"]
    server, health = services["server"], services["server"]["healthcheck"]
    stage = read_stages(root / "Dockerfile")[server["build"]["target"]]
    tested = re.search(r"127\.0\.0\.1:8000([a-z/]*)'.*timeout=(\d+)", health["test"][-1])
    path, limit = tested.groups() if tested else ("", "0")
    yield from ServerContainer(
        stage.environment | server["environment"], [*stage.copies.values(), *mounts(server)],
        ["/tmp", *named_volumes(server)],  # noqa: S108
        {8000}, {"healthcheck": path}, seconds(server["stop_grace_period"]),
    ).faults()  # fmt: skip
    waits = [float(limit), *(seconds(health[name]) for name in ("timeout", "interval"))]
    start = [seconds(health[name]) for name in ("start_interval", "start_period")]
    if waits != sorted(set(waits)) or waits[2] > 30 or start[0] > 5 or not 60 <= start[1] <= 600:
        yield f"the health check waits for {waits} s, and at the start for {start} s"
    if server["memswap_limit"] != server["mem_limit"]:
        yield f"the server may take {server['memswap_limit']} with swap"
    scraped = configs["prometheus"]["content"]
    if max(map(seconds, scraped["global"].values())) > 60:
        yield f"Prometheus reads or evaluates too seldom for the alerts: {scraped['global']}"
    if "targets': ['server:8000']" not in str(scraped):
        yield f"Prometheus does not scrape the server: {scraped['scrape_configs']}"
    told = {name: told_to(service, configs) for name, service in services.items()}
    for name, service in services.items():
        for fault in path_faults(service, told[name], UNTOLD.get(name, "none"), root):
            yield f"{name}: {fault}"
    for kind, field in (("configs", "source"), ("secrets", "source"), ("volumes", "volume")):
        used = [one for service in services.values() for one in service.get(kind, ())]
        named = {one[field] for one in used if isinstance(one, dict) and field in one}
        named |= {one.split(":")[0] for one in used if isinstance(one, str)}
        if named != document.get(kind, {}).keys():
            yield f"the services use the {kind} {sorted(named)}"
    ports = [(name, port) for name, one in services.items() for port in one.get("ports", ())]
    listening = {(name, port.rpartition(":")[2]) for name, port in ports}
    if unknown := {*ADDRESS.findall(str(told))} - listening:
        yield f"nothing listens on {unknown}"
    text = "".join(path.read_text() for path in (root / "loadtest/locust").glob("*.py"))
    for name in services["load"].get("environment", ()):
        if f'"{name}"' not in text:
            yield f"the load test does not read {name}"


def told_to(service: dict[str, Any], configs: dict[str, Any]) -> str:
    """Return what a service reads of its command, environment and configurations."""
    given = [configs.get(one["source"]) for one in service.get("configs", ())]
    return str([service.get("command"), service.get("environment"), given])


def path_faults(service: dict[str, Any], told: str, untold: str, root: Path) -> Iterator[str]:
    """Yield paths that are on no mount or not on the disk, and mounts that nothing reads."""
    paths = {path.rstrip("./") for path in PATH.findall(told)}
    found = mounts(service)
    scratch = {entry.split(":")[0]: "" for entry in service.get("tmpfs", ())}
    for path in paths:
        at = [one for one in found | scratch if PurePosixPath(path).is_relative_to(one)]
        source = found.get(at[0]) if at else ""
        if not at or (source and not (root / f"{source}{path[len(at[0]) :]}").exists()):
            yield f"{path} is not on {sorted(found)}"
    for target, source in found.items():
        is_told = any(PurePosixPath(path).is_relative_to(target) for path in paths)
        if not is_told and not re.fullmatch(untold, target):
            yield f"nothing reads {target}"
        if not (root / source).exists():
            yield f"{source} does not exist"


def named_volumes(service: dict[str, Any]) -> list[str]:
    """Return where a service may write what outlives it."""
    return [one.split(":")[1] for one in service.get("volumes", ()) if isinstance(one, str)]


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return where something is mounted in a service, each with its source on the disk, or ""."""
    found = {f"/run/secrets/{name}": "" for name in service.get("secrets", ())}
    found |= {one["target"]: "" for one in service.get("configs", ())}
    found |= dict.fromkeys(named_volumes(service), "")
    for one in service.get("volumes", ()):
        if not isinstance(one, str):
            found[one["target"]] = "" if "bind" in one else one["source"]
    return found

"""The Compose files, checked against the server, the image and each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.dockerfile import read_stages
from tests.deploy.server_container import PATHS, ServerContainer

VARIABLE = re.compile(r"\$\{\w+(?::?([-+])([^{}]*))?\}")
OVERLAYS = (
    *(None, "docker-compose.gpu.yml"),
    *("docker-compose.key.yml", "docker-compose.models.yml"),
)
LOCKED = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


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
    documents = {name: yaml.safe_load(interpolate(text)) for name, text in files.items()}
    for overlay in OVERLAYS:
        document = merge(documents["docker-compose.yml"], documents.get(overlay or "", {}))
        for fault in document_faults(document, root):
            yield f"{overlay or 'docker-compose.yml'}: {fault}"


def document_faults(document: dict[str, Any], root: Path) -> Iterator[str]:
    """Yield what is wrong in a file whose variables are replaced."""
    services = document["services"]
    server = services["server"]
    stage = read_stages(root / "Dockerfile")[server["build"]["target"]]
    keys = [f"/run/secrets/{name}" for name in server.get("secrets", ())]
    test = server["healthcheck"]["test"][-1]
    port, path = re.findall(r"127\.0\.0\.1:([0-9]+)([a-z/]*)", test)[0]
    container = ServerContainer(
        stage.environment | server["environment"],
        [*stage.copies.values(), *targets(server), *keys],
        {int(port), *(int(entry.rpartition(":")[2]) for entry in server["ports"])},
        {"healthcheck": path},
        float(server["stop_grace_period"].removesuffix("s")),
    )
    yield from container.faults()
    if missing := set(server.get("secrets", ())) - document.get("secrets", {}).keys():
        yield f"no secret {sorted(missing)}"
    if {key: server.get(key) for key in LOCKED} != LOCKED or server["user"].startswith("0"):
        yield f"the server runs without some of {LOCKED}, or as root"
    volumes = [one for service in services.values() for one in service.get("volumes", ())]
    for volume in volumes:  # the others have a name, or are written to
        if "read_only" in volume and not (root / volume["source"]).exists():
            yield f"{volume['source']} does not exist"
    yield from prometheus_faults(document, container.ports)
    text = "".join(path.read_text() for path in (root / "loadtest/locust").glob("*.py"))
    for name in services["load"].get("environment", ()):
        if f'"{name}"' not in text:
            yield f"the load test does not read {name}"
    published = {
        (name, entry.rpartition(":")[2])
        for name in services
        for entry in services[name].get("ports", ())
    }
    for host, number in re.findall(r"http://([a-z][a-z.]*):(\d+)", str(document)):
        if (host, number) not in published:
            yield f"nothing listens on {host}:{number}"


def prometheus_faults(document: dict[str, Any], ports: set[int]) -> Iterator[str]:
    """Yield wrong targets and paths in Prometheus' configuration."""
    prometheus = document["services"]["prometheus"]
    configuration = yaml.safe_load(document["configs"]["prometheus"]["content"])
    mounted = {*targets(prometheus), *(one["target"] for one in prometheus["configs"])}
    read = {*configuration["rule_files"], prometheus["command"][0].removeprefix("--config.file=")}
    if unread := read - mounted:
        yield f"Prometheus reads {sorted(unread)}, and {sorted(mounted)} are mounted"
    for job in configuration["scrape_configs"]:
        addresses = [target for one in job["static_configs"] for target in one["targets"]]
        if addresses != [f"server:{port}" for port in ports]:
            yield f"Prometheus scrapes {addresses}"
        if job.get("metrics_path", "/metrics") not in PATHS:
            yield f"Prometheus scrapes {job['metrics_path']}"


def targets(service: dict[str, Any]) -> list[str]:
    """Return where a service's volumes are mounted."""
    volumes = service.get("volumes", ())
    return [one["target"] if isinstance(one, dict) else one.split(":")[1] for one in volumes]

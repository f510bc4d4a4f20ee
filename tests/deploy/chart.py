"""The chart as Helm renders it: its objects, the values and the image that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.deploy.server_container import ServerContainer

Object = dict[str, Any]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
FACTORS = {"": 1.0, "m": 1e-3, "k": 1e3}
FACTORS |= {prefix: 1e3**i for i, prefix in enumerate("MGTPE", 2)}
FACTORS |= {f"{prefix}i": 2.0 ** (10 * i) for i, prefix in enumerate("KMGTPE", 1)}


def quantity(text: str | float) -> float:
    """Parse a quantity of Kubernetes."""
    number = str(text).rstrip("".join(set("".join(FACTORS))))
    return float(number) * FACTORS[str(text)[len(number) :]]


def one(objects: list[Object], kind: str) -> Object:
    """Return the first object of a kind."""
    return next(document for document in objects if document["kind"] == kind)


def variables(container: Object) -> dict[str, str]:
    """Return the environment of a container."""
    return {entry["name"]: entry["value"] for entry in container.get("env", ())}


@dataclass(frozen=True)
class Chart:
    """The rendered objects, the values that they come from, and the image's environment."""

    objects: list[Object]
    values: Object
    image: dict[str, str]

    def of(self, *kinds: str) -> list[Object]:
        return [document for document in self.objects if document["kind"] in kinds]

    def names(self, kind: str) -> set[str]:
        return {document["metadata"]["name"] for document in self.of(kind)}

    @cached_property
    def deployment(self) -> Object:
        return one(self.objects, "Deployment")

    @cached_property
    def pods(self) -> list[Object]:
        """The specifications of the server's pods and of the test's."""
        return [self.deployment["spec"]["template"]["spec"], one(self.objects, "Pod")["spec"]]

    @cached_property
    def container(self) -> Object:
        """The server's container."""
        container: Object = self.pods[0]["containers"][0]
        return container

    @property
    def pause_seconds(self) -> float:
        """The time between a pod's removal from the endpoints and its signal to stop."""
        hook = self.container.get("lifecycle", {}).get("preStop", {})
        return float(hook.get("sleep", {}).get("seconds", 0))

    @cached_property
    def server(self) -> ServerContainer:
        """Return what the server has to agree with."""
        mounts, probes = (
            self.container.get("volumeMounts") or (),
            [name for name in PROBES if name in self.container],
        )
        return ServerContainer(
            self.image | variables(self.container),
            [self.image["KVASIR_MODEL"], *(m["mountPath"] for m in mounts if m.get("readOnly"))],
            [mount["mountPath"] for mount in mounts if not mount.get("readOnly")],
            {port["containerPort"] for port in self.container["ports"]},
            {name: self.container[name]["httpGet"]["path"] for name in probes},
            self.pods[0]["terminationGracePeriodSeconds"] - self.pause_seconds,
        )

"""A container that runs the server, checked against the server's own routes and settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import get_args
from unittest.mock import patch

from kvasir.server.api.routes import ROUTES
from kvasir.server.errors import StartupError
from kvasir.server.settings import Settings, load_settings

PATHS = {route.path for route in ROUTES} | {"/static"}
PROBES = {
    "startupProbe": "/health/startup", "readinessProbe": "/health/ready",
    "livenessProbe": "/health/live", "healthcheck": "/health/ready",
}  # fmt: skip
# Beyond its drain timeout the server may take 12, and for a trace collector 8 (docs/operations.md).
EXIT_SECONDS = 20
FILES = [
    name for name, of in Settings.model_fields.items()
    if Path in (of.annotation, *get_args(of.annotation)) and name != "model"
]  # fmt: skip


@dataclass(frozen=True)
class ServerContainer:
    """The facts of a container that the server has to agree with."""

    environment: dict[str, str]
    folders: list[str]  # where the image or a read-only mount has files
    writable: list[str]  # where a mount may be written to
    ports: set[int]  # that others connect to
    probes: dict[str, str]  # the path of each
    grace_seconds: float  # from the signal to the kill

    @cached_property
    def settings(self) -> Settings:
        with patch.dict(os.environ, self.environment, clear=True):
            return load_settings()

    def faults(self) -> Iterator[str]:
        """Yield each disagreement with the server."""
        try:
            settings = self.settings
        except StartupError as error:
            yield str(error)
            return
        if self.ports != {settings.port} or settings.host != "::":
            yield f"it listens on {settings.host}:{settings.port}, others connect to {self.ports}"
        for name, path in self.probes.items():
            if path not in PATHS or path != PROBES[name]:
                yield f"{name} asks {path} instead of {PROBES[name]}"
        models = [("model", path) for path in settings.models.values()]
        for name, path in [*models, *((name, getattr(settings, name)) for name in FILES)]:
            mounts = self.writable if name.endswith("_dir") else self.folders
            if path and not any(PurePosixPath(path).is_relative_to(at) for at in mounts):
                yield f"{name} is {path}, which is on none of these mounts: {mounts}"
        if "KVASIR_CACHE_DIR" not in self.environment:
            yield "no cache_dir: the home directory cannot hold a model"
        if self.grace_seconds < settings.drain_timeout + EXIT_SECONDS:
            yield (
                f"it is killed after {self.grace_seconds} s, and needs up to "
                f"{settings.drain_timeout + EXIT_SECONDS} s"
            )

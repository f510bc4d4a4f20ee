"""Names of models in stores, as hf://org/name@revision, and the error of everything that pulls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# A pathlib.Path keeps one of the two slashes.
_FORM = re.compile(r"(hf|oci|s3):/{1,2}(.+?)/*")
_REVISION = r"@(?P<revision>refs/\w+/[^/@]+|[^/@]+)"
_PLACES = {
    "hf": (
        rf"(?P<name>[\w.-]+/[\w.-]+)({_REVISION})?(/(?P<file>.+\.gguf))?",
        "org/name[@revision]",
    ),
    "oci": (r"[^/]+/(.+/)?(?P<name>[^/:@]+)(:[^/:@]+)?(@sha256:[0-9a-f]{64})?", "host/name[:tag]"),
    "s3": (r"[^/]+(/.+)?/(?P<name>[^/]+)", "bucket/prefix"),
}


class DownloadError(Exception):
    """A model that cannot be pulled; one line with its reference and the remedy."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A model in a store. place: the reference without its scheme."""

    scheme: str
    place: str
    name: str  # the id under which it is served
    revision: str | None = None  # of the hub
    file: str | None = None  # a GGUF file of the hub

    @classmethod
    def parse(cls, text: str | Path) -> Self | None:
        """Return the reference in a text, or None for a path. Raises DownloadError."""
        if (match := _FORM.fullmatch(str(text))) is None:
            return None
        scheme, place = match.groups()
        form, shown = _PLACES[scheme]
        if (parts := re.fullmatch(form, place)) is None:
            raise DownloadError(f"{scheme}://{place} is not of the form {scheme}://{shown}")
        return cls(scheme, place, **parts.groupdict())

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"

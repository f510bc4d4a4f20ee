"""Models of an OCI registry, as `oras push` writes them: a layer for each file, with its title.

Credentials are those of ~/.docker/config.json.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from model.download.reference import DownloadError, Reference
from model.download.transfer import RemoteFile, digest

_NAMES = ("org.opencontainers.image.title", "org.cncf.model.filepath")  # annotations
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)
_TIMEOUT = 30  # seconds
_LOCAL = ("localhost", "127.0.0.1", "[::1]")  # without TLS, as with docker


def list_oci(reference: Reference) -> tuple[str, dict[str, RemoteFile]]:
    """Return the revision of a model, and its files by name. Raises DownloadError."""
    import requests  # noqa: PLC0415  which oras brings
    from oras.provider import Registry  # noqa: PLC0415  of the extra oci

    logging.getLogger("oras").setLevel(logging.CRITICAL)  # its errors are raised, too

    host = reference.place.partition("/")[0]
    insecure = host.rpartition(":")[0] in _LOCAL or host in _LOCAL
    try:
        asked = requests.get(f"http{'' if insecure else 's'}://{host}/v2/", timeout=_TIMEOUT)
    except OSError as error:
        raise DownloadError(f"{reference} cannot be reached: {error}") from None
    is_basic = asked.headers.get("WWW-Authenticate", "").lower().startswith("basic")
    registry: Any = Registry(insecure=insecure, auth_backend="basic" if is_basic else "token")
    # Without its retries, which last minutes.
    registry.do_request = partial(Registry.do_request.__wrapped__, registry)
    container = registry.get_container(reference.place)
    registry.auth.load_configs(container)
    url = f"{registry.prefix}://{container.manifest_url()}"
    try:
        with _get(registry, reference, url, {"Accept": _MANIFESTS}) as response:
            content: bytes = response.content
    except OSError as error:
        raise DownloadError(f"{reference} cannot be reached: {error}") from None
    revision = hashlib.sha256(content).hexdigest()
    if container.digest and container.digest != f"sha256:{revision}":
        raise DownloadError(f"{reference}: the registry's manifest has the hash {revision}")
    files = {}
    for layer in json.loads(content).get("layers", ()):
        notes = layer.get("annotations") or {}
        name = next((notes[key] for key in _NAMES if key in notes), None)
        algorithm, _, expected = layer["digest"].partition(":")
        if name is None or algorithm not in ("sha256", "sha512"):
            continue
        blob = f"{registry.prefix}://{container.get_blob_url(layer['digest'])}"
        files[name] = RemoteFile(
            layer["size"],
            partial(_read, registry, reference, blob),
            partial(_matches, algorithm, expected),
        )
    if not files:
        raise DownloadError(
            f"{reference} has no layer with a title, so its files have no names; push the model's "
            "folder with: oras push"
        )
    return revision, files


def _matches(algorithm: str, expected: str, path: Path) -> bool:
    return digest(path, algorithm) == expected


def _read(registry: Any, reference: Reference, url: str, start: int) -> Iterable[bytes]:
    headers = {"Range": f"bytes={start}-"} if start else {}
    with _get(registry, reference, url, headers) as response:
        skipped = start if response.status_code == 200 else 0  # it knows no ranges
        for chunk in response.iter_content(2**16):
            if kept := chunk[skipped:]:
                yield kept
            skipped = max(0, skipped - len(chunk))


def _get(registry: Any, reference: Reference, url: str, headers: dict[str, str]) -> Any:
    """Return a response. Raises OSError where another attempt may help, or else DownloadError."""
    try:
        response = registry.do_request(url, headers=headers, stream=True)
    except (AttributeError, ValueError):  # the library's words for missing credentials
        raise DownloadError(
            f"{reference} needs credentials: write them with docker login or oras login"
        ) from None
    if response.status_code in (200, 206):
        return response
    answer = f"the registry answers {response.status_code} {response.reason}"
    if response.status_code >= 500:
        raise OSError(answer)
    raise DownloadError(
        f"{reference}: {answer}; check the name and the tag, and log in to a private one with "
        "docker login"
    )

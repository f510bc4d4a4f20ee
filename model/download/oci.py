"""Models of an OCI registry, as `oras push` writes them: a layer for each file, with its title.

Credentials are those of ~/.docker/config.json.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from kvasir.model.download.reference import DownloadError, Reference
from kvasir.model.download.transfer import CHUNK, RemoteFile, digest, from_offset, read_whole
from kvasir.model.platform.suggestions import first_problem

_NAMES = ("org.opencontainers.image.title", "org.cncf.model.filepath")  # annotations
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)
_TIMEOUT = 30  # seconds
_LOCAL = ("localhost", "127.0.0.1", "[::1]")  # without TLS, as with docker


class _Layer(BaseModel, strict=True):
    size: int = Field(ge=0)
    digest: str = Field(pattern=r"^\w+:[0-9a-f]+$")
    annotations: dict[str, str] | None = None


class _Manifest(BaseModel, title="it"):
    layers: list[_Layer] = []


def list_oci(reference: Reference) -> tuple[str, dict[str, RemoteFile]]:
    """Return the revision of a model, and its files by name. Raises DownloadError."""
    from oras.auth import get_auth_backend  # noqa: PLC0415  of the extra oci
    from oras.provider import Registry  # noqa: PLC0415

    logging.getLogger("oras").setLevel(logging.CRITICAL)  # its errors are raised, too

    host = reference.place.partition("/")[0]
    insecure = host.rpartition(":")[0] in _LOCAL or host in _LOCAL
    registry: Any = Registry(insecure=insecure)
    guard(registry.session, is_local=insecure)
    # Without its retries, which last minutes.
    registry.do_request = partial(Registry.do_request.__wrapped__, registry)
    container = registry.get_container(reference.place)
    url = f"{registry.prefix}://{container.manifest_url()}"
    try:
        asked = registry.session.get(f"{registry.prefix}://{host}/v2/", timeout=_TIMEOUT)
        if asked.headers.get("WWW-Authenticate", "").lower().startswith("basic"):
            registry.auth = get_auth_backend("basic", registry.session, insecure)
        registry.auth.load_configs(container)
        with _get(registry, reference, url, {"Accept": _MANIFESTS}) as response:
            content = read_whole(url, response.iter_content(CHUNK))
    except OSError as error:
        raise DownloadError(f"{reference} cannot be reached: {error}") from None
    revision = hashlib.sha256(content).hexdigest()
    if container.digest and container.digest != f"sha256:{revision}":
        raise DownloadError(f"{reference}: the registry's manifest has the hash {revision}")
    try:
        layers = _Manifest.model_validate_json(content).layers
    except ValidationError as error:
        problem = first_problem(error)
        raise DownloadError(f"{reference}: its manifest is malformed: {problem}") from None
    files = {}
    for layer in layers:
        notes = layer.annotations or {}
        name = next((notes[key] for key in _NAMES if key in notes), None)
        algorithm, _, expected = layer.digest.partition(":")
        if name is not None and algorithm in ("sha256", "sha512"):
            blob = f"{registry.prefix}://{container.get_blob_url(layer.digest)}"
            files[name] = RemoteFile(
                layer.size,
                partial(_read, registry, reference, blob),
                partial(_matches, algorithm, expected),
            )
    if not files:
        raise DownloadError(
            f"{reference} has no layer with a title, so its files have no names; push the model's "
            "folder with: oras push"
        )
    return revision, files


def guard(session: Any, *, is_local: bool) -> None:
    """Bound what a session reads of an answer that is no file; with TLS it leads only to TLS."""
    session.headers["Accept-Encoding"] = "identity"
    session.hooks["response"].append(_read_small)
    if not is_local:
        del session.adapters["http://"]


def _read_small(response: Any, *, stream: bool = False, **_: object) -> None:
    """Read a response that the library would read without a limit, such as a redirect's."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        response.close()
        raise DownloadError(f"{response.url} sends a compressed answer, which nobody asked for")
    if not stream or response.status_code not in (200, 206):
        with response:
            response._content = read_whole(response.url, response.iter_content(CHUNK))


def _matches(algorithm: str, expected: str, path: Path) -> bool:
    return digest(path, algorithm) == expected


def _read(registry: Any, reference: Reference, url: str, start: int) -> Iterable[bytes]:
    headers = {"Range": f"bytes={start}-"} if start else {}
    with _get(registry, reference, url, headers) as response:
        is_part = response.status_code == 206
        yield from from_offset(0 if is_part else start, response.iter_content(CHUNK))


def _get(registry: Any, reference: Reference, url: str, headers: dict[str, str]) -> Any:
    """Return a response. Raises OSError where another attempt may help, or else DownloadError."""
    try:
        response = registry.do_request(url, headers=headers, stream=True)
    except OSError:
        raise
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

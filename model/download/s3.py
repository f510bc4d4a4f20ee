"""Models under a prefix of an S3 bucket; keys, region and endpoint are boto3's, as AWS_PROFILE."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from model.download.reference import DownloadError, Reference
from model.download.transfer import RemoteFile, digest


def list_s3(reference: Reference) -> tuple[str, dict[str, RemoteFile]]:
    """Return the revision of a model, and its files by name. Raises DownloadError."""
    import boto3  # noqa: PLC0415  of the extra s3
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    bucket, _, prefix = reference.place.partition("/")
    session = boto3.Session()
    public = None if session.get_credentials() else Config(signature_version=UNSIGNED)
    try:
        with _os_errors():
            client = session.client("s3", config=public)
            lister = client.get_paginator("list_objects_v2")
            pages = lister.paginate(Bucket=bucket, Prefix=f"{prefix}/")
            listed = [item for page in pages for item in page.get("Contents", ())]
    except OSError as error:
        raise DownloadError(f"{reference} cannot be listed: {error}") from None
    if not listed:
        raise DownloadError(f"{reference} holds nothing; check the bucket and the prefix")
    files, stamps = {}, []
    for item in sorted(listed, key=lambda item: str(item["Key"])):
        name, place = item["Key"].removeprefix(f"{prefix}/"), {"Bucket": bucket, "Key": item["Key"]}
        if not name or name.endswith("/"):  # consoles write empty objects in place of folders
            continue
        files[name] = RemoteFile(
            item["Size"],
            partial(_read, client, place | {"IfMatch": item["ETag"]}),
            partial(_matches, client, place),
        )
        stamps.append(f"{name} {item['ETag']} {item['Size']}")
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest(), files


def _read(client: Any, place: dict[str, str], start: int) -> Iterable[bytes]:
    with _os_errors():
        body = client.get_object(**place, Range=f"bytes={start}-")["Body"]
        yield from body.iter_chunks(2**20)


@contextmanager
def _os_errors() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  of the extra s3

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise OSError(str(error)) from None


def _matches(client: Any, place: dict[str, str], path: Path) -> bool:
    """Compare a copy with the SHA-256 that S3 has of it, or else with its ETag.

    The ETag is the MD5, of an object in parts that of their MD5s; with keys of KMS it is neither,
    and what TLS brought is believed.
    """
    with _os_errors():
        head = client.head_object(**place, ChecksumMode="ENABLED")
        first = client.head_object(**place, PartNumber=1) if "-" in head["ETag"] else {}
    checksum = head.get("ChecksumSHA256")
    if checksum and "-" not in checksum:
        return base64.b64decode(checksum).hex() == digest(path, "sha256")
    if head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head:
        return True
    expected, _, n_parts = head["ETag"].strip('"').partition("-")
    if not n_parts:
        return bool(expected == digest(path, "md5"))
    of_parts = []
    with path.open("rb") as file:
        while chunk := file.read(first["ContentLength"]):
            of_parts.append(hashlib.md5(chunk, usedforsecurity=False).digest())
    return bool(expected == hashlib.md5(b"".join(of_parts), usedforsecurity=False).hexdigest())

"""Models under a prefix of an S3 bucket; keys, region and endpoint are boto3's, as AWS_PROFILE."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.model.download.choice import MAX_FILES
from kvasir.model.download.reference import DownloadError, Reference
from kvasir.model.download.transfer import CHUNK, RemoteFile, digest, from_offset, read_whole


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
            _bound(client._endpoint.http_session)
            lister = client.get_paginator("list_objects_v2")
            most = {"MaxItems": MAX_FILES + 2}  # one more than may be, and the folder itself
            pages = lister.paginate(Bucket=bucket, Prefix=f"{prefix}/", PaginationConfig=most)
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


def _bound(http: Any) -> None:
    """Bound what boto3 reads of an answer that is no file."""
    send = http.send

    def send_bounded(request: Any) -> Any:
        is_file, request.stream_output = request.stream_output, True
        answer = send(request)
        if not is_file or answer.status_code >= 300:
            with answer.raw as raw:
                answer._content = read_whole(request.url, raw.stream(CHUNK))
        return answer

    http.send = send_bounded


def _read(client: Any, place: dict[str, str], start: int) -> Iterable[bytes]:
    with _os_errors():
        answer = client.get_object(**place, Range=f"bytes={start}-")
        is_part = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        yield from from_offset(0 if is_part else start, answer["Body"].iter_chunks(CHUNK))


@contextmanager
def _os_errors() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  of the extra s3
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    try:
        yield
    except (BotoCoreError, ClientError, HTTPError) as error:
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
    of_parts, part_size = [], max(1, first["ContentLength"])
    with path.open("rb") as file:
        for left in range(path.stat().st_size, 0, -part_size):
            part = hashlib.md5(usedforsecurity=False)
            for rest in range(min(left, part_size), 0, -CHUNK):
                part.update(file.read(min(rest, CHUNK)))
            of_parts.append(part.digest())
    return bool(expected == hashlib.md5(b"".join(of_parts), usedforsecurity=False).hexdigest())

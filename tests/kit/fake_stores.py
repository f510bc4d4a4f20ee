"""Servers on loopback that speak the protocols of Hugging Face's hub, OCI registries and S3."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CREDENTIALS = "bWU6c2VjcmV0"
COMMIT = "c" * 40
LARGE = 1000  # bytes; larger files of the hub are in LFS
PART_SIZE = 4096  # of objects in S3 that were uploaded in parts

# Headers, and the body.
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Store:
    """A store's files. cut: bodies of these names end after so many bytes, once."""

    files: dict[str, bytes]
    cut: dict[str, int] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)  # names of files that arrive with another end
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # bodies: name, and range
    challenge: str = ""  # to requests without CREDENTIALS, or the token "ours" that they buy
    url: str = ""
    knows_ranges: bool = True
    # Answers a request in place of the store, if it returns True.
    instead: Callable[[BaseHTTPRequestHandler], bool] = lambda _: False

    def body(self, name: str, headers: Any, more: dict[str, str]) -> Answer:
        content = self.files[name]
        if name in self.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        wanted = headers.get("Range")
        self.asked.append((name, wanted))
        if wanted is None or not self.knows_ranges:
            return 200, more, content
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
        place = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return 206, more | {"Content-Range": place}, content[start:]

    @property
    def bodies(self) -> list[str]:
        return [name for name, _ in self.asked]


Respond = Callable[[Store, str, dict[str, list[str]], Any], Answer]


@contextmanager
def running(store: Store, respond: Respond) -> Iterator[Store]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if store.instead(self):
                self.close_connection = True
                return
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, keep_blank_values=True)
            asked: list[tuple[str, str | None]] = []
            wants_password = store.challenge.startswith("Basic") or parts.path == "/token"
            allowed = f"Basic {CREDENTIALS}" if wants_password else "Bearer ours"
            if store.challenge and self.headers.get("Authorization") != allowed:
                challenge = store.challenge.format(url=store.url)
                status, headers, body = 401, {"WWW-Authenticate": challenge}, b"{}"
            elif parts.path == "/token":
                status, headers, body = 200, {}, b'{"token": "ours"}'
            else:
                with lock:  # clients ask for several files at once
                    n_asked = len(store.asked)
                    status, headers, body = respond(store, unquote(parts.path), query, self.headers)
                    asked = store.asked[n_asked:]
                    if self.command == "HEAD":
                        del store.asked[n_asked:]
            size = headers.pop("Content-Length", str(len(body)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", size)
            self.end_headers()
            if self.command == "HEAD":
                return
            if status in (200, 206) and asked:
                limit = store.cut.pop(asked[-1][0], None)
                if limit is not None:
                    body, self.close_connection = body[:limit], True
            self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        store.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()


def hub(store: Store, path: str, _: Any, headers: Any) -> Answer:
    """Answer for the one repository org/name, whose branch is main."""
    api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
    if api and api[1] != "org/name":
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
    if api and api[3] not in (None, "main", COMMIT):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    if api and api[2] != "tree":
        siblings = [{"rfilename": name} | _git(name, store) for name in store.files]
        return 200, {}, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
    if api:
        tree = [
            {"type": "file", "path": name, "oid": entry["blobId"]} | entry
            for name, entry in ((name, _git(name, store)) for name in store.files)
        ]
        return 200, {}, json.dumps(tree).encode()
    found = re.fullmatch(r"/org/name/resolve/([^/]+)/(.+)", path)
    if found is None or found[2] not in store.files:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    name = found[2]
    entry = _git(name, store)
    more = {"ETag": f'"{entry["lfs"]["sha256"] if "lfs" in entry else entry["blobId"]}"'}
    more |= {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
    return store.body(name, headers, more)


def _git(name: str, store: Store) -> dict[str, Any]:
    content = store.files[name]
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"size": len(content), "blobId": blob}
    if len(content) > LARGE:
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"size": len(content), "sha256": sha256, "oid": sha256, "pointerSize": 130}
    return entry


def oci(store: Store, path: str, _: Any, headers: Any) -> Answer:
    """Answer for the repository org/name with the tag v1."""
    named = {_digest(content): name for name, content in store.files.items()}
    layers = [
        {"mediaType": "application/octet-stream", "digest": _digest(content), "size": len(content),
         "annotations": {"org.opencontainers.image.title": name}}
        for name, content in store.files.items()
    ]  # fmt: skip
    manifest = json.dumps({"schemaVersion": 2, "layers": layers}).encode()
    if path in ("/v2/org/name/manifests/v1", f"/v2/org/name/manifests/{_digest(manifest)}"):
        return 200, {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}, manifest
    if path.startswith("/v2/org/name/blobs/"):
        return store.body(named[path.rpartition("/")[2]], headers, {})
    return 404, {}, b'{"errors": []}'


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def s3(store: Store, path: str, query: dict[str, list[str]], headers: Any) -> Answer:
    """Answer for the bucket models; a page of a listing has two objects."""
    if path.rstrip("/") == "/models" and "list-type" in query:
        prefix = query["prefix"][0]
        names = sorted(name for name in store.files if name.startswith(prefix))
        start = int(query.get("continuation-token", ["0"])[0])
        page, is_last = names[start : start + 2], start + 2 >= len(names)
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><ETag>&quot;{_etag(store, name)}&quot;</ETag>"
            f"<Size>{len(store.files[name])}</Size></Contents>"
            for name in page
        )
        token = "" if is_last else f"<NextContinuationToken>{start + 2}</NextContinuationToken>"
        text = f"<IsTruncated>{str(not is_last).lower()}</IsTruncated>{token}{items}"
        return 200, {}, f"<ListBucketResult>{text}</ListBucketResult>".encode()
    name = path.removeprefix("/models/")
    if name not in store.files:
        return 404, {}, b""
    content = store.files[name]
    more: dict[str, str] = {"ETag": f'"{_etag(store, name)}"'}
    if name.endswith(".jinja") and headers.get("x-amz-checksum-mode") == "ENABLED":
        sha256 = hashlib.sha256(content).digest()
        more["x-amz-checksum-sha256"] = base64.b64encode(sha256).decode()
    if "partNumber" in query:
        return 206, more | {"Content-Length": str(min(PART_SIZE, len(content)))}, b""
    if headers.get("Range") is None:  # a HEAD
        return 200, more | {"Content-Length": str(len(content))}, b""
    return store.body(name, headers, more)


def _etag(store: Store, name: str) -> str:
    """Return the MD5, or that of the MD5s of a large object's parts."""
    content = store.files[name]
    parts = [content[i : i + PART_SIZE] for i in range(0, len(content), PART_SIZE)] or [b""]
    hashes = [hashlib.md5(part, usedforsecurity=False) for part in parts]
    if len(parts) == 1:
        return hashes[0].hexdigest()
    whole = hashlib.md5(b"".join(h.digest() for h in hashes), usedforsecurity=False)
    return f"{whole.hexdigest()}-{len(parts)}"

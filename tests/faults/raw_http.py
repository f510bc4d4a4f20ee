"""Bytes on a socket that are not HTTP, or HTTP that no client should send."""

from __future__ import annotations

import json
import random
from collections import Counter

from tests.faults.client import Site, connected, statuses_of
from tests.faults.report import Report
from tests.faults.victim import KEY

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"
)
_LENGTH = b"Content-Length: %d\r\n" % len(BODY)
_CLOSE = b"Connection: close\r\n"
_CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
_END = _CHUNK + b"0\r\n\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"


def _with(headers: bytes, body: bytes = BODY) -> bytes:
    return _HEAD + headers + _CLOSE + b"\r\n" + body


def _get(target: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET " + target + b" " + version + b"\r\nHost: x\r\n" + _CLOSE + b"\r\n"


# By name: bytes to send, and the statuses of the answers until the server closes the connection.
CASES: dict[str, tuple[bytes, list[int]]] = {
    "a valid request": (_with(_LENGTH), [200]),
    "three requests in one packet": (
        (_HEAD + _LENGTH + b"\r\n" + BODY) * 2 + _with(_LENGTH),
        [200, 200, 200],
    ),
    "a request, then garbage": (_HEAD + _LENGTH + b"\r\n" + BODY + b"\0\1\2\r\n\r\n", [400]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), [400]),
    "HTTP/9.9": (_get(b"/version", b"HTTP/9.9"), [400]),
    "a path that is not ASCII": (_get("/é".encode()), [400]),
    "a path of bad escapes": (_get(b"/%zz%00%ff%c0%80"), [401]),
    "a path of 60,000 characters": (_get(b"/" + b"x" * 60_000), [431]),
    "CONNECT": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n" + _CLOSE + b"\r\n", [400]),
    "a header without a colon": (_with(_LENGTH + b"nonsense\r\n"), [400]),
    "a header with a null byte": (_with(_LENGTH + b"X-A: \0\r\n"), [400]),
    "a key that is not ASCII": (
        _get(b"/v1/models").replace(b"Host: x", b"Authorization: Bearer \xff\xfe"),
        [401],
    ),
    "an id that is not ASCII": (_with(_LENGTH + b"X-Request-Id: \xff\x80\r\n"), [200]),
    "no length": (_with(b"", b""), [400]),
    "a length with a sign": (_with(b"Content-Length: +%d\r\n" % len(BODY)), [400]),
    "a length in base 16": (_with(b"Content-Length: %#x\r\n" % len(BODY)), [400]),
    "a length twice": (_with(_LENGTH * 2), [400]),
    "a list of lengths": (_with(b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY))), [400]),
    "a length with a zero": (_with(b"Content-Length: 0%d\r\n" % len(BODY)), [200]),
    "a length of 5,000 zeros": (_with(b"Content-Length: %b\r\n" % (b"0" * 5000), b""), [400]),
    "a length after 5,000 zeros": (_with(b"Content-Length: %05000d\r\n" % len(BODY)), [400]),
    "a length below zero": (_with(b"Content-Length: -1\r\n"), [400]),
    "a length that is not a number": (_with(b"Content-Length: ten\r\n"), [400]),
    "two lengths": (_with(_LENGTH + b"Content-Length: 5\r\n"), [400]),
    "a length of a terabyte": (_with(b"Content-Length: 1000000000000\r\n", b""), [413]),
    "a length beyond 64 bits": (_with(b"Content-Length: 99999999999999999999\r\n"), [400]),
    "a length and chunks": (_with(_LENGTH + _CHUNKED), [400]),
    "a length that is too short": (_HEAD + b"Content-Length: 5\r\n\r\n" + BODY, [400]),
    "a chunk of an invalid size": (_with(_CHUNKED, b"zz\r\nx\r\n0\r\n\r\n"), [400]),
    "a chunk longer than its size": (_with(_CHUNKED, b"2\r\n{}}}\r\n0\r\n\r\n"), [400]),
    "chunks without an end": (
        _with(_CHUNKED, (b"fffff\r\n" + b" " * 0xFFFFF + b"\r\n") * 5),
        [413],
    ),
    "chunks with extensions and trailers": (
        _with(_CHUNKED, _CHUNK + b"0;a=b\r\nX-A: x\r\n\r\n"),
        [200],
    ),
    "an extension of 10 MB": (_with(_CHUNKED, b"1;" + b"x" * 10**7), [431]),
    "a trailer of 10 MB": (_with(_CHUNKED, _CHUNK + b"0\r\nX-A: " + b"x" * 10**7), [431]),
    "a million trailers": (_with(_CHUNKED, _CHUNK + b"0\r\n" + b"X-A: x\r\n" * 10**6), [431]),
    "an encoding that is unknown": (_with(b"Transfer-Encoding: gzip\r\n"), [400]),
    "an unknown encoding in chunks": (_with(b"Transfer-Encoding: gzip, chunked\r\n", _END), [400]),
    "two encodings": (_with(b"Transfer-Encoding: identity\r\n" + _CHUNKED, _END), [400]),
    "chunks in chunks": (_with(b"Transfer-Encoding: chunked, chunked\r\n", _END), [400]),
    "chunks, for HTTP/1.0": (_with(_CHUNKED, _END).replace(b"HTTP/1.1", b"HTTP/1.0"), [200]),
    "a body that is compressed": (_with(b"Content-Encoding: gzip\r\n" + _LENGTH), [200]),
    "a websocket": (
        _HEAD + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
        [400],
    ),
    "10,000 headers": (_with(_LENGTH + b"".join(b"X-%d: x\r\n" % i for i in range(10_000))), [431]),
    "a header of 10 MB": (_with(_LENGTH + b"X-A: " + b"x" * 10**7 + b"\r\n"), [431]),
}


async def malformed_http(site: Site, n: int, report: Report) -> None:
    """Send every case, and n damaged requests on connections that are then half-closed."""
    for name, (sent, expected) in CASES.items():
        report.tried += 1
        statuses = await _statuses(site, sent, half_close=False)
        report.statuses += Counter(statuses)
        report.check(statuses == expected, f"{name}: {statuses}, not {expected}")
    valid = [sent for sent, _ in CASES.values() if len(sent) < 10_000]
    for _ in range(n):
        report.tried += 1
        sent = _damaged(site.chance, site.chance.choice(valid))
        statuses = await _statuses(site, sent, half_close=True)
        report.statuses += Counter(statuses)
        report.check(all(status < 500 for status in statuses), f"{sent[:300]!r}: {statuses}")


async def _statuses(site: Site, sent: bytes, *, half_close: bool) -> list[int]:
    async with connected(site) as (reader, writer):
        writer.write(sent)
        if half_close:
            writer.write_eof()
        return await statuses_of(reader)


def _damaged(chance: random.Random, request: bytes) -> bytes:
    damaged = bytearray(request)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(damaged) + 1)
        damaged[at : at + chance.choice((0, 1, 1, 8))] = chance.choice(
            (b"", b"\r\n", b"\0", b"9", chance.randbytes(2))
        )
    return bytes(damaged)

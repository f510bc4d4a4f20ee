"""Files of batches that cost much to read, and a disk on which there is no room for any."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from tests.faults.client import LIMIT, Answer, Site, ask, post
from tests.faults.report import Report
from tests.faults.victim import KEY, OTHER_KEY

_BATCHES = 6
_PATH = "/v1/completions"
_ENDED = ("completed", "failed", "cancelled", "expired")
_BOUNDARY = b"--x"
_FORM = (
    _BOUNDARY + b'\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' + _BOUNDARY
    + b'\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
)  # fmt: skip


def _upload(content: bytes, key: str = KEY) -> bytes:
    body = _FORM + content + b"\r\n" + _BOUNDARY + b"--\r\n"
    request = post("/v1/files", b"", key).replace(b"Length: 0", b"Length: %d" % len(body))
    form = b"\r\nContent-Type: multipart/form-data; boundary=" + _BOUNDARY[2:] + b"\r\n\r\n"
    return request.replace(b"\r\n\r\n", form) + body


def _line(i: int) -> bytes:
    body = {"prompt": "def read", "max_tokens": 50, "logprobs": 5, "ignore_eos": True}
    line = {"custom_id": str(i), "method": "POST", "url": _PATH, "body": body}
    return json.dumps(line).encode() + b"\n"


def _batch(uploaded: Answer) -> bytes:
    body = {"input_file_id": uploaded.json["id"], "endpoint": _PATH, "completion_window": "24h"}
    return post("/v1/batches", body)


def _delete(uploaded: Answer) -> bytes:
    return post(f"/v1/files/{uploaded.json['id']}", b"", method="DELETE")


async def newline_files(site: Site, n: int, report: Report) -> None:
    """Begin six batches on a file of n MB of newlines, cancel them, and let another key upload."""
    slowest: dict[str, float] = {}

    async def timed(what: str, request: bytes, *expected: int) -> Answer:
        started = perf_counter()
        answer = await ask(site, request)
        slowest[what] = max(slowest.get(what, 0.0), perf_counter() - started)
        report.answered(answer.status, what, *expected)
        return answer

    uploaded = await timed("upload", _upload(b"\n" * (n * 10**6)))
    if uploaded.status != 200:
        return
    begun = [await timed("create", _batch(uploaded)) for _ in range(_BATCHES)]
    names = [answer.json["id"] for answer in begun if answer.status == 200]
    other = timed("another key's upload", _upload(_line(0), OTHER_KEY), 200)
    await asyncio.gather(other, *(timed("cancel", _cancel(name)) for name in names))
    ends = await asyncio.gather(*(_end(site, name) for name in names))
    report.check(set(ends) <= set(_ENDED), f"batches are {ends}")
    await timed("delete", _delete(uploaded))
    report.note = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in slowest.items())


def _cancel(name: str) -> bytes:
    return post(f"/v1/batches/{name}/cancel", b"")


async def _end(site: Site, name: str, seconds: float = 60.0) -> str:
    """Return the state in which a batch ends, or is after some time."""
    until = perf_counter() + seconds
    while True:
        answer = await ask(site, post(f"/v1/batches/{name}", b"", method="GET"))
        state = str(answer.json["status"]) if answer.status == 200 else f"HTTP {answer.status}"
        if state in _ENDED or perf_counter() > until:
            return state
        await asyncio.sleep(0.2)


async def full_disk(site: Site, n: int, report: Report) -> None:
    """Fill the disk at n moments of batches: each ends, and its input can be deleted."""
    filler = site.folder / "batches/filler"
    for _ in range(n):
        content = b"".join(_line(k) for k in range(site.chance.choice((1, 20, 60))))
        uploaded = await ask(site, _upload(content))
        report.answered(uploaded.status, "an upload", 200)
        if uploaded.status != 200:
            continue
        moment = site.chance.randrange(3)
        if moment == 0:
            _fill(filler)
        begun = await ask(site, _batch(uploaded))
        report.answered(begun.status, "a batch", 200, 507)
        if moment:
            await asyncio.sleep(site.chance.uniform(0.0, 0.5))
            _fill(filler)
        refused = await ask(site, _upload(b" " * 2**20))
        report.answered(refused.status, "an upload on a full disk", 507)
        if begun.status == 200:
            name = begun.json["id"]
            if moment == 1:
                report.answered((await ask(site, _cancel(name))).status, "a cancel", 200, 409, 507)
            state = await _end(site, name, 1.0)  # it may also wait for room
            filler.unlink(missing_ok=True)
            if state not in _ENDED:
                state = await _end(site, name, LIMIT)
            report.check(state in _ENDED, f"with room again the batch stays {state}")
        filler.unlink(missing_ok=True)
        gone = await ask(site, _delete(uploaded))
        report.answered(gone.status, "a delete of its input", 200)


def _fill(path: Path) -> None:
    """Write until no byte fits."""
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 4096, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass

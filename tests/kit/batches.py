"""Files of requests to a service that doubles numbers, and what a batch of one must end with."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from kvasir.server.api.http.upload import Content
from kvasir.server.batches.journal import Reply
from kvasir.server.batches.objects import StoredBatch
from kvasir.server.batches.store import RECORD_BYTES, BatchStore

ENDPOINT = "/v1/completions"
NOW = 1_000_000.0
N_LINES = 7


async def upload(store: BatchStore, n_lines: int = N_LINES, owner: str = "") -> str:
    """Store a file with a request for each number, and empty lines; return its id."""
    content = Content(store, owner)
    try:
        await content.hold(200 * n_lines, 200 * n_lines)
        for n in range(n_lines):
            line = {"custom_id": f"ü{n}", "method": "POST", "url": ENDPOINT, "body": {"prompt": n}}
            content.write(json.dumps(line).encode() + b"\n" + b"\n" * (n % 3))
        return (await content.add("a.jsonl")).id
    finally:
        await content.close()


def is_refused(n: int) -> bool:
    return n % 10 == 5


async def doubled(_path: str, body: bytes, _owner: str) -> Reply | float:
    """The service: numbers are doubled, those that end with five are refused."""
    n = from_json(body)["prompt"]
    content = {"text": f"\u2028{2 * n}", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    written = json.dumps(content, ensure_ascii=False).encode()
    return Reply(400 if is_refused(n) else 200, "r", written, content)


def lines_of(store: BatchStore, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a batch's output or errors, if it has any."""
    if file_id is None:
        return []
    text = store.path(file_id).read_text(encoding="utf-8")
    assert text.splitlines() == text.split("\n")[:-1]
    return [json.loads(line) for line in text.splitlines()]


def check_whole(store: BatchStore, batch: StoredBatch, n_lines: int = N_LINES) -> None:
    """Compare a completed batch with what the service answers, each line once."""
    assert batch.status == "completed"
    output = lines_of(store, batch.output_file_id)
    texts = {line["custom_id"]: line["response"]["body"]["text"] for line in output}
    assert texts == {f"ü{n}": f"\u2028{2 * n}" for n in range(n_lines) if not is_refused(n)}
    failures = [line["custom_id"] for line in lines_of(store, batch.error_file_id)]
    assert failures == [f"ü{n}" for n in range(n_lines) if is_refused(n)]
    counts, usage = batch.request_counts, batch.usage
    assert (counts.total, counts.failed) == (n_lines, len(failures))
    assert counts.completed == len(output) == len(texts) == usage.input_tokens
    assert usage.output_tokens == 2 * len(output)
    contents = sum(file.bytes for file in store.files.values())
    assert store.n_bytes == contents + RECORD_BYTES * (len(store.files) + len(store.batches))

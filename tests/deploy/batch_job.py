"""A batch that a client sends to several servers, and reads again."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import httpx


class Job:
    """A batch, of which any server is asked."""

    def __init__(self, url: str, n_lines: int) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=60)
        self._n_lines, self._begun_at = n_lines, monotonic()

    async def begin(self) -> None:
        url, body = "/v1/completions", {"prompt": "def ", "max_tokens": 2, "ignore_eos": True}
        lines = (
            {"custom_id": str(n), "method": "POST", "url": url, "body": body | {"seed": n}}
            for n in range(self._n_lines)
        )
        content = "".join(f"{json.dumps(line)}\n" for line in lines)
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("a", content)}}
        file = (await self._client.post("/v1/files", **form)).raise_for_status().json()
        asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        begun = await self._client.post("/v1/batches", json=asked)
        self._path = f"/v1/batches/{begun.raise_for_status().json()['id']}"

    async def answer(self) -> httpx.Response:
        """Return what a server says of the batch."""
        return await self._client.get(self._path)

    async def counts(self) -> dict[str, int]:
        """Return the numbers of lines."""
        found: dict[str, int] = (await self.answer()).raise_for_status().json()["request_counts"]
        return found

    async def half(self) -> None:
        """Wait until half of the lines are answered."""
        n_done = 0
        while 2 * n_done < self._n_lines:
            await asyncio.sleep(0.2)
            n_done = (await self.counts())["completed"]

    async def is_right(self) -> bool:
        """Wait for the end; return whether each line is answered once."""
        status = ""
        while status != "completed":
            await asyncio.sleep(1)
            batch = (await self.answer()).json()
            status = batch.get("status")
        seconds = monotonic() - self._begun_at
        content = await self._client.get(f"/v1/files/{batch['output_file_id']}/content")
        ids = [json.loads(line)["custom_id"] for line in content.text.splitlines()]
        n_distinct = len(set(ids))
        print(f"batch: {len(ids)} answers, {n_distinct} distinct, {seconds:.0f} s")  # noqa: T201
        return len(ids) == n_distinct == self._n_lines and batch["error_file_id"] is None

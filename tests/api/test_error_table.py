"""Every row of the error table, in each dialect, over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import pytest

from kvasir.server.api.anthropic.schemas import AnthropicError
from kvasir.server.engine.batch import StepStats
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.requests.admission.queue import Phase
from kvasir.server.requests.async_engine import OutputStream
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, Served, sample, serving

Post = Callable[..., Coroutine[Any, Any, httpx.Response]]
Case = Callable[[Served, Post], Awaitable[httpx.Response]]


def bodies(dialect: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request, in OpenAI's form, Anthropic's or TGI's."""
    fields = {"max_tokens": 2} | fields
    if dialect == "anthropic":  # whose max_tokens may exceed the context
        text = "a" * fields["max_tokens"] if fields["max_tokens"] >= 50 else "a"
        fields["stop_sequences"] = fields.pop("stop", [])
        messages = [{"role": "user", "content": text}]
        return "/v1/messages", {"messages": messages, "ignore_eos": True} | fields
    if dialect == "openai":
        return "/v1/completions", {"prompt": "a", "ignore_eos": True} | fields
    fields["max_new_tokens"] = fields.pop("max_tokens")
    path = "/generate_stream" if fields.pop("stream", False) else "/generate"
    return path, {"inputs": "a", "parameters": {"ignore_eos": True} | fields}


def poster(served: Served, dialect: str) -> Post:
    async def post(*, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        path, body = bodies(dialect, **fields)
        return await served.client.post(path, json=body, headers=headers)

    return post


def sending(**fields: Any) -> Case:
    """Return a case that is one request."""

    async def case(_served: Served, post: Post) -> httpx.Response:
        return await post(**fields)

    return case


async def wrong_key(served: Served, post: Post) -> httpx.Response:
    served.client.headers["authorization"] = "Bearer wrong"
    return await post()


def in_phase(phase: Phase) -> Case:
    async def case(served: Served, post: Post) -> httpx.Response:
        served.model.admission.phase = phase
        return await post()

    return case


@asynccontextmanager
async def occupied(served: Served, post: Post) -> AsyncIterator[None]:
    """Occupy the only row until the block ends."""
    served.runner.hold()
    first = asyncio.create_task(post())
    await served.submitted.acquire()
    await asyncio.to_thread(served.runner.wait_until_held)
    try:
        yield
    finally:
        served.runner.release()
        assert (await first).status_code == 200


async def queue_full(served: Served, post: Post) -> httpx.Response:
    async with occupied(served, post):
        second = asyncio.create_task(post())
        await served.submitted.acquire()
        response = await post()
    assert (await second).status_code == 200
    return response


async def queue_full_of_tokens(served: Served, post: Post) -> httpx.Response:
    served.model.admission.max_queue_tokens = 1
    served.model.admission.capacity = 3
    return await queue_full(served, post)


async def deadline_out_of_reach(served: Served, post: Post) -> httpx.Response:
    """The row is estimated to be held for an hour."""
    served.model.engine.forecast.ended(3600.0)
    served.model.engine.forecast.step(StepStats(1, 0, 256, 0, 0, 0, 0, 3600.0))
    async with occupied(served, post):
        return await post(timeout_ms=60_000)


async def key_in_use(served: Served, post: Post) -> httpx.Response:
    served.model.admission.capacity = 9
    async with occupied(served, post):
        others = [asyncio.create_task(post()) for _ in range(2)]
        for _ in others:
            await served.submitted.acquire()
        response = await post()
    assert [(await other).status_code for other in others] == [200, 200]
    return response


async def key_has_used_its_tokens(_served: Served, post: Post) -> httpx.Response:
    assert (await post(max_tokens=7)).status_code == 200
    return await post()


async def deadline(served: Served, post: Post) -> httpx.Response:
    """It waits in the queue until its time is over."""
    expired = asyncio.Event()
    end = OutputStream.end

    def end_and_note(stream: OutputStream, reason: FinishReason) -> None:
        end(stream, reason)
        expired.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputStream, "end", end_and_note)
        async with occupied(served, post):
            late = asyncio.create_task(post(timeout_ms=1))
            expiring = asyncio.create_task(expired.wait())
            # It may be refused at once.
            await asyncio.wait((late, expiring), return_when=asyncio.FIRST_COMPLETED)
            expiring.cancel()
        return await late


async def deadline_at_admission(served: Served, post: Post) -> httpx.Response:
    """Reading and tokenising the request takes all its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kvasir.server.api.http.middleware.perf_counter", lambda: perf_counter() - 3600
        )
        response = await post(timeout_ms=3_600_000)
    assert served.runner.batches == []
    return response


async def queued_at_shutdown(served: Served, post: Post) -> httpx.Response:
    async with occupied(served, post):
        waiting = asyncio.create_task(post())
        await served.submitted.acquire()
        draining = asyncio.create_task(served.model.drain())
        await asyncio.sleep(0)  # it has begun, and sheds the queue before the next step
    await draining
    return await waiting


async def engine_fails(served: Served, post: Post) -> httpx.Response:
    served.runner.error = RuntimeError("secret detail")
    return await post(headers={"x-request-id": "mine"})


async def engine_failed_before(served: Served, post: Post) -> httpx.Response:
    served.runner.error = RuntimeError("secret detail")
    await post()
    return await post(headers={"x-request-id": "mine"})


CASES: dict[str, tuple[Case, int, str, str | None]] = {
    "bad request": (sending(top_p=2), 400, "invalid_request_error", None),
    "too long": (sending(max_tokens=64), 400, "invalid_request_error", "context_length_exceeded"),
    "too much memory": (
        sending(max_tokens=50),
        400,
        "invalid_request_error",
        "context_length_exceeded",
    ),
    "wrong key": (wrong_key, 401, "authentication_error", None),
    "too large": (sending(stop=["x" * 3000]), 413, "invalid_request_error", "request_too_large"),
    "queue full": (queue_full, 429, "overloaded", None),
    "queue full of tokens": (queue_full_of_tokens, 429, "overloaded", None),
    "deadline out of reach": (deadline_out_of_reach, 429, "overloaded", None),
    "key in use": (key_in_use, 429, "overloaded", None),
    "key has used its tokens": (key_has_used_its_tokens, 429, "overloaded", None),
    "deadline": (deadline, 504, "deadline_exceeded", None),
    "deadline at admission": (deadline_at_admission, 504, "deadline_exceeded", None),
    "loading": (in_phase(Phase.LOADING), 503, "unavailable", None),
    "draining": (in_phase(Phase.DRAINING), 503, "unavailable", None),
    "queued at shutdown": (queued_at_shutdown, 503, "unavailable", None),
    "engine fails": (engine_fails, 500, "internal_error", None),
    "engine failed before": (engine_failed_before, 500, "internal_error", None),
}
REASONS = {  # in the metric, where several limits share a status
    "queue full of tokens": "overloaded_tokens",
    "deadline out of reach": "overloaded_deadline",
    "key in use": "overloaded_key",
    "key has used its tokens": "overloaded_key_tokens",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
TGI_TYPES = {"invalid_request_error": "validation", "internal_error": "generation"}


# Errors of one status take their form in one place: the other dialects show each status once.
IN_EACH_DIALECT = (
    *("bad request", "too long", "wrong key", "too large", "queue full", "deadline"),
    *("queued at shutdown", "engine fails"),
)
ROWS = [(name, "openai", False) for name in CASES]
ROWS += [(name, dialect, True) for dialect in ("tgi", "anthropic") for name in IN_EACH_DIALECT]


@pytest.mark.parametrize(("name", "dialect", "stream"), ROWS)
async def test_row(
    name: str, dialect: str, stream: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    case, status, kind, code = CASES[name]
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1, budget_tokens=40)
    caplog.set_level(logging.CRITICAL, logger="kvasir")
    keys, n_tokens = tmp_path / "keys", 1 if name == "key has used its tokens" else 10**6
    keys.write_text(f"concurrency=3 tokens_per_minute={n_tokens} right")
    limits: dict[str, Any] = {"max_queue": 1, "max_body_bytes": 2000}
    async with serving(runner, **limits, api_key_file=keys) as served:
        served.client.headers["authorization"] = "Bearer right"
        post = partial(poster(served, dialect), stream=stream)
        metrics, reason = served.model.metrics, REASONS.get(name, code or kind)
        value = partial(sample, metrics, "requests_rejected_total", reason=reason)
        assert value() == 0, "of a series that is born as 1, rate() never sees the rise"
        response = await case(served, post)
        rejected = value()
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    if dialect == "openai":
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    elif dialect == "anthropic":
        assert AnthropicError.model_validate(body).error.type == ANTHROPIC_TYPES[status]
        assert body["request_id"] == response.headers["request-id"]
    else:
        assert body.keys() == {"error", "error_type"}
        assert body["error_type"] == TGI_TYPES.get(kind, kind)
    assert rejected
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    if status == 504:
        assert response.headers["x-should-retry"] == "false"
    if status == 500:
        assert "request id mine" in response.text
        assert "secret" not in response.text


@pytest.mark.parametrize("fields", [{}, {"regex": "a+"}])
async def test_a_deadline_that_has_passed_is_no_matter_of_the_load(fields: dict[str, Any]) -> None:
    """A passed deadline is a 504 even where the estimate would refuse the request with 429."""
    async with serving(FakeRunner(VOCAB_SIZE, max_num_seqs=1)) as served:
        post = poster(served, "openai")
        served.model.engine.forecast.ended(3600.0)
        served.model.engine.forecast.step(StepStats(1, 0, 256, 0, 0, 0, 0, 3600.0))
        async with occupied(served, post):
            early = await post(timeout_ms=60_000, **fields)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "kvasir.server.api.http.middleware.perf_counter", lambda: perf_counter() - 3600
                )
                late = await post(timeout_ms=3_600_000, **fields)
            assert served.submitted.locked(), "neither reached the engine"
    assert (early.status_code, late.status_code) == (429, 504)
    assert late.json()["error"]["type"] == "deadline_exceeded"


UNKNOWN = [
    ("/v1/nothing", "GET", 404, "not_found"),
    ("/v1/completions/", "POST", 404, "not_found"),
    ("/v1/completions", "GET", 405, "method_not_allowed"),
    ("/v1/messagesx", "GET", 404, "not_found"),
    ("/v1/messages/batches", "POST", 404, "not_found_error"),
    ("/v1/messages", "GET", 405, "invalid_request_error"),
]


async def test_unknown_paths_and_methods() -> None:
    async with serving() as served:
        for path, method, status, code in UNKNOWN:
            response = await served.client.request(method, path)
            error = response.json()["error"]
            if "code" not in error:
                AnthropicError.model_validate(response.json())
            assert (response.status_code, error.get("code", error["type"])) == (status, code), path
            assert path in error["message"]

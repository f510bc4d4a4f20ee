"""Prompts are tokenised without blocking the event loop; requests that wait end in time."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir.server.errors import ContextLengthError
from kvasir.server.requests.completion import start_timers
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import load_settings
from tests.kit.fake_runner import TIMEOUT
from tests.kit.serving import fake_model_dir, small_tokenizer

tokenizer = small_tokenizer()


class Watched:
    """A tokenizer that notes what is called, and whether another thread could run during each call.

    Threads switch only when one releases the interpreter's lock, so the result does not depend on
    speed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(tokenizer, name)
        return self._watching(name, real) if name.startswith(("encode", "decode")) else real

    def _watching(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            go, went = threading.Lock(), threading.Event()
            go.acquire()

            def other() -> None:
                with go:
                    went.set()

            thread = threading.Thread(target=other)
            thread.start()
            with uninterrupted():
                go.release()
                result = real(*arguments, **options)
                self.calls.append((name, went.is_set()))
            thread.join(TIMEOUT)
            return result

        return call


@contextmanager
def uninterrupted() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def watched_model(max_model_len: int) -> tuple[ServedModel, Watched]:
    watched = Watched()
    model_dir = replace(fake_model_dir(max_model_len=max_model_len), tokenizer=watched)  # type: ignore[arg-type]
    return ServedModel(load_settings(model="m"), model_dir), watched


async def test_other_threads_run_while_a_long_prompt_is_tokenised() -> None:
    """It means the same as a short one, with its special tokens."""
    special = tokenizer.get_added_tokens_decoder()[0].content
    text = f"{special}def read_json(path):\n    return json.load(path) \u00e9\n" * 5000
    served, watched = watched_model(max_model_len=10**6)
    (prompt,) = await served.builder.tokenize([text])
    assert [released for _, released in watched.calls] == [True]
    assert prompt.ids == tokenizer.encode(text).ids
    assert prompt.text == text


async def test_other_threads_run_while_many_short_prompts_are_tokenised() -> None:
    texts = [f"def read_{i}(path):\n" for i in range(5000)]
    served, watched = watched_model(max_model_len=64)
    prompts = await served.builder.tokenize([*texts, [5, 66]])
    assert [(name, released) for name, released in watched.calls if name != "decode"] == [
        ("encode_batch_fast", True)
    ]
    assert [prompt.ids for prompt in prompts] == [
        *(tokenizer.encode(text).ids for text in texts),
        [5, 66],
    ]
    assert [prompt.text for prompt in prompts] == [*texts, tokenizer.decode([5, 66])]


@pytest.mark.parametrize(
    ("source", "kept", "message"),
    [
        ([-1] * 2_000_000, None, "64 tokens.* the prompt has 2000000"),
        ([-1] * 2_000_000, 100, "64 tokens.* the prompt has 100"),
        ("json\n" * 2000, None, "the text has 10000 characters, of which a"),
        ("\u00e9" * 131072 + "a", None, "64 tokens.* the text has 262145 bytes, .* at most 262144"),
        ("\u00e9" * 131072 + "a", 5, "64 tokens.* the text has 262145 bytes, .* at most 262144"),
    ],
    ids=["ids", "ids cut", "characters", "bytes", "bytes cut"],
)
async def test_what_cannot_fit_is_refused_unread(
    source: str | list[int], kept: int | None, message: str
) -> None:
    served, watched = watched_model(max_model_len=64)
    with pytest.raises(ContextLengthError, match=message) as caught:
        await served.builder.tokenize([source], keep_last=kept)
    assert caught.value.param == "prompt"
    assert watched.calls == []


async def test_a_text_that_cannot_fit_is_refused_with_both_numbers() -> None:
    served, _ = watched_model(max_model_len=64)
    text = "json\n" * 800
    n = len(tokenizer.encode(text).ids)
    with pytest.raises(ContextLengthError, match=f"64 tokens.* the prompt has {n}"):
        await served.builder.tokenize([text])


async def test_only_the_last_tokens_are_kept_and_of_ids_read() -> None:
    served, _ = watched_model(max_model_len=64)
    text = "json\n" * 2000
    ids = [*[-1] * 2_000_000, 5, 66]
    of_text, of_ids = await served.builder.tokenize([text, ids], keep_last=2)
    assert of_text.ids == tokenizer.encode(text).ids[-2:]
    assert (of_ids.ids, of_ids.text) == ([5, 66], tokenizer.decode([5, 66]))


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_max_wait_ends_only_a_request_that_waits(is_waiting: bool) -> None:
    ended = asyncio.Event()
    stream: Any = SimpleNamespace(is_waiting=is_waiting, end=lambda _: ended.set())
    timers = start_timers(stream, -1.0, 3600.0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert ended.is_set() == is_waiting
    for timer in timers:
        timer.cancel()
    for timer in start_timers(stream, 5.0, 0.0):
        await asyncio.wait_for(ended.wait(), TIMEOUT)  # its deadline has passed, whatever it does
        timer.cancel()

"""Structured output over HTTP: answers follow their grammars, or a 400 says why not."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer, models

from kvasir.server.engine.grammar import compiler
from kvasir.server.engine.grammar.constraints import Grammar
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.errors import DeadlineExceededError
from kvasir.server.requests import grammars
from kvasir.server.requests.request import CompletionRequest, Prompt
from tests.kit.dialects import COMPLETIONS, parsed
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import (
    EOS,
    VOCAB_SIZE,
    Served,
    fake_model_dir,
    sample,
    serving,
    small_tokenizer,
)

tokenizer = small_tokenizer()
ENDINGS = frozenset({EOS})
CLOSING = {str(tokenizer.token_to_id(token)): 6.0 for token in '"]}'}
# Its "{" can be continued in too many ways.
WIDE = {"type": "object", "properties": {f"p{i}": {} for i in range(700)}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def long_runner() -> FakeRunner:
    return FakeRunner(VOCAB_SIZE, max_model_len=1600)


async def post(served: Served, **body: Any) -> httpx.Response:
    everything = {"prompt": [5, 7], "max_tokens": 1500, "logit_bias": CLOSING, "seed": 1} | body
    return await served.client.post("/v1/completions", json=everything)


async def complete(served: Served, **body: Any) -> dict[str, Any]:
    response = await post(served, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_a_stream_equals_the_whole_answer_which_follows_its_grammar() -> None:
    async with serving(long_runner()) as served:
        for fields, pattern in (
            ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
            (schema_format({"enum": [{"a": 1}, ["b"]]}), r'\{"a": ?1\}|\["b"\]'),
            ({"regex": "[ab]{3,9}"}, "[ab]{3,9}"),
            ({"grammar": 'start: "yes" | "no" ", never"'}, "yes|no, never"),
        ):
            whole = (await complete(served, **fields))["choices"][0]["text"]
            events = parsed(COMPLETIONS, (await post(served, stream=True, **fields)).text)
            choices = [choice for event in events for choice in event["choices"]]
            assert "".join(choice["text"] for choice in choices) == whole
            assert choices[-1]["finish_reason"] == "stop"
            assert re.fullmatch(pattern, whole, re.DOTALL)
        answer = await complete(served, regex="read_json", max_tokens=20, logprobs=0, echo=True)
        plain = await complete(served, max_tokens=9)
        free = await complete(served, max_tokens=9, response_format={"type": "text"})
    assert free["choices"] == plain["choices"]
    (choice,) = answer["choices"]
    assert choice["text"].endswith("read_json")
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) - 2


COSTLY = {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(2, 30)]}


async def test_a_grammar_that_cannot_be_held_is_a_bad_request() -> None:
    for_const = b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": %b}}'
    schema = b'{"name": "a", "schema": {"const": %b}}'
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"grammar": "start: other"}, "grammar", "unknown name"),
        (schema_format({"type": "strange"}), "response_format", "strange"),
        (schema_format({"uniqueItems": True}), "response_format", "uniqueItems"),
        (schema_format({"const": "x" * 70_000}), "response_format", "too long"),
        (schema_format(COSTLY), "response_format", "to compile"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema", "required"),
        ({"regex": "a", "grammar": 'start: "a"'}, None, "give one of them"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, None, "give one of them"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens", "regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "regex"),
    ]  # fmt: skip
    async with serving() as served:
        for fields, param, message in cases:
            response = await post(served, max_tokens=9, **fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert message in error["message"]
        for value in (b'"\\ud800"', b"1e999", b"9" * 5000):  # which JSON cannot carry
            body = for_const % (schema % value)
            assert (await served.client.post("/v1/completions", content=body)).status_code == 400
        assert (await post(served, max_tokens=2)).status_code == 200


async def test_a_text_that_cannot_go_on_ends_only_its_own_request() -> None:
    async with serving(long_runner()) as served:
        alone = await complete(served, regex="[ab]{30}")
        stuck, streamed, neighbour = await asyncio.gather(
            post(served, **schema_format(WIDE)),
            post(served, **schema_format(WIDE), stream=True),
            complete(served, regex="[ab]{30}"),
        )
        assert (await served.client.get("/health/live")).status_code == 200
        ends = {
            reason: sample(served.model.metrics, "request_success_total", finished_reason=reason)
            for reason in ("grammar", "error", "stop")
        }
    assert ends == {"grammar": 2, "error": 0, "stop": 2}, "it is no error of the engine"
    error = stuck.json()["error"]
    assert stuck.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert "Parser Error" in error["message"]
    assert error["message"] in streamed.text
    assert neighbour["choices"] == alone["choices"]


async def test_a_model_whose_tokenizer_is_not_supported_serves_without_grammars() -> None:
    words = Tokenizer(models.WordLevel({"a": EOS, "b": 1}, unk_token="a"))  # noqa: S106
    async with serving(model_dir=replace(fake_model_dir(), tokenizer=words)) as served:
        refused = await post(served, regex="a", max_tokens=2, prompt=[1])
        assert (await post(served, max_tokens=2, prompt=[1])).status_code == 200
    assert refused.status_code == 400
    assert "this model's tokenizer" in refused.json()["error"]["message"]


async def test_many_grammars_are_an_overload_and_slow_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "_WAIT_SECONDS", 0)
    async with serving() as served:
        slow = await post(served, regex="a", max_tokens=2)
        served.model.grammars._trials._n_inside += 64
        refused = await post(served, regex="a", max_tokens=2)
        assert (await post(served, max_tokens=2)).status_code == 200
    for response, status, message in (
        (slow, 503, "regex was not compiled within 0 s; try again"),
        (refused, 429, "64 grammars already wait to be compiled; try again"),
    ):
        assert (response.status_code, response.json()["error"]["message"]) == (status, message)
        assert response.headers["retry-after"] == "1"


async def test_a_warm_server_has_read_its_tokens() -> None:
    """Merges only cut texts into tokens, and reading them takes half of the time."""
    async with serving() as served:
        known = served.model.grammars
        known.warm_up()
        await known._trials.run(lambda: None)
        await known._compilations.run(lambda: None)
        process, tokens = known._trial._process, vars(known._compiler)["tokens"]
        assert (await complete(served, regex="a", max_tokens=2))["choices"][0]["text"] == "a"
        assert (known._trial._process, known._compiler.tokens) == (process, tokens)
    assert json.loads(known._trial.model[0])["model"]["merges"] == []


def asking(source: str) -> CompletionRequest:
    return CompletionRequest(
        prompts=[Prompt([5], "a")],
        params=SamplingParams(max_tokens=2),
        grammar=Grammar("regex", source, "regex"),
    )


async def test_a_text_that_uses_up_the_lexer_of_its_grammar_spoils_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "_LIMITS", LLParserLimits(max_lexer_states=60))
    async with serving() as served:
        known, (letter,) = served.model.grammars, tokenizer.encode("a").ids
        first, second = [await known.constraint(asking("a{200}")) for _ in range(2)]
        assert first is not None
        assert second is not None
        for _ in range(200):
            first.set_mask(np.frombuffer(first.matcher.compute_bitmask(), np.uint8), 300, ENDINGS)
            if first.error:
                break
            first.advance(letter, ends=False)
        assert "too many states" in (first.error or "")
        second.advance(letter, ends=False)
        assert second.error is None


async def test_a_known_grammar_is_not_tried_again_and_the_process_ends() -> None:
    async with serving() as served:
        await complete(served, regex="a", max_tokens=2)
        trial = served.model.grammars._trial
        assert trial._process is not None
        trial._process.process.kill()
        trial._process.process.wait()
        assert (await complete(served, regex="a", max_tokens=2))["choices"][0]["text"] == "a"
        await complete(served, regex="b", max_tokens=2)
        assert trial._process.process.poll() is None
    assert trial._process is None


@asynccontextmanager
async def busy(served: Served) -> AsyncIterator[list[str]]:
    """Hold a trial; yield the sources of the grammars that are tried after it."""
    begun, over = threading.Event(), threading.Event()
    trial, tried = served.model.grammars._trial, []
    check = trial.check

    def checking(grammar: Grammar) -> str:
        if not begun.is_set():
            begun.set()
            over.wait()
        else:
            tried.append(grammar.source)
        return check(grammar)

    trial.check = checking  # type: ignore[method-assign]
    first = asyncio.ensure_future(complete(served, regex="slow", max_tokens=9))
    try:
        await asyncio.to_thread(begun.wait)
        yield tried
    finally:
        over.set()
    assert (await first)["choices"][0]["text"] == "slow"


async def test_a_deadline_can_pass_while_a_grammar_waits() -> None:
    async with serving() as served, busy(served) as tried:
        late = await post(served, regex="late", max_tokens=2, timeout_ms=1000)
    assert (late.status_code, late.json()["error"]["type"]) == (504, "deadline_exceeded")
    assert "while the grammar of regex waited" in late.json()["error"]["message"]
    assert "late" not in tried, "an expired request is not worked on"


async def test_a_deadline_that_passed_before_is_not_blamed_on_the_grammar() -> None:
    late = CompletionRequest(
        prompts=[Prompt([5], "a")],
        params=SamplingParams(max_tokens=2),
        grammar=Grammar("regex", "a", "regex"),
        deadline=0.0,
    )
    async with serving() as served:
        with pytest.raises(DeadlineExceededError, match="while the prompt was read"):
            await served.model.complete(late).__aenter__()


async def test_a_refused_grammar_is_tried_once_and_displaces_no_good_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A known grammar does not wait for trials."""
    monkeypatch.setattr(grammars, "_KNOWN", 2)
    async with serving() as served:
        await complete(served, regex="a", max_tokens=2)
        async with busy(served) as tried:
            assert (await complete(served, regex="a", max_tokens=2))["choices"][0]["text"] == "a"
            posts = [
                asyncio.ensure_future(post(served, regex=text, max_tokens=2))
                for text in ["(a"] * 3 + ["((", "((("]
            ]
            await asyncio.sleep(0)
        answers = [await posted for posted in posts]
        await post(served, grammar="(((", max_tokens=2)
        again = await post(served, regex="(((", max_tokens=2)
        await complete(served, regex="a", max_tokens=2)
    assert {answer.status_code for answer in (*answers, again)} == {400}
    assert again.json() == answers[-1].json()
    assert tried == ["(a", "((", "(((", "((("]


async def test_a_trial_that_was_killed_gives_no_verdict() -> None:
    async with serving() as served:
        ended = Mock(side_effect=[ChildProcessError("it was ended"), ""])
        served.model.grammars._trial.check = ended  # type: ignore[method-assign]
        refused = await post(served, regex="a", max_tokens=2)
        assert (await complete(served, regex="a", max_tokens=2))["choices"][0]["text"] == "a"
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "regex: it was ended; try again"

"""Encoder-decoders behind the routes, against generation and beam search in PyTorch."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kvasir.model.directory import ModelDirectory
from kvasir.model.reference import generate
from kvasir.server.engine.engine import Engine
from kvasir.server.process.app import create_app
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import Settings, load_settings
from tests.kit.beam_search import beam_search
from tests.kit.dialects import COMPLETIONS, GENERATE_STREAM, parsed
from tests.kit.fake_seq2seq import EOS, FakeSeq2SeqRunner, read, small_config, small_model
from tests.kit.serving import MODEL, VOCAB_SIZE, fake_model_dir, running, serving, small_tokenizer

LANGUAGES = ("de_DE", "fr_XX", "__en__")
SOURCE = "def read(path)"


def tokenizer_of_languages() -> Tokenizer:
    tokenizer = Tokenizer.from_str(small_tokenizer().to_str())
    tokenizer.add_special_tokens(list(LANGUAGES))
    return tokenizer


TOKENIZER = tokenizer_of_languages()
DE, FR, EN = (TOKENIZER.encode(name).ids[0] for name in LANGUAGES)
NETWORK = small_model(small_config((3, DE), VOCAB_SIZE + len(LANGUAGES)))
MODEL_DIR = replace(fake_model_dir(chat_template=None), config=NETWORK.config, tokenizer=TOKENIZER)


def expected(prefix: list[int], max_tokens: int, source: str = SOURCE) -> str:
    """The likeliest text after a given beginning."""
    read_source = read(NETWORK, TOKENIZER.encode(source).ids)
    ids = generate(NETWORK, prefix, max_tokens=max_tokens, ending_ids=[EOS], source=read_source)
    return str(TOKENIZER.decode(ids))


def client(
    model_dir: ModelDirectory = MODEL_DIR, **settings: Any
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    known = load_settings(model=Path(MODEL), max_num_seqs=4, **settings)
    return running(create_app(known, model_dir, Engine(FakeSeq2SeqRunner(NETWORK), chunk_size=32)))


async def post(path: str, body: dict[str, Any], **settings: Any) -> Any:
    async with client(**settings) as c:
        answer = await c.post(path, json=body)
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.text)


async def test_a_completion_is_the_likeliest_target() -> None:
    """As long as the model allows, unless told otherwise; the source is the prompt."""
    body: dict[str, Any] = {"prompt": SOURCE}
    answer = await post("/v1/completions", body)
    assert answer["choices"][0]["text"] == expected([3, DE], 18)
    assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode(SOURCE).ids)
    answer = await post("/v1/completions", body | {"max_tokens": 4})
    assert answer["choices"][0]["text"] == expected([3, DE], 4)
    assert answer["usage"]["completion_tokens"] == 4
    (answer,) = await post("/", {"inputs": SOURCE, "parameters": {"max_new_tokens": 4}})
    assert answer["generated_text"] == expected([3, DE], 4)


async def test_streams_are_the_same_text() -> None:
    async with client() as c:
        answer = await c.post("/v1/completions", json={"prompt": SOURCE, "stream": True})
        chunks = parsed(COMPLETIONS, answer.text)
        assert len(chunks) > 4
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == expected([3, DE], 18)
        answer = await c.post("/generate_stream", json={"inputs": SOURCE})
        assert parsed(GENERATE_STREAM, answer.text)[-1]["generated_text"] == text


async def test_the_given_beginning() -> None:
    said = TOKENIZER.encode("json").ids
    begun: list[tuple[dict[str, str], list[int]]] = [
        ({"target_language": "fr_XX"}, [3, FR]),
        ({"target_language": "en"}, [3, EN]),
        ({"decoder_prompt": "json"}, [3, DE, *said]),
        ({"decoder_prompt": "json", "target_language": "fr_XX"}, [3, FR, *said]),
    ]
    async with client() as c:
        for fields, prefix in begun:
            text = expected(prefix, 5)
            body = {"prompt": SOURCE, "max_tokens": 5, **fields}
            answer = (await c.post(COMPLETIONS, json=body)).json()
            assert answer["choices"][0]["text"] == text
            body = {"inputs": SOURCE, "parameters": {"max_new_tokens": 5, **fields}}
            answer = (await c.post("/generate", json=body)).json()
            assert answer["generated_text"] == text


@pytest.mark.parametrize("template", ["{} $A <|endoftext|>", "$A <|endoftext|> {}", None])
async def test_the_language_of_a_source(template: str | None) -> None:
    """NLLB's place, the first mBART's, and a tokenizer that adds none; a text may name one, too."""
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    if template is not None:
        named = [(name, tokenizer.token_to_id(name)) for name in ("de_DE", "<|endoftext|>")]
        tokenizer.post_processor = TemplateProcessing(
            single=template.format("de_DE"), special_tokens=named
        )
    body = {"prompt": "read de_DE", "max_tokens": 5, "source_language": "fr_XX"}
    own = TOKENIZER.encode("read de_DE").ids
    (end,) = TOKENIZER.encode("<|endoftext|>").ids
    ids = [FR, *own]
    if template is not None:
        ids = [FR, *own, end] if template.startswith("{}") else [*own, end, FR]
    read_source = read(NETWORK, ids)
    found = generate(NETWORK, [3, DE], max_tokens=5, ending_ids=[EOS], source=read_source)
    answer = await post("/v1/completions", body, model_dir=replace(MODEL_DIR, tokenizer=tokenizer))
    assert answer["choices"][0]["text"] == TOKENIZER.decode(found)
    assert answer["usage"]["prompt_tokens"] == len(ids)


async def test_a_beginning_that_is_too_long_is_named() -> None:
    status, answer = await post("/v1/completions", {"prompt": SOURCE, "decoder_prompt": "a" * 30})
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "decoder_prompt")
    assert "maximum context length is 20 tokens" in error["message"]
    assert "has 30" in error["message"]


async def test_a_language_may_start_a_target() -> None:
    """As in the first mBART, whose targets start with nothing else."""
    starting = replace(MODEL_DIR, config=replace(MODEL_DIR.config, target_prefix=(DE,)))
    body = {"prompt": SOURCE, "max_tokens": 5, "target_language": "fr_XX"}
    answer = await post("/v1/completions", body, model_dir=starting)
    assert answer["choices"][0]["text"] == expected([FR], 5)


async def test_beams_return_the_best_texts_with_scores() -> None:
    search = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True}
    best = beam_search(
        NETWORK,
        read(NETWORK, TOKENIZER.encode(SOURCE).ids),
        n_beams=3,
        max_tokens=6,
        length_penalty=2.0,
        early_stopping=True,
        ending_ids=[EOS],
    )
    texts = [TOKENIZER.decode(one.token_ids) for one in best]
    prompts = {"prompt": ["json", SOURCE], "max_tokens": 6, "n": 2, **search}
    answer = await post("/v1/completions", prompts)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    found = answer["choices"][2:]
    assert [choice["text"] for choice in found] == texts[:2]
    assert [choice["score"] for choice in found] == pytest.approx([b.score for b in best[:2]])
    ends = [one.token_ids[-1] == EOS for one in best[:2]]
    assert [choice["finish_reason"] == "stop" for choice in found] == ends
    async with client() as c:
        body = {"prompt": SOURCE, "max_tokens": 6, "n": 2, "stream": True, **search}
        chunks = parsed(COMPLETIONS, (await c.post(COMPLETIONS, json=body)).text)
        assert [one["choices"][0]["text"] for one in chunks] == texts[:2]  # each at once
        parameters = {"max_new_tokens": 6, "details": True, **search}
        body = {"inputs": SOURCE, "parameters": parameters}
        answer = (await c.post("/generate", json=body)).json()
    assert answer["generated_text"] == texts[0]
    assert answer["details"]["score"] == pytest.approx(best[0].score)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 3, "temperature": 0.7}, "temperature"),
    ({"num_beams": 2, "n": 3}, "num_beams"),
    ({"num_beams": 5}, "max_num_seqs"),
    ({"length_penalty": 2.0}, "num_beams"),
    ({"target_language": "xx_XX"}, "de_DE, en, fr_XX"),
    ({"source_language": "xx_XX"}, "de_DE, en, fr_XX"),
    ({"source_language": "en", "prompt": [5, 6]}, "source_language is for texts"),
    ({"echo": True, "logprobs": 1}, "log-probabilities"),
    ({"max_tokens": 19}, "2 that begin it and 19 to generate"),
    ({"prompt": [5] * 25}, "25"),
]


async def test_refusals() -> None:
    async with client() as c:
        for fields, named in REFUSED:
            answer = await c.post(COMPLETIONS, json={"prompt": SOURCE, **fields})
            assert answer.status_code == 400, fields
            assert named in answer.text, fields


async def test_a_chat_needs_a_template() -> None:
    messages = [{"role": "user", "content": SOURCE}]
    status, text = await post("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "chat template" in text


async def test_decoders_have_no_target() -> None:
    async with serving() as served:
        for field in ("num_beams", "decoder_prompt", "source_language", "target_language"):
            body = {"prompt": SOURCE, field: 2 if field == "num_beams" else "de_DE"}
            answer = await served.client.post(COMPLETIONS, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_what_the_model_is() -> None:
    async with client() as c:
        card = (await c.get("/model")).json()
        info = (await c.get("/info")).json()
        (listed,) = (await c.get("/v1/models")).json()["data"]
    assert card["max_model_len"] == listed["max_model_len"] == 20
    assert card["max_source_len"] == listed["max_source_len"] == 24
    assert card["target_languages"] == ["de_DE", "en", "fr_XX"]
    assert info["max_input_tokens"] == 24
    assert info["model_pipeline_tag"] == "text2text-generation"


@pytest.mark.parametrize(("given", "expected_rows"), [({}, 64), ({"max_num_seqs": 7}, 7)])
async def test_beams_find_more_rows_than_a_decoders_sequences(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int], expected_rows: int
) -> None:
    """The runner and admission get the same number; a decoder keeps its own default."""
    asked: SimpleQueue[int] = SimpleQueue()

    def build(settings: Settings, *_: object) -> Engine:
        asked.put(settings.max_num_seqs)
        return Engine(FakeSeq2SeqRunner(NETWORK), chunk_size=32)

    monkeypatch.setattr("kvasir.server.process.app.build_engine", build)
    known = load_settings(model=Path(MODEL), **given)
    app = create_app(known, MODEL_DIR)
    async with app.router.lifespan_context(app):
        assert await asyncio.to_thread(asked.get) == expected_rows
        assert app.state.models.find().settings.max_num_seqs == expected_rows
    assert ServedModel(known, fake_model_dir()).settings.max_num_seqs == given.get(
        "max_num_seqs", 16
    )

"""/tokenize and /detokenize against the tokenizer itself, in vLLM's form and in TGI's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kvasir.model.template.chat_template import ChatTemplate
from kvasir.model.tokenizer import keep_spaces_in_offsets, train_tokenizer
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import (
    CHAT_TEMPLATE,
    MODEL,
    VOCAB_SIZE,
    Served,
    fake_model_dir,
    serving,
    small_tokenizer,
)
from tests.model.test_tokenizer import with_damaged_charsmap

TEXT = "def read_json(path):\n    return 'naïve ☃🙂'"


async def post(served: Served, path: str, **body: Any) -> Any:
    response = await served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_tokens_are_the_tokenizers_and_lead_back() -> None:
    """A long text is tokenised in a thread."""
    async with serving() as served:
        for text in (TEXT, TEXT * 200, "", "a<|endoftext|>b"):
            encoding = small_tokenizer().encode(text)
            asked = {"model": MODEL, "prompt": text}
            assert await post(served, "/tokenize", **asked, return_token_strs=True) == {
                "prompt": None,
                "count": len(encoding.ids),
                "max_model_len": 64,
                "tokens": encoding.ids,
                "token_strs": encoding.tokens,
                "offsets": [list(span) for span in encoding.offsets],
            }
            assert (await post(served, "/tokenize", prompt=text))["token_strs"] is None
            back = await post(served, "/detokenize", model=MODEL, tokens=encoding.ids)
            assert back == {"prompt": text}


async def test_tgi_gets_a_list_of_tokens() -> None:
    encoding = small_tokenizer().encode(TEXT)
    async with serving() as served:
        answer = await post(served, "/tokenize", inputs=TEXT)
    assert [token["id"] for token in answer] == encoding.ids
    assert [(token["start"], token["stop"]) for token in answer] == encoding.offsets
    assert all(token["text"] == TEXT[token["start"] : token["stop"]] for token in answer)


async def test_messages_are_tokens_of_what_the_template_makes_of_them() -> None:
    """The tokens are those that the model gets for the same chat."""
    tool = {"type": "function", "function": {"name": "f", "description": "d"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "naïve"}], "tools": [tool]}
    rendered = ChatTemplate(CHAT_TEMPLATE).render(
        body["messages"], tools=[tool], add_generation_prompt=True
    )
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=256)) as served:
        answer = (await served.client.post("/tokenize", json=body)).json()
        chat = await served.client.post("/v1/chat/completions", json=body | {"max_tokens": 1})
        ended = await served.client.post("/tokenize", json=body | {"add_generation_prompt": False})
    assert answer["prompt"] == rendered
    assert answer["tokens"] == small_tokenizer().encode(rendered, add_special_tokens=False).ids
    assert chat.json()["usage"]["prompt_tokens"] == answer["count"]
    assert rendered.startswith(ended.json()["prompt"])
    assert ended.json()["count"] < answer["count"]


def byte_level(processor: Any) -> Tokenizer:
    tokenizer = train_tokenizer(["the naïve cat sat on the mat\n" * 3], 290)
    tokenizer.post_processor = processor
    return tokenizer


def sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))  # noqa: S106  of a vocabulary
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    parts = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<unk>", *parts], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat "] * 3, trainer)
    return tokenizer


SHAPES = {
    "plain": byte_level(None),
    "trimming": byte_level(processors.ByteLevel(trim_offsets=True)),
    "trimming, in a sequence": byte_level(
        processors.Sequence([processors.ByteLevel(trim_offsets=True)])
    ),
    "sentence piece": sentence_piece(),
}


@pytest.mark.parametrize("tokenizer", SHAPES.values(), ids=SHAPES.keys())
@given(text=st.text(alphabet="the cat\n  naïve☃🙂e\u0301", max_size=40))
def test_offsets_cover_the_text_and_parts_of_a_character_cover_it_whole(
    tokenizer: Tokenizer, text: str
) -> None:
    keep_spaces_in_offsets(tokenizer)
    place = 0
    for start, end in tokenizer.encode(text).offsets:
        assert start in (place, place - 1)  # after the last token, or at its own character
        assert start < end
        place = end
    assert place == len(text)


async def test_a_panic_of_the_tokenizer_ends_only_its_request() -> None:
    """Of a short text, and of a long one, which is tokenised in a thread."""
    model_dir = fake_model_dir(max_model_len=20_000)
    model_dir = replace(model_dir, tokenizer=with_damaged_charsmap(small_tokenizer(), 0xC3))
    routes: list[tuple[str, dict[str, Any]]] = [("/tokenize", {}), ("/v1/completions", {})]
    routes.append(("/v1/completions", {"stream": True}))
    asked = [(*route, text) for text in ("caf\u00e9", "caf\u00e9 " * 2000) for route in routes]
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=20_000), model_dir=model_dir) as served:
        for path, fields, text in asked:
            answer = await served.client.post(path, json=fields | {"prompt": text})
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["type"] == "internal_error"
            assert answer.headers["x-request-id"] in error["message"]
            answer = await served.client.post(path, json=fields | {"prompt": "cafe"})
            assert answer.status_code == 200
        assert (await served.client.get("/health/ready")).status_code == 200

"""huggingface_hub's InferenceClient: TGI's routes, and chat."""

from __future__ import annotations

import asyncio
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

from tests.conformance.target import Conformed, Target


def use_huggingface(target: Target) -> Conformed:
    client = InferenceClient(target.url, token=target.key)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    text = client.text_generation("def read", **options)
    whole = client.text_generation("def read", details=True, decoder_input_details=True, top_n_tokens=2, **options)
    assert whole.generated_text == text
    assert whole.details is not None
    assert len(whole.details.tokens) == whole.details.generated_tokens
    assert [token.logprob is None for token in whole.details.prefill][:2] == [True, False]
    pieces = list(client.text_generation("def read", stream=True, details=True, **options))
    assert pieces[-1].generated_text == text
    assert [piece.token.id for piece in pieces] == [token.id for token in whole.details.tokens]
    assert pieces[-1].details is not None
    assert pieces[-1].details.finish_reason == whole.details.finish_reason
    assert client.text_generation("def read", return_full_text=True, **options) == "def read" + text
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.text_generation("a", max_new_tokens=0)
    with pytest.raises(ValidationError):
        list(client.text_generation("a", max_new_tokens=10**6, stream=True))
    messages = [{"role": "user", "content": "def"}]
    said = client.chat_completion(messages, max_tokens=6, temperature=0.0).choices[0].message.content
    stream = client.chat_completion(messages, max_tokens=6, temperature=0.0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == said
    assert asyncio.run(_generate(target, options)) == text
    return Conformed("huggingface_hub", huggingface_hub.__version__, 9)


async def _generate(target: Target, options: dict[str, Any]) -> str:
    async with AsyncInferenceClient(target.url, token=target.key) as client:
        text: str = await client.text_generation("def read", **options)
        return text

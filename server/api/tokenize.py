"""POST /tokenize and /detokenize as vLLM has them; TGI's form of /tokenize."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from pydantic_core import from_json, to_json
from starlette.responses import Response
from tokenizers import Encoding

from server.api.openai.answers import check_model
from server.api.openai.chat import render
from server.api.openai.chat_schemas import Conversation
from server.api.responses import json_response, service_of
from server.api.schemas import Body, Count, parse
from server.requests.service import Service

router = APIRouter()


class TokenizeBody(Body):
    """POST /tokenize of a text."""

    model: str | None = Field(None, description="The served model's name; another is 404.")
    prompt: str = Field(description="The text.")
    add_special_tokens: bool = Field(
        True, description="Those that the tokenizer puts around a text."
    )
    return_token_strs: bool = Field(False, description="The tokens' names in the vocabulary too.")


class TokenizeChatBody(Conversation):
    """The same of a conversation, whose text the template ends and begins."""

    model: str | None = Field(None, description="The served model's name; another is 404.")
    return_token_strs: bool = Field(False, description="The tokens' names in the vocabulary too.")


class TokenizeInputsBody(Body):
    """The same in TGI's words."""

    inputs: str = Field(description="The text.")
    add_special_tokens: bool = Field(
        True, description="Those that the tokenizer puts around a text."
    )


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = Field(None, description="The served model's name; another is 404.")
    tokens: list[Count] = Field(description="Token ids; special tokens are written out.")


_FORMS: dict[str, type[Body]] = {"messages": TokenizeChatBody, "inputs": TokenizeInputsBody}


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    service = service_of(request)
    raw = await request.body()
    body = parse(_form(raw), raw)
    if isinstance(body, TokenizeInputsBody):
        return json_response(
            await service.aside(len(body.inputs), lambda: to_json(_simple_tokens(service, body)))
        )
    assert isinstance(body, TokenizeBody | TokenizeChatBody)
    check_model(service, body.model)
    text = body.prompt if isinstance(body, TokenizeBody) else await render(service, body, len(raw))
    return json_response(
        await service.aside(len(text), lambda: to_json(_tokens(service, body, text)))
    )


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    service = service_of(request)
    body = parse(DetokenizeBody, await request.body())
    check_model(service, body.model)
    service.check_token_ids(body.tokens, "tokens")
    tokenizer = service.bundle.tokenizer
    decode = partial(tokenizer.decode_batch, [body.tokens], skip_special_tokens=False)
    (text,) = await service.aside(len(body.tokens), decode)
    return json_response(to_json({"prompt": text}))


def _form(raw: bytes) -> type[Body]:
    """Which of the bodies it is meant to be, by the field that holds the text."""
    fields: Any = None
    with suppress(ValueError):  # the parser says what is wrong with it
        fields = from_json(raw)
    given = fields if isinstance(fields, dict) else {}
    return next(
        (form for name, form in _FORMS.items() if given.get(name) is not None), TokenizeBody
    )


def _encode(service: Service, text: str, add_special_tokens: bool) -> Encoding:
    """As a batch of one, which leaves the interpreter to others meanwhile."""
    encodings: list[Encoding] = service.bundle.tokenizer.encode_batch(
        [text], add_special_tokens=add_special_tokens
    )
    return encodings[0]


def _tokens(service: Service, body: TokenizeBody | TokenizeChatBody, text: str) -> dict[str, Any]:
    encoding = _encode(service, text, body.add_special_tokens)
    return {
        "prompt": text if isinstance(body, TokenizeChatBody) else None,
        "count": len(encoding.ids),
        "max_model_len": service.max_model_len,
        "tokens": encoding.ids,
        "token_strs": encoding.tokens if body.return_token_strs else None,
        "offsets": encoding.offsets,
    }


def _simple_tokens(service: Service, body: TokenizeInputsBody) -> list[dict[str, Any]]:
    encoding = _encode(service, body.inputs, body.add_special_tokens)
    return [
        {"id": token_id, "text": body.inputs[start:stop], "start": start, "stop": stop}
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]

"""POST /tokenize and /detokenize in vLLM's form, and /tokenize in TGI's."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json
from starlette.responses import Response
from tokenizers import Encoding

from kvasir.server.api import schemas
from kvasir.server.api.http.body import BodyRoute
from kvasir.server.api.http.pieces import held_response
from kvasir.server.api.http.responses import BODY_ERRORS, served_model
from kvasir.server.api.openai.chat import render
from kvasir.server.api.openai.chat_schemas import Conversation
from kvasir.server.errors import ContextLengthError
from kvasir.server.requests.served_model import ServedModel

router = APIRouter(route_class=BodyRoute)

_CHAR_BYTES = 4  # of a text in memory
_ReturnNames = Annotated[bool, Field(description="Return the tokens' names in the vocabulary too.")]


class TokenizeBody(schemas.RequestBody):
    """The body of POST /tokenize for a text."""

    model: schemas.ModelName = None
    prompt: str = Field(description="The text.")
    add_special_tokens: schemas.AddSpecialTokens = True
    return_token_strs: _ReturnNames = False


class TokenizeChatBody(Conversation):
    """The body of POST /tokenize for a conversation."""

    model: schemas.ModelName = None
    return_token_strs: _ReturnNames = False


class TokenizeInputsBody(schemas.RequestBody):
    """The body of POST /tokenize in TGI's form."""

    model: schemas.ModelName = None
    inputs: str = Field(description="The text.")
    add_special_tokens: schemas.AddSpecialTokens = True


def _form(body: object) -> str:
    """Return the tag of the form; no field is called like one, which errors could confuse."""
    given = body if isinstance(body, dict) else {}
    return next((f"<{k}>" for k in ("messages", "inputs") if given.get(k) is not None), "<prompt>")


AnyTokenizeBody = Annotated[
    Annotated[TokenizeBody, Tag("<prompt>")]
    | Annotated[TokenizeChatBody, Tag("<messages>")]
    | Annotated[TokenizeInputsBody, Tag("<inputs>")],
    Discriminator(_form),
]


class DetokenizeBody(schemas.RequestBody):
    """The body of POST /detokenize."""

    model: schemas.ModelName = None
    tokens: schemas.Items[schemas.Count] = Field(
        description="Token ids; special tokens are written out."
    )


class Tokens(schemas.ResponseBody):
    """The tokens of a text or a conversation."""

    prompt: str | None = Field(description="The text that the template made of messages.")
    count: schemas.Size
    max_model_len: schemas.Size
    tokens: list[schemas.Size]
    token_strs: list[str] | None = Field(description="Names in the vocabulary.")
    offsets: list[tuple[schemas.Size, schemas.Size]] = Field(
        description="The begin and end of each token, in characters of the prompt. A token that is "
        "part of a character spans all of it; one that the tokenizer adds is empty."
    )


class SimpleToken(schemas.ResponseBody):
    """A token, as TGI describes it."""

    id: schemas.Size
    text: str
    start: schemas.Size
    stop: schemas.Size


class Detokenized(schemas.ResponseBody):
    """The text of token ids."""

    prompt: str


@router.post("/tokenize", response_model=Tokens | list[SimpleToken], responses=BODY_ERRORS)
async def tokenize(request: Request, body: AnyTokenizeBody) -> Response:
    """Turn text or messages into tokens, in vLLM's form; for `inputs`, in TGI's."""
    served = served_model(request)
    if isinstance(body, TokenizeChatBody):
        _, text = await render(request, body)
    else:
        text = body.prompt if isinstance(body, TokenizeBody) else body.inputs

    def work() -> bytes:
        served.builder.check_text(text, "prompt")
        # Only the batch method releases the interpreter's lock.
        encoding: Encoding
        (encoding,) = served.model_dir.tokenizer.encode_batch(
            [text], add_special_tokens=body.add_special_tokens
        )
        if len(encoding) > served.builder.most_tokens:
            raise _too_many_tokens(len(encoding), served, "prompt")
        ids, offsets = encoding.ids, encoding.offsets
        if isinstance(body, TokenizeInputsBody):
            return to_json(
                [
                    {"id": token_id, "text": text[start:stop], "start": start, "stop": stop}
                    for token_id, (start, stop) in zip(ids, offsets, strict=True)
                ]
            )
        return to_json(
            {
                "prompt": text if isinstance(body, TokenizeChatBody) else None,
                "count": len(ids),
                "max_model_len": served.builder.max_model_len,
                "tokens": ids,
                "token_strs": encoding.tokens if body.return_token_strs else None,
                "offsets": offsets,
            }
        )

    return held_response(await served.text_worker.call(len(text), work), served)


@router.post("/detokenize", response_model=Detokenized, responses=BODY_ERRORS)
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """Turn tokens into text."""
    served = served_model(request)
    if len(body.tokens) > served.builder.most_tokens:
        raise _too_many_tokens(len(body.tokens), served, "tokens")
    served.builder.check_token_ids(body.tokens, "tokens")
    tokenizer = served.model_dir.tokenizer

    def work() -> bytes:
        n_chars = sum(len(tokenizer.id_to_token(token_id) or "") for token_id in body.tokens)
        served.answers[False].check(n_chars * _CHAR_BYTES, "send fewer tokens", "tokens")
        # Only the batch method releases the interpreter's lock.
        (text,) = tokenizer.decode_batch([body.tokens], skip_special_tokens=False)
        return to_json({"prompt": text})

    return held_response(await served.text_worker.call(len(body.tokens), work), served)


def _too_many_tokens(n: int, served: ServedModel, param: str) -> ContextLengthError:
    message = f"{param}: {n} tokens are too many: at most {served.builder.most_tokens} at once"
    return ContextLengthError(message, param=param)

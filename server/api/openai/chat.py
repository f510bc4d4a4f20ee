"""OpenAI's chat: POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from model.chat_template import ChatTemplateError
from server.api.openai.answers import Chat, ChatEvent
from server.api.openai.chat_formatter import ChatFormatter
from server.api.openai.chat_schemas import ChatBody, Conversation, Tool
from server.api.openai.tools import ToolUse
from server.api.responses import respond, service_of, state_of, streamed
from server.api.schemas import BodyRoute
from server.errors import ContextLengthError, InvalidRequestError
from server.requests.builder import in_thread_if_long
from server.requests.service import Service
from server.text.chat_format import ChatFormat

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=Chat, responses=streamed(ChatEvent))
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer in a conversation, as OpenAI does."""
    service, state = service_of(request), state_of(request.scope)
    tools = ToolUse.of(body, chat_format(service), service)
    options = body.options(
        [await render(request, body, body.usable_tools)],
        service.bundle.generation,
        default_max_tokens=service.builder.max_model_len,
        logprobs=body.top_logprobs if body.logprobs else None,
        grammar=tools.grammar,
        kept_ids=tools.kept_ids,
        add_special_tokens=body.add_special_tokens,
    )
    try:
        wanted = await service.builder.build(options, state)
    except ContextLengthError as error:
        raise ContextLengthError(error.message, param="messages") from None
    formatter = ChatFormatter(service, body, state.id, tools)
    return await respond(request, wanted, formatter, stream=body.stream)


def chat_format(service: Service) -> ChatFormat:
    """Return the model's chat format. Raises InvalidRequestError if it has no chat template."""
    if service.chat is None:
        raise InvalidRequestError(
            "this model has no chat template: export a checkpoint with chat_template.jinja, "
            "or send the text itself to /v1/completions"
        )
    return service.chat


async def render(request: Request, conversation: Conversation, tools: list[Tool]) -> str:
    """Return the text of a conversation that shows tools, with special tokens such as BOS."""
    size, chat = len(await request.body()), chat_format(service_of(request))
    add_generation_prompt = conversation.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not conversation.continue_final_message

    def work() -> str:
        return chat.render(
            [message.for_template() for message in conversation.messages],
            tools=[tool.given for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.chat_template_kwargs,
        )

    try:
        return await in_thread_if_long(size, work)
    except ChatTemplateError as error:
        raise InvalidRequestError(f"messages: {error}", param="messages") from None

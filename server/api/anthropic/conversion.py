"""Anthropic's form of a conversation as OpenAI's, which everything behind it knows."""

from __future__ import annotations

from kvasir.server.api.anthropic.schemas import (
    AnthropicTool,
    Block,
    CountTokensBody,
    InputMessage,
    InputThinkingBlock,
    InputToolUseBlock,
    MessagesBody,
    ToolResultBlock,
)
from kvasir.server.api.openai.chat_schemas import ChatBody
from kvasir.server.api.openai.formatting import JSON, join
from kvasir.server.api.openai.schemas import TextPart
from kvasir.server.api.schemas import SamplingFields
from kvasir.server.errors import InvalidRequestError

# Claude Code's line about itself. It differs between sessions, which then would share no prefix.
_BILLING = "x-anthropic-billing-header:"


def chat_body(body: CountTokensBody) -> ChatBody:
    """Return the chat that a body asks for, without `max_tokens`. Raises InvalidRequestError."""
    system: list[Block] = [part for part in body.system if not part.text.startswith(_BILLING)]
    first = [InputMessage.model_construct(role="system", content=system)] if system else []
    chat: JSON = {
        "messages": _messages([*first, *body.messages]),
        "tools": [{"type": "function", "function": _function(tool)} for tool in body.tools],
        **_choice(body),
        **_thinking(body),
    }
    if body.messages[-1].role == "assistant":
        if not chat["messages"][-1]["content"]:
            raise InvalidRequestError(
                "messages: the last turn is the assistant's, but has no text to continue",
                param="messages",
            )
        chat["continue_final_message"] = True
    if isinstance(body, MessagesBody):
        given = body.model_fields_set & SamplingFields.model_fields.keys()
        chat |= {name: getattr(body, name) for name in given}
    return ChatBody.model_validate(chat)


def _messages(turns: list[InputMessage]) -> list[JSON]:
    """Return messages, one for consecutive turns of a role, but one for each result of a tool."""
    messages: list[JSON] = []
    for turn in turns:
        results = [block for block in turn.content if isinstance(block, ToolResultBlock)]
        for result in results:
            told = {"tool_call_id": result.tool_use_id, "content": result.text}
            messages.append({"role": "tool", **told})
        if len(results) == len(turn.content) > 0:
            continue
        if not (messages and messages[-1]["role"] == turn.role):
            messages.append({"role": turn.role, "content": []})
        for block in turn.content:
            if isinstance(block, TextPart):
                join(messages[-1], {"content": [{"type": "text", "text": block.text}]})
            elif isinstance(block, InputToolUseBlock):
                called = {"name": block.name, "arguments": block.input}
                call = {"id": block.id, "type": "function", "function": called}
                join(messages[-1], {"tool_calls": [call]})
            elif isinstance(block, InputThinkingBlock):
                join(messages[-1], {"reasoning_content": block.thinking})
    return messages


def _function(tool: AnthropicTool) -> JSON:
    function: JSON = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return function | ({"strict": True} if tool.strict else {})


def _choice(body: CountTokensBody) -> JSON:
    """Return the fields for the choice of a tool."""
    choice = body.tool_choice
    if choice is None:
        return {}
    wanted: JSON | str = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        wanted = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": wanted, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(body: CountTokensBody) -> JSON:
    """Return the fields for reasoning and the form of the text."""
    fields: JSON = {}
    if (config := body.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if (thinking := body.thinking) is not None and thinking.type != "adaptive":
        variables: JSON = {"enable_thinking": thinking.type == "enabled"}
        if thinking.budget_tokens is not None:
            variables["thinking_budget"] = thinking.budget_tokens
        fields["chat_template_kwargs"] = variables
    return fields

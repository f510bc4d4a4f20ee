"""The forms of messages and calls that a model's chat template takes.

Templates declare these nowhere, so probe conversations are rendered to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any, Literal

from pydantic_core import from_json

from model.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateLimitError
from server.text.tool_calls import ToolCallFormat, ToolCallParser, ToolCallPiece

Message = Mapping[str, Any]
ToolCallOption = Literal["auto", "hermes", "llama", "none"]

_MARK = "\ue000\ue001\ue000"  # the place where a message is to be continued; in no real text
_WORD = "Kalimantan"
_USER = {"role": "user", "content": "How is the weather in Rome?"}
_CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
_CALLS = [{"id": "call00000", "type": "function", "function": _CALL}]
_CALLING = {"role": "assistant", "content": "", "tool_calls": _CALLS}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"name": "get_weather", "description": "The weather in a city.", "parameters": _CITY}
_BEFORE: dict[str, list[dict[str, Any]]] = {
    "system": [],
    "user": [],
    "assistant": [_USER],
    "tool": [_USER, _CALLING],
}


class ChatFormat:
    """A chat template, with the forms of content that each role takes, and its format of calls.

    Raises ChatTemplateLimitError for a template that cannot render even a probe in its limits.
    """

    def __init__(self, template: ChatTemplate, tool_calls: ToolCallOption = "auto") -> None:
        self._template = template
        self._takes_text, self._takes_parts = set[str](), set[str]()
        for role in _BEFORE:
            text = self._probe(role, _WORD)
            parts = self._probe(role, [{"type": "text", "text": _WORD}])
            if text is not None:
                self._takes_text.add(role)
            if parts is not None and text in {None, parts}:  # else it shows how parts are written
                self._takes_parts.add(role)
        if tool_calls == "auto":
            self.tool_calls = _call_format(template)
        else:
            self.tool_calls = ToolCallFormat.__members__.get(tool_calls.upper())

    def render(
        self, messages: Sequence[Message], /, *, continue_final_message: bool = False, **others: Any
    ) -> str:
        """Return the prompt for a conversation; the others are options of `ChatTemplate.render`.

        continue_final_message: end it where the last message ends. Raises ChatTemplateError.
        """
        fitted = [self._fit(message) for message in messages]
        if not continue_final_message:
            return self._template.render(fitted, **others)
        content = fitted[-1]["content"]
        if not content:
            raise ChatTemplateError(
                "continue_final_message: the final message has no content to continue"
            )
        if isinstance(content, str):
            content = f"{content}{_MARK} "
        else:
            content = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_MARK} "}]
        text = self._template.render([*fitted[:-1], {**fitted[-1], "content": content}], **others)
        text, mark, after = text.rpartition(_MARK)
        if not mark:
            raise ChatTemplateError(
                "the chat template cannot render this: it leaves out the final message"
            )
        return text if after.startswith(" ") else text.rstrip()  # as the template trims content

    def _fit(self, message: Message) -> Message:
        """Return a message with the role and the form of content that the template takes."""
        role, content = message["role"], message.get("content")
        if role == "developer" and role not in self._template.source:
            role = "system"
        known = role if role in _BEFORE else "system"
        takes_parts = known in self._takes_parts
        if isinstance(content, str) and takes_parts and known not in self._takes_text:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not takes_parts:
            content = "\n".join(part["text"] for part in content)
        return {**message, "role": role, "content": content}

    def _probe(self, role: str, content: str | list[dict[str, str]]) -> str | None:
        """Return a conversation in which the template shows content, None if it does not."""
        message = {"role": role, "content": content}
        if role == "tool":
            message["tool_call_id"] = "call00000"
        after = [_USER] if role == "system" else []
        try:
            text = self._template.render([*_BEFORE[role], message, *after])
        except ChatTemplateLimitError:
            raise
        except ChatTemplateError:
            return None
        return text if _WORD in text else None


def _call_format(template: ChatTemplate) -> ToolCallFormat | None:
    """Return the format that reads back a call as the template writes it, None if there is none."""
    tools = [{"type": "function", "function": _TOOL}]
    try:
        prompt = template.render([_USER], tools=tools, add_generation_prompt=True)
        text = template.render([_USER, _CALLING], tools=tools)
    except ChatTemplateLimitError:
        raise
    except ChatTemplateError:
        return None
    answer = text[len(commonprefix([prompt, text])) :]  # noqa: RUF071  (no paths)
    for form in ToolCallFormat:
        parser = ToolCallParser(form)
        pieces = (*parser.push(answer), *parser.flush())
        calls = [piece for piece in pieces if isinstance(piece, ToolCallPiece)]
        arguments = "".join(piece.arguments for piece in calls)
        with suppress(ValueError):
            call = {"name": "".join(c.name or "" for c in calls), "arguments": from_json(arguments)}
            if parser.n_calls == 1 and call == _CALL:
                return form
    return None

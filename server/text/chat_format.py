"""How one model's chat template wants a conversation, found by asking it: templates say so nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, Literal

from pydantic_core import from_json

from model.chat_template import ChatTemplate, ChatTemplateError
from server.text.tool_calls import ToolCallFormat, ToolCallParser, ToolCallPiece

_MARK = "\ue000\ue001\ue000"  # stands where a message is to be continued; in nobody's text
_WORD = "Kalimantan"
_USER = {"role": "user", "content": "How is the weather in Rome?"}
_CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
_CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": _CALL}],
}
_TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
_BEFORE: dict[str, list[dict[str, Any]]] = {
    "system": [],
    "user": [],
    "assistant": [_USER],
    "tool": [_USER, _CALLING],
}
_AFTER: dict[str, list[dict[str, Any]]] = {"system": [_USER]}

Message = Mapping[str, Any]
Content = str | list[dict[str, str]]


class ChatFormat:
    """A template, what it makes of texts and of lists of parts, and the format in which it writes calls.

    tool_calls: that format; auto finds it out.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tool_calls: Literal["auto", "hermes", "llama", "none"] = "auto",
    ) -> None:
        self._template = template
        self._reads_text = {role: self._show(role, _WORD) is not None for role in _BEFORE}
        self._reads_parts = {role: self._shows_parts(role) for role in _BEFORE}
        known = {"auto": _format_of(template), "none": None}
        self.tool_calls = known[tool_calls] if tool_calls in known else ToolCallFormat(tool_calls)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt, with the rest as ChatTemplate.render has it.

        continue_final_message: end it where the last message ends. Raises ChatTemplateError.
        """
        fitted = [self._fitted(message) for message in messages]
        if not continue_final_message:
            return self._template.render(
                fitted, add_generation_prompt=add_generation_prompt, **options
            )
        text = self._template.render([*fitted[:-1], _marked(fitted[-1])], **options)
        text, mark, after = text.rpartition(_MARK)
        if not mark:
            raise ChatTemplateError(
                "the chat template cannot render this: it leaves out the final message"
            )
        return (
            text if after.startswith(" ") else text.rstrip()
        )  # where the template trims, it would have here

    def _fitted(self, message: Message) -> Message:
        """With the role and the form of content that the template knows."""
        role, content = message["role"], message.get("content")
        if role == "developer" and role not in self._template.source:
            role = "system"
        known = role if role in _BEFORE else "system"
        if isinstance(content, str) and not self._reads_text[known] and self._reads_parts[known]:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self._reads_parts[known]:
            content = "\n".join(part["text"] for part in content)
        return {**message, "role": role, "content": content}

    def _show(self, role: str, content: Content) -> str | None:
        """A conversation in which the template shows this content; None if it does not."""
        probe = {
            "role": role,
            "content": content,
            **({"tool_call_id": "call00000"} if role == "tool" else {}),
        }
        try:
            text = self._template.render([*_BEFORE[role], probe, *_AFTER.get(role, [])])
        except ChatTemplateError:
            return None
        return text if _WORD in text else None

    def _shows_parts(self, role: str) -> bool:
        """Whether it shows the text of parts, and not how they are written."""
        text = self._show(role, [{"type": "text", "text": _WORD}])
        return text is not None and (not self._reads_text[role] or text == self._show(role, _WORD))


def _marked(message: Message) -> Message:
    content = message["content"]
    if not content:
        raise ChatTemplateError(
            "continue_final_message: the final message has no content to continue"
        )
    if isinstance(content, str):
        return {**message, "content": f"{content}{_MARK} "}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": f"{last['text']}{_MARK} "}]}


def _format_of(template: ChatTemplate) -> ToolCallFormat | None:
    """The format that reads back the call that the template has written down."""
    tools = [{"type": "function", "function": _TOOL}]
    try:
        prompt = template.render([_USER], tools=tools, add_generation_prompt=True)
        text = template.render([_USER, _CALLING], tools=tools)
    except ChatTemplateError:
        return None
    answer = text[len(commonprefix([prompt, text])) :]  # noqa: RUF071  (no paths)
    return next((form for form in ToolCallFormat if _reads_back(form, answer)), None)


def _reads_back(form: ToolCallFormat, text: str) -> bool:
    parser = ToolCallParser(form)
    calls = [
        piece for piece in (*parser.push(text), *parser.flush()) if isinstance(piece, ToolCallPiece)
    ]
    try:
        arguments = from_json("".join(piece.arguments for piece in calls))
    except ValueError:
        return False
    return [piece.name for piece in calls if piece.name] == [_CALL["name"]] and arguments == _CALL[
        "arguments"
    ]

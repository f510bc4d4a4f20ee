"""The forms of messages, calls and reasoning that a model's chat template takes and writes.

Templates declare these nowhere, so probe conversations are rendered to find out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import product, takewhile
from os.path import commonprefix
from typing import Any

from pydantic_core import from_json

from kvasir.model.template.chat_template import (
    NULL,
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateLimitError,
)
from kvasir.server.text.reasoning import ReasoningFormat
from kvasir.server.text.tool_calls import ToolCallParser, ToolCallPiece
from kvasir.server.text.tool_formats import ToolCallFormat

Message = Mapping[str, Any]

_MARK = "\ue000\ue001\ue000"  # the place where a message is to be continued; in no real text
_WORD = "Kalimantan"
_USER = {"role": "user", "content": "How is the weather?"}
_CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"name": "get_weather", "description": "The weather in a city.", "parameters": _CITY}
_TOOLS = [{"type": "function", "function": _TOOL}]
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # of a message's reasoning
_MOST_PROBE = 2**18  # characters; published templates make up to 2**15
_ROLES = ("system", "user", "assistant", "tool")
_NO_CONTENT: tuple[Message, ...] = ({}, {"content": NULL}, {"content": ""})
# The marks of formats in prompts that tell a model to use them.
_SHOWN = {
    ToolCallFormat.SEED: "<seed:tool_call>",
    ToolCallFormat.MINIMAX: "<minimax:tool_call>",
    ToolCallFormat.QWEN_CODER: "<function=",
    ToolCallFormat.GLM: "<arg_key>",
    ToolCallFormat.NEMOTRON: "<TOOLCALL>",
    ToolCallFormat.HUNYUAN: "<tool_calls>",
    ToolCallFormat.HERMES: "<tool_call>",
    ToolCallFormat.GRANITE: r"<\|tool_call\|>",
    ToolCallFormat.PYTHONIC: r"\[\w+\(\w+=",
}
# Mistral's templates take ids of nine characters only.
_ID, _SHORT_ID = "call_0123456789abcdef01234567", "call00000"


class ChatFormat:
    """A chat template, with the forms of messages that it takes, and of calls and reasoning.

    Raises ChatTemplateLimitError for a template that cannot render even a probe in its limits.
    """

    def __init__(
        self, template: ChatTemplate, tool_calls: str = "auto", reasoning: str = "auto"
    ) -> None:
        self._template = template
        self._no_content, self._takes_json, self._takes_short_ids = self._form_of_calls()
        self._takes_text, self._takes_parts = set[str](), set[str]()
        for role in _ROLES:
            text = self._probe(role, _WORD)
            parts = self._probe(role, [{"type": "text", "text": _WORD}])
            if text is not None:
                self._takes_text.add(role)
            if parts is not None and text in {None, parts}:  # else it shows how parts are written
                self._takes_parts.add(role)
        late = self._render([_USER, {"role": "system", "content": _WORD}])
        self._takes_late_system = late is not None and _WORD in late
        self._takes_any_role = self._probe("narrator", _WORD) is not None
        if tool_calls == "auto":
            self.tool_calls = self._call_format()
        else:
            self.tool_calls = ToolCallFormat.__members__.get(tool_calls.upper())
        if reasoning == "auto":
            named = (form for form in ReasoningFormat if form.closing in template.source)
            self.reasoning = next(named, None)
        else:
            self.reasoning = ReasoningFormat.__members__.get(reasoning.upper())

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """Return the prompt for a conversation; the options are those of `ChatTemplate.render`.

        continue_final_message: end it where the last message ends: its content, or without any its
        reasoning. Raises ChatTemplateError.
        """
        fitted = self._placed([self._fit(message) for message in messages])
        if not continue_final_message:
            return self._template.render(fitted, **options)
        text = self._template.render([*fitted[:-1], _marked(fitted[-1])], **options)
        text, mark, after = text.rpartition(_MARK)
        if not mark:
            raise ChatTemplateError(
                "the chat template cannot render this: it leaves out the final message"
            )
        return text if after.startswith(" ") else text.rstrip()  # as the template trims content

    def _placed(self, messages: list[Message]) -> list[Message]:
        """Return messages with system messages only where the template shows them.

        One after the first turn becomes part of the user's turn there, if it has to.
        """
        n_first = sum(1 for _ in takewhile(lambda message: message["role"] == "system", messages))
        late = {i for i, m in enumerate(messages) if i > n_first and m["role"] == "system"}
        if self._takes_late_system or not late:
            return messages
        placed: list[Message] = []
        for i, message in enumerate(messages):
            told = {**message, "role": "user"} if i in late else message
            if placed and placed[-1]["role"] == told["role"] == "user" and {i - 1, i} & late:
                told = self._fit({**told, "content": _parts(placed.pop()) + _parts(told)})
            placed.append(told)
        return placed

    def _fit(self, message: Message) -> Message:
        """Return a message with the role, content and calls in the forms that the template takes.

        Raises ChatTemplateError for a role that it does not know.
        """
        role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
        if role not in _ROLES and not self._names(role):
            if role == "developer":
                role = "system"
            elif not self._takes_any_role:
                raise ChatTemplateError(
                    f"the chat template names no role {role!r}; use one of {', '.join(_ROLES)}"
                )
        fitted = {**message, "role": role}
        nearest_role = role if role in _ROLES else "system"
        takes_parts = nearest_role in self._takes_parts
        if calls:
            fitted["tool_calls"] = [self._fit_call(call) for call in calls]
        if not content:
            fitted.pop("content", None)
            fitted |= self._no_content if calls else {"content": ""}
        elif isinstance(content, str) and takes_parts and nearest_role not in self._takes_text:
            fitted["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not takes_parts:
            fitted["content"] = "\n".join(part["text"] for part in content)
        if "tool_call_id" in message:
            fitted["tool_call_id"] = self._fit_id(message["tool_call_id"])
        return fitted

    def _fit_call(self, call: Message) -> Message:
        """Return a call with its arguments as an object or a text.

        Arguments that are no object stay as text: the model wrote them, and should see them.
        """
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict) and self._takes_json:
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not self._takes_json:
            with suppress(ValueError):
                values = from_json(arguments.strip() or "{}", allow_inf_nan=False)
                arguments = values if isinstance(values, dict) else arguments
        identity = {"id": self._fit_id(call["id"])} if "id" in call else {}
        return {**call, **identity, "function": {**call["function"], "arguments": arguments}}

    def _fit_id(self, call_id: str) -> str:
        if not self._takes_short_ids or len(call_id) == len(_SHORT_ID):
            return call_id
        return blake2b(call_id.encode()).hexdigest()[: len(_SHORT_ID)]

    def _names(self, role: str) -> bool:
        return any(f"{mark}{role}{mark}" in self._template.source for mark in "'\"")

    def _form_of_calls(self) -> tuple[Message, bool, bool]:
        """Return what messages that only call hold as content, and if they take JSON and short ids.

        The first form that shows the call, or else that the template takes; transformers' first.
        """
        taken: tuple[Message, bool, bool] | None = None
        for form in product(_NO_CONTENT, (False, True), (False, True)):
            text = self._render([_USER, _calling(*form)], tools=_TOOLS)
            if text is None or "None" in text or "{'city'" in text:  # Python's words are a mishap
                continue
            if "Rome" in text:
                return form
            taken = taken or form
        return taken or ({}, False, False)

    def _calling(self) -> dict[str, Any]:
        return _calling(self._no_content, self._takes_json, self._takes_short_ids)

    def _probe(self, role: str, content: str | list[dict[str, str]]) -> str | None:
        """Return a conversation in which the template shows content, None if it does not."""
        message: dict[str, Any] = {"role": role, "content": content}
        before: list[Message] = [] if role in ("system", "user") else [_USER]
        if role == "tool":
            before.append(self._calling())
            message["tool_call_id"] = _SHORT_ID if self._takes_short_ids else _ID
        text = self._render([*before, message, *([_USER] if role == "system" else [])])
        return text if text is not None and _WORD in text else None

    def _render(self, messages: Sequence[Message], **options: Any) -> str | None:
        """Return the text of a probe, None if the template refuses it."""
        try:
            text = self._template.render(messages, **options)
            if len(text) > _MOST_PROBE:
                problem = f"the chat template makes {len(text)} characters of a few words"
                raise ChatTemplateLimitError(f"{problem}; at most {_MOST_PROBE} are safe")
            return text
        except ChatTemplateLimitError:
            raise
        except ChatTemplateError:
            return None

    def _call_format(self) -> ToolCallFormat | None:
        """Return the format that reads back a call as the template writes it.

        If it writes none, return the format that it shows to the model with the tools, or None.
        """
        text = self._render([_USER, self._calling()], tools=_TOOLS)
        for is_begun in (True, False):
            # A prompt that begins the answer may begin with the same characters as a call.
            prompt = self._render([_USER], tools=_TOOLS, add_generation_prompt=is_begun)
            if text is not None and prompt is not None:
                answer = text[len(commonprefix([prompt, text])) :]  # noqa: RUF071  (no paths)
                if (form := _format_of(answer)) is not None:
                    return form
        plain, shown = self._render([_USER]) or "", self._render([_USER], tools=_TOOLS) or ""
        for form, pattern in _SHOWN.items():
            if re.search(pattern, shown) and not re.search(pattern, plain):
                return form
        return None


def _marked(message: Message) -> Message:
    """Return a message with a mark where it is to be continued. Raises ChatTemplateError."""
    content = message.get("content")
    if isinstance(content, str) and content:
        return {**message, "content": f"{content}{_MARK} "}
    if content:
        last = {**content[-1], "text": f"{content[-1]['text']}{_MARK} "}
        return {**message, "content": [*content[:-1], last]}
    thoughts = {name: message[name] for name in REASONING_NAMES if message.get(name)}
    if not thoughts:
        raise ChatTemplateError(
            "continue_final_message: the final message has no content or reasoning to continue"
        )
    return {**message, **{name: f"{thought}{_MARK} " for name, thought in thoughts.items()}}


def _parts(message: Message) -> list[Message]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _calling(no_content: Message, as_json: bool, short_id: bool) -> dict[str, Any]:
    function = {**_CALL, "arguments": json.dumps(_CALL["arguments"])} if as_json else _CALL
    call = {"id": _SHORT_ID if short_id else _ID, "type": "function", "function": function}
    return {"role": "assistant", **no_content, "tool_calls": [call]}


def _format_of(answer: str) -> ToolCallFormat | None:
    """Return the format in which an answer is the one call of the probe."""
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

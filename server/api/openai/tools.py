"""The effect of a chat request's tools on its answer: which text is a call, and the grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass

from server.api.openai.chat_schemas import ChatBody
from server.engine.grammar.constraints import Grammar
from server.errors import InvalidRequestError
from server.requests.service import Service
from server.text.chat_format import ChatFormat
from server.text.tool_calls import ToolCallFormat, ToolCallParser
from server.text.tool_grammar import calls_in_text, calls_only


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The calls that a choice may have."""

    form: ToolCallFormat | None  # None if no text is a call
    max_calls: int | None  # of a choice; None is any number
    grammar: Grammar | None
    kept_ids: frozenset[int]  # special tokens that tags consist of

    def parser(self) -> ToolCallParser | None:
        """Return a parser for one choice."""
        return None if self.form is None else ToolCallParser(self.form, self.max_calls)

    @classmethod
    def of(cls, body: ChatBody, chat: ChatFormat, service: Service) -> ToolUse:
        """Return a body's tool use. Raises InvalidRequestError for fields that exclude others."""
        form, name, wanted = chat.tool_calls, body.named_function, body.any_grammar()
        functions = [tool.function for tool in body.tools if name in (None, tool.function.name)]
        must_call = body.tool_choice not in ("none", "auto")
        is_strict = any(function.strict for function in functions)
        if form is None and must_call:
            form = ToolCallFormat.LLAMA  # the grammar can enforce any format
        if form is None and is_strict:
            raise InvalidRequestError(
                "tools: strict cannot be held, for this model's chat template writes calls in no "
                "known format; leave it out, or let tool_choice ask for a call",
                param="tools",
            )
        if form is None or not functions:
            return cls(None, None, wanted, frozenset())
        if wanted is not None and must_call:
            raise InvalidRequestError(
                f"{wanted.param} constrains the text, but tool_choice asks for a call; "
                "give one of them",
                param=wanted.param,
            )
        if wanted is not None and wanted.kind != "json":
            raise InvalidRequestError(
                f"{wanted.param} leaves no room for calls; leave tools out, or let tool_choice be "
                "none",
                param=wanted.param,
            )
        tokens = {tag: i for tag, i in service.added_ids.items() if tag in form.tags}
        max_calls = None if name is None and body.parallel_tool_calls else 1
        source = None
        if wanted is not None or must_call:
            schemas = {function.name: function.arguments_schema for function in functions}
            otherwise = None if wanted is None else json.loads(wanted.source)
            source = calls_only(form, schemas, tokens, most=max_calls, otherwise=otherwise)
        elif is_strict:
            held = {
                f.name: f.arguments_schema if f.strict else {"type": "object"} for f in functions
            }
            source = calls_in_text(form, held, tokens)
        grammar = None if source is None else Grammar("lark", source, "tools")
        return cls(form, max_calls, grammar, service.special_ids.intersection(tokens.values()))

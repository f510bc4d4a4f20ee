"""The effect of a chat request's tools on its answer: which text is a call, and the grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass

from server.api.openai.chat_schemas import ChatBody, Function
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
        form, name = chat.tool_calls, body.named_function
        functions = [tool.function for tool in body.tools if name in (None, tool.function.name)]
        if form is None and body.must_call:
            form = ToolCallFormat.LLAMA  # the grammar can enforce any format
        if form is None and any(function.strict for function in functions):
            raise InvalidRequestError(
                "tools: strict cannot be held, for this model's chat template writes calls in no "
                "known format; leave it out, or let tool_choice ask for a call",
                param="tools",
            )
        if form is None or not functions:
            return cls(None, None, body.any_grammar(), frozenset())
        tokens = {tag: i for tag, i in service.added_ids.items() if tag in form.tags}
        max_calls = None if name is None and body.parallel_tool_calls else 1
        grammar = _grammar(body, functions, form, frozenset(tokens), max_calls)
        return cls(form, max_calls, grammar, service.special_ids.intersection(tokens.values()))


def _grammar(
    body: ChatBody,
    functions: list[Function],
    form: ToolCallFormat,
    tokens: frozenset[str],
    max_calls: int | None,
) -> Grammar | None:
    wanted = body.any_grammar()
    schemas = {function.name: function.arguments_schema for function in functions}
    if wanted is None and not body.must_call:
        if not any(function.strict for function in functions):
            return None
        held = {f.name: schemas[f.name] if f.strict else {"type": "object"} for f in functions}
        return Grammar("lark", calls_in_text(form, held, tokens), "tools")
    otherwise = None
    if wanted is not None:
        if body.must_call:
            raise InvalidRequestError(
                f"{wanted.param} constrains the text, but tool_choice asks for a call; "
                "give one of them",
                param=wanted.param,
            )
        if wanted.kind != "json":
            raise InvalidRequestError(
                f"{wanted.param} leaves no room for calls; leave tools out, or let tool_choice be "
                "none",
                param=wanted.param,
            )
        otherwise = json.loads(wanted.source)
    source = calls_only(form, schemas, tokens, most=max_calls, otherwise=otherwise)
    return Grammar("lark", source, "tools")

"""What a chat request's tools ask of its answer: which text is calls, and what the text has to be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from server.api.openai.chat_schemas import ChatBody, Function
from server.engine.grammar.constraints import Grammar
from server.errors import InvalidRequestError
from server.requests.service import Service
from server.text.chat_format import ChatFormat
from server.text.tool_calls import ToolCallFormat, ToolCallParser
from server.text.tool_grammar import calls_in_text, calls_only


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`form`: of calls; None where no text is one. `most`: calls of a choice. `kept_ids`: of tags that are special."""

    form: ToolCallFormat | None
    most: int | None
    grammar: Grammar | None
    kept_ids: frozenset[int]

    def parser(self) -> ToolCallParser | None:
        return None if self.form is None else ToolCallParser(self.form, self.most)

    @classmethod
    def of(cls, body: ChatBody, chat: ChatFormat, service: Service) -> ToolUse:
        """Raises InvalidRequestError for what cannot be had together."""
        functions, form = body.callable_functions, chat.tool_calls
        if form is None and body.must_call:
            form = ToolCallFormat.LLAMA  # what has to be calls may be written in any way
        if form is None and any(function.strict for function in functions):
            raise InvalidRequestError(
                "tools: strict cannot be held, for this model's chat template writes calls in no format that is known; "
                "leave it out, or let tool_choice ask for a call",
                param="tools",
            )
        if form is None or not functions:
            return cls(None, None, body.any_grammar(), frozenset())
        tokens = {tag: i for tag, i in service.added_ids.items() if tag in form.tags}
        grammar = _grammar(body, form, functions, frozenset(tokens))
        return cls(
            form, body.most_calls, grammar, service.special_ids.intersection(tokens.values())
        )


def _grammar(
    body: ChatBody, form: ToolCallFormat, functions: list[Function], tokens: frozenset[str]
) -> Grammar | None:
    wanted = body.any_grammar()
    schemas = {function.name: function.schema_of_arguments for function in functions}
    if body.must_call:
        if wanted is not None:
            raise InvalidRequestError(
                f"{wanted.param} says what the text has to be, but tool_choice that it is a call; give one of them",
                param=wanted.param,
            )
        return Grammar.lark(calls_only(form, schemas, tokens, most=body.most_calls), "tools")
    if wanted is not None:
        if wanted.kind != "json":
            raise InvalidRequestError(
                f"{wanted.param} leaves no room for calls; leave tools out, or let tool_choice be none",
                param=wanted.param,
            )
        otherwise = json.loads(wanted.source)
        return Grammar.lark(
            calls_only(form, schemas, tokens, most=body.most_calls, otherwise=otherwise), "tools"
        )
    if any(function.strict for function in functions):
        anything: dict[str, Any] = {"type": "object"}
        held = {f.name: f.schema_of_arguments if f.strict else anything for f in functions}
        return Grammar.lark(calls_in_text(form, held, tokens), "tools")
    return None

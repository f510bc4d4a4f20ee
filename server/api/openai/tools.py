"""The effect of a chat request on the form of its answer: reasoning, calls, and the grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvasir.server.api.openai.chat_schemas import ChatBody
from kvasir.server.api.openai.tool_schemas import NamedTool
from kvasir.server.engine.grammar.constraints import Grammar
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.completion import Completion, Delta
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.answer import AnswerParser, AnswerPiece
from kvasir.server.text.chat_format import ChatFormat
from kvasir.server.text.reasoning import ReasoningFormat, ReasoningParser
from kvasir.server.text.tool_calls import ToolCallParser
from kvasir.server.text.tool_formats import ToolCallFormat
from kvasir.server.text.tool_grammar import calls_in_text, calls_only, reasoning_before


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The parts that a choice may have, and their grammar. parser: makes one for a choice."""

    has_reasoning: bool
    parser: Callable[[], AnswerParser]
    grammar: Grammar | None
    kept_ids: frozenset[int]  # special tokens that tags consist of

    @classmethod
    def of(cls, body: ChatBody, chat: ChatFormat, prompt: str, served: ServedModel) -> AnswerForm:
        """Return the form of a body's answers. Raises InvalidRequestError for fields at odds."""
        reasoning, calls = chat.reasoning, _call_format(body, chat)
        is_reasoning = reasoning is not None and _is_in_reasoning(reasoning, body, prompt)
        if reasoning is not None and not is_reasoning:
            has_begun = body.continue_final_message and body.messages[-1].text
            if has_begun or reasoning.is_over(prompt):
                reasoning = None
        tags = {tag for form in (reasoning, calls) if form is not None for tag in form.tags}
        tokens = {tag: i for tag, i in served.added_ids.items() if tag in tags}
        is_named = isinstance(body.tool_choice, NamedTool)
        max_calls = None if body.parallel_tool_calls and not is_named else 1
        schemas = {function.name: function.arguments_schema for function in body.functions}
        wanted = grammar = body.any_grammar()
        if calls is not None and (wanted is not None or body.must_call):
            otherwise = None  # a format is of content, and there is none where calls must come
            if wanted is not None and not body.must_call:
                otherwise = json.loads(wanted.source)
            source = calls_only(calls, schemas, tokens, most=max_calls, otherwise=otherwise)
            grammar = Grammar("lark", source, "tools")
        elif calls is not None and body.holds_calls:
            strict = {function.name for function in body.functions if function.strict}
            held = {k: v if k in strict else {"type": "object"} for k, v in schemas.items()}
            grammar = Grammar("lark", calls_in_text(calls, held, tokens), "tools")
        if grammar is not None and reasoning is not None:
            lead = reasoning_before(reasoning, tokens, is_open=is_reasoning)
            grammar = replace(grammar, lead=lead)
        kept_ids = served.special_ids
        if body.skip_special_tokens:
            kept_ids = kept_ids.intersection(tokens.values())
        continues = body.continue_final_message

        def parser() -> AnswerParser:  # it may not hold the body
            return AnswerParser(
                reasoning and ReasoningParser(reasoning, is_open=is_reasoning, continues=continues),
                calls and ToolCallParser(calls, max_calls, schemas),
            )

        return cls(reasoning is not None, parser, grammar, kept_ids)


def read(
    parser: AnswerParser, delta: Delta, completion: Completion
) -> tuple[list[AnswerPiece], str | None] | None:
    """Return the pieces that a delta completes, and at the end the reason in OpenAI's words.

    Once the parser is over, the choice is stopped. Of what still comes, nothing is shown: None.
    """
    if parser.is_over:
        return None
    reason = delta.finish_reason
    pieces = parser.push(delta.text, delta.n_tokens)
    if parser.is_over:
        completion.stop(delta.choice)
        reason = FinishReason.STOP
    if reason is not None:
        pieces += parser.flush(is_cut=reason is not FinishReason.STOP)
        # A stop string or token may have cut the last call short.
        if reason is FinishReason.STOP and parser.calls_end_it:
            delta.choice.shown_reason = "tool_calls"
    return pieces, reason and (delta.choice.shown_reason or reason)


def _is_in_reasoning(form: ReasoningFormat, body: ChatBody, prompt: str) -> bool:
    """Return whether the answer begins inside reasoning."""
    if not body.continue_final_message:
        return form.is_begun(prompt)
    begun = body.messages[-1].text
    return form.leaves_open(begun) if begun else form.opening in prompt


def _call_format(body: ChatBody, chat: ChatFormat) -> ToolCallFormat | None:
    """Return the format of a body's calls. Raises InvalidRequestError for fields at odds."""
    form, wanted = chat.tool_calls, body.any_grammar()
    if not body.functions:
        return None
    if body.must_call:
        form = form or ToolCallFormat.LLAMA  # the grammar can enforce any format
    elif any(f.strict for f in body.functions) and (
        form is None or form.forced.opening != form.opening  # which starts a grammar
    ):
        raise InvalidRequestError(
            "tools: strict cannot be held, for this model's chat template writes calls in no "
            "format that a grammar has; leave it out, or let tool_choice ask for a call",
            param="tools",
        )
    if form is None:
        return None
    if wanted is not None and body.must_call and wanted.kind != "json":
        raise InvalidRequestError(
            f"{wanted.param} constrains the text, but tool_choice asks for a call; "
            "give one of them",
            param=wanted.param,
        )
    if wanted is not None and wanted.kind != "json":
        raise InvalidRequestError(
            f"{wanted.param} leaves no room for calls; leave tools out, or let tool_choice be none",
            param=wanted.param,
        )
    return form.forced if wanted is not None or body.must_call or body.holds_calls else form

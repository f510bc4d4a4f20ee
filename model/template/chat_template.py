"""Chat templates: turn messages into the text a model was trained on, as transformers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.model.directory import parse_template
from kvasir.model.template.process import LIMITS, run_template

MAX_SOURCE = 2**18  # characters of a template; published ones have up to 2**15

# Names for a message's reasoning; transformers fills the first from the others.
REASONING = ("reasoning_content", "thinking", "reasoning")
NULL = object()  # a value of a message that is null for the template, which None is not


class ChatTemplateError(ValueError):
    """An invalid template, or one that refuses these messages; has Jinja's or its own reason."""


class ChatTemplateLimitError(ChatTemplateError):
    """A template that takes too much time or memory for what it renders."""


class ChatTemplate:
    """A sandboxed Jinja template with special tokens. Raises ChatTemplateError if invalid.

    It runs in a process of its own. Jinja is loaded only there.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"the chat template is not valid: it has more than {MAX_SOURCE:,} characters"
            )
        _run("is not valid", source, None)

    @classmethod
    def parse(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """Return the template among files, contents by name, if any. Raises ChatTemplateError."""
        try:
            source, special_tokens = parse_template(files)
        except ValueError as error:
            raise ChatTemplateError(error) from None
        return None if source is None else cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # so that a variable can have any name
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of messages, tools and variables, which hold plain JSON values only.

        add_generation_prompt: end it where the assistant begins. Raises ChatTemplateError, and its
        ChatTemplateLimitError if that takes too much time or memory.
        """
        if not messages:
            raise ChatTemplateError("the chat template cannot render this: there are no messages")
        context = {**self.special_tokens, "documents": None, **variables, "tools": tools}
        context["messages"] = [_prepare(message) for message in messages]
        context["add_generation_prompt"] = add_generation_prompt
        return _run("cannot render this", self.source, context)


def _run(problem: str, source: str, variables: dict[str, Any] | None) -> str:
    problem = f"the chat template {problem}: "
    try:
        text, error = run_template(source, variables)
    except ChildProcessError:
        raise ChatTemplateLimitError(problem + LIMITS) from None
    except (OSError, RecursionError) as failure:
        raise ChatTemplateError(f"{problem}{failure}") from None
    if error:
        raise ChatTemplateError(problem + error)
    return text


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls, and give reasoning the name that templates read, as transformers does."""
    given = {k: None if v is NULL else v for k, v in message.items() if v is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}

"""Chat templates: turn messages into the text a model was trained on, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from model.bundle import parse_template
from model.template_limits import (
    MAX_SOURCE,
    Allowance,
    LimitedEnvironment,
    LimitError,
    allowance,
)

# Names for a message's reasoning; transformers fills the first from the others.
REASONING = ("reasoning_content", "thinking", "reasoning")
NULL = object()  # a value of a message that is null for the template, which None is not


class ChatTemplateError(ValueError):
    """An invalid template, or one that refuses these messages; has Jinja's or its own reason."""


class ChatTemplateLimitError(ChatTemplateError):
    """A template that takes too much time or memory for what it renders."""


class ChatTemplate:
    """A sandboxed Jinja template with special tokens. Raises ChatTemplateError if invalid."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"the chat template is not valid: it has more than {MAX_SOURCE:,} characters"
            )
        allowance.set(Allowance({}))
        try:
            self._template = _environment().from_string(source)
        except RecursionError:
            raise ChatTemplateError("the chat template is not valid: it nests too deeply") from None
        except Exception as error:  # Python's own limits too, as on nested blocks
            raise ChatTemplateError(f"the chat template is not valid: {error}") from None

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
        known = {**self.special_tokens, "documents": None, **variables, "tools": tools}
        known["messages"] = [_prepare(message) for message in messages]
        known["add_generation_prompt"] = add_generation_prompt
        try:
            allowance.set(Allowance(known))
            text = self._template.render(known)
            text.encode()  # fails for half a surrogate pair, which no tokenizer takes
            return text
        except LimitError as error:
            raise ChatTemplateLimitError(f"the chat template cannot render this: {error}") from None
        except Exception as error:  # a template is a program: it can fail in any way
            raise ChatTemplateError(f"the chat template cannot render this: {error}") from None


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls, and give reasoning the name that templates read, as transformers does."""
    given = {k: None if v is NULL else v for k, v in message.items() if v is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


class _GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %}, a mark around the assistant's text: left out."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace() without names that begin with _, which could lead out of the sandbox."""

    def __init__(*arguments: Any, **names: Any) -> None:  # so that `self` can be a name
        held = dict(*arguments[1:], **names)
        for name in held:
            _refuse_private(name)
        Namespace.__init__(arguments[0], held)

    def __repr__(self) -> str:
        return "<Namespace>"  # what it holds can be of any size

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "namespace": _Namespace}
    # Local time, as templates expect it.
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005
    environment.limit_filters()
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; Jinja's own filter writes < and ' as escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

"""Jinja as chat templates expect it: the functions, filters and blocks that transformers adds."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def environment() -> ImmutableSandboxedEnvironment:
    """Return a new sandbox for chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "namespace": _Namespace}
    # Local time, as templates expect it.
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005
    return made


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

"""Jinja's sandbox with limits on the time and the text of a rendering.

Python can interrupt no single operation, so operations that can multiply sizes are measured first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from time import thread_time
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 2**18  # characters of a template; published ones have up to 2**15
_CPU_SECONDS, _MIN_TEXT = 0.5, 2**20
_CPU_PER_INPUT, _TEXT_PER_INPUT = 1e-6, 64  # seconds and characters for each that is rendered
# Of any request. Templates such as Qwen3's need 0.8 s for 16,000 messages of 4 MB together.
MOST_SECONDS, MOST_TEXT = 2.0, 2**25
_STEPS = 8  # between two looks at the clock
_MAX_BITS = 2**16  # of a whole number
_JINJAS_OWN = {"_block_vars", "_loop_vars"}  # arguments of every call in a block or a loop
# Filters that only choose among what they are given, at a cost in proportion.
_CHOOSING = {"count", "d", "default", "first", "items", "last", "length", "list", "map"}
_CHOOSING |= {"reject", "rejectattr", "select", "selectattr"}
_WIDE = re.compile(r"[%:.)]\D{0,8}\d{6}")  # a width or precision in a format


class LimitError(Exception):
    """A template that needs too much time or text for what it renders."""


class Allowance:
    """The CPU time and the characters that the rendering of `given` may use."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.most = sys.maxsize
        n_given = self.size(given)
        self.most = _MIN_TEXT + _TEXT_PER_INPUT * n_given  # of the work of one operation
        self.most_text = self.left = min(self.most, MOST_TEXT)
        self.steps = 0
        self.seconds = min(_CPU_SECONDS + _CPU_PER_INPUT * n_given, MOST_SECONDS)
        self.deadline = thread_time() + self.seconds

    def spend(self, n: int = 0) -> None:
        """Count characters. Raises LimitError if they, or the time so far, are too many."""
        self.left -= n
        self.steps += 1
        if self.steps % _STEPS == 0 and thread_time() > self.deadline:
            raise LimitError(f"it takes more than {self.seconds:.1f} s of CPU time")
        if self.left < 0:
            self.refuse()

    def refuse(self) -> None:
        """Raise LimitError for too much text."""
        raise LimitError(f"it makes texts of more than {self.most_text:,} characters")

    def measure(self, *values: Any) -> None:
        """Refuse operands whose two largest sizes multiply to more than a text may have."""
        self.spend()
        sizes = sorted([1, 1, *[self.size(value, abs) for value in values]])
        if sizes[-2] * sizes[-1] > self.most:
            self.refuse()

    def size(self, value: Any, number: Callable[[int], int] = lambda _: 1) -> int:
        """Return the characters and items in a value, up to little more than allowed."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return number(value)
        total, rest = 0, [value]
        while rest and total <= self.most:
            one = rest.pop()
            total += 1
            if isinstance(one, str | bytes | range):
                total += len(one)
            elif isinstance(one, Collection):
                total += len(one)
                rest += one
                if isinstance(one, Mapping):
                    rest += one.values()
        return total

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items of unknown number, and count them."""
        for item in items:
            self.spend(self.size(item))
            yield item


allowance: ContextVar[Allowance] = ContextVar("allowance")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops, calls, filters and operators spend `allowance`, which must be set."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_output, **options)
        self.tick, self.measured = _spend, _measured
        del self.globals["lipsum"]

    def limit_filters(self) -> None:
        """Measure what every filter that is known so far gets and returns."""
        self.filters = {name: _limited(name, run) for name, run in self.filters.items()}

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        source = _Measures().visit(source)
        blocks = list[Any](source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in blocks:
            n = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [nodes.Const(n)], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(nodes.Not(tick), node.test)
        source.set_environment(self)
        return super()._generate(source, *arguments, **options)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object; methods of texts and numbers are measured."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        named = [value for name, value in kwargs.items() if name not in _JINJAS_OWN]
        if isinstance(owner, str | bytes | int):
            if "format" in __obj.__name__:
                _check_format(owner)
            allowance.get().measure(owner, *args, *named)
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            _measured([*args, *named])
        result = super().call(__context, __obj, *args, **kwargs)
        return _measured(result) if isinstance(result, dict) else _checked(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator of `intercepted_binops`."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if bits > _MAX_BITS or right.bit_length() > _MAX_BITS:
                raise LimitError(f"it makes numbers of more than {_MAX_BITS} bits")
        elif operator != "+":
            if operator == "%":
                _check_format(left)
            allowance.get().measure(left, *(right if isinstance(right, tuple) else (right,)))
        return _checked(super().call_binop(context, operator, left, right))


class _Measures(NodeTransformer):
    """Turns `a ~ b` into a filter, since those are measured, and measures lists of variables.

    A list can hold the same list twice, so a few can stand for more items than memory holds.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Return the filter."""
        self.generic_visit(node)
        parts = nodes.List(node.nodes).set_lineno(node.lineno)
        joined = nodes.Filter(parts, "join", [], [], None, None)
        return joined.set_lineno(node.lineno)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        """Return a call that measures the list, or the list where it is constant or a target."""
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or node.find(nodes.Name) is None:
            return node
        call = nodes.Call(nodes.EnvironmentAttribute("measured"), [node], [], None, None)
        return call.set_lineno(node.lineno)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815


def _spend(n: int) -> None:
    allowance.get().spend(n)


def _measured(value: Any) -> Any:
    allowance.get().measure(value)
    return value


def _output(value: Any) -> Any:
    limits = allowance.get()
    limits.spend(limits.size(value))
    return value


def _checked(result: Any) -> Any:
    limits = allowance.get()
    limits.spend()
    if isinstance(result, str | bytes | list | tuple) and len(result) > limits.most_text:
        limits.refuse()
    return result


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise LimitError("it formats with a width of more than 5 digits")


def _limited(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def limited(*given: Any, **named: Any) -> Any:
        limits = allowance.get()
        limits.spend()
        given = tuple(
            one if isinstance(one, str) or not isinstance(one, Iterator) else limits.counted(one)
            for one in given
        )
        if name not in _CHOOSING:
            if name == "format":
                _check_format(given[0])
            limits.measure(*given, *named.values(), *(given if name == "sum" else ()))
        return _checked(run(*given, **named))

    return limited

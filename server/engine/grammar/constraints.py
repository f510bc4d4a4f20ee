"""Structured output: grammars, and a text's position in one.

Where the text may end, any ending token may come, whatever the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import thread_time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 2**16

_VALUES_ARE_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_STUCK = "no text that begins like this one satisfies it"
# [256, 8]: the summands for eight logits by eight bits of a mask, the lowest first. Random bits
# take no longer than others.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES = np.where(_BITS, np.float32(0.0), np.float32(-np.inf))
# A hundred times the usual time, which only grammars of unbounded ambiguity exceed.
_MAX_SECONDS_PER_TOKEN = 0.02
_SLOW_SECONDS_PER_TOKEN = 0.001  # several such tokens in a step would delay others
# One way to write each value, spaced like most JSON that models have read: with free whitespace,
# small models repeat it without end. `lenient` would skip keywords that cannot be enforced.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}

# The formats of strings that llguidance can enforce. It refuses others, which schemas made from
# types often have.
_FORMATS = "date date-time time duration email hostname ipv4 ipv6 uri uuid"
FORMATS = _FORMATS.split()


class GrammarError(ValueError):
    """A grammar that does not compile, or that no text satisfies; the message is for its author."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The source of a grammar.

    lead: rules in Lark's notation of what comes before the text, its rule `before`.
    """

    kind: Literal["json", "regex", "lark", "gbnf"]
    source: str  # a JSON schema, a pattern for the whole text, or rules from `start` or `root` on
    param: str = field(compare=False)  # the field of the request that holds it
    lead: str = ""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], param: str = "response_format") -> Grammar:
        """Return a grammar of the JSON that a schema allows, properties in the schema's order."""
        return cls("json", json.dumps(schema, ensure_ascii=False), param)

    def check_size(self) -> None:
        """Raise GrammarError if the source has more than MAX_GRAMMAR_CHARS characters."""
        if (n := len(self.source)) > MAX_GRAMMAR_CHARS:
            most = f"at most {MAX_GRAMMAR_CHARS} may be given"
            raise GrammarError(f"{n} characters are too long: {most}")


@dataclass(slots=True, eq=False)
class Constraint:
    """The position of one text in its grammar."""

    matcher: LLMatcher
    param: str  # the field of the request that holds the grammar
    penalty: NDArray[np.float32] = field(init=False)  # [vocab], added to logits: 0 or -inf
    error: str | None = None  # set once no token may come next
    is_slow: bool = False  # at the last token

    @property
    def is_complete(self) -> bool:
        """True if the text satisfies the grammar and nothing may follow."""
        return self.matcher.is_stopped() and not self.error

    def copy(self) -> Constraint:
        """Copy it for another text of the request; copies share the limit on lexer states."""
        return Constraint(self.matcher.deep_copy(), self.param)

    def advance(self, token_id: int, *, ends: bool) -> None:
        """Append a token to the text; `ends` if it is one of the model's that end it."""
        started = thread_time()
        if not self.matcher.consume_token(token_id):
            self.error = error_of(self.matcher)
        elif (ends or self.matcher.is_stopped()) and not self.matcher.is_accepting():
            self.error = _STUCK
        seconds = thread_time() - started
        self.is_slow = seconds > _SLOW_SECONDS_PER_TOKEN
        if not self.error and seconds > _MAX_SECONDS_PER_TOKEN:
            self.error = "it is too ambiguous: the text so far can be read in too many ways"

    def compute_mask(self, n_vocab: int, ending_ids: frozenset[int]) -> None:
        """Set the penalty of the next token at once; see `set_mask`."""
        mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        self.set_mask(mask, n_vocab, ending_ids)

    def set_mask(self, mask: NDArray[np.uint8], n_vocab: int, ending_ids: frozenset[int]) -> None:
        """Set the penalty from a bit for each token, and allow endings where the text may end."""
        if self.matcher.is_error():
            self.error = error_of(self.matcher)
            mask = np.zeros_like(mask)
        self.penalty = _PENALTIES.take(mask, axis=0).reshape(-1)[:n_vocab]
        if self.matcher.is_accepting():
            self.penalty[list(ending_ids)] = 0.0


def enforceable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a JSON schema without other formats than FORMATS: these only annotate a string."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    pending: list[Any] = [copy]
    while pending:  # no recursion: schemas may be as deep as JSON may
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
                del part["format"]
            for key, value in part.items():
                if key in _VALUES_ARE_SCHEMAS and isinstance(value, dict):
                    pending += value.values()
                elif key not in ("const", "enum"):
                    pending.append(value)
    return copy


def error_of(matcher: LLMatcher) -> str:
    """Return why a matcher takes no more, in one line."""
    error = matcher.get_error()
    return _STUCK if error.startswith("NoExtension") else one_line(error)


def one_line(message: str) -> str:
    """Strip llguidance's drawings, long sources, and advice on options that clients lack."""
    lines = message.strip().partition(" Enable '")[0].splitlines()
    first, *others = lines or ["llguidance gives no reason"]
    if len(first) > 400:
        first = f"{first[:200]} … {first[-200:]}"
    return " ".join([first, *(line for line in others if line.startswith("error: "))])

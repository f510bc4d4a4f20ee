"""Structured output: grammars compiled by llguidance, and masks of the tokens that may come next.

Only this module imports llguidance. Where the text may end, any ending token may come, whatever the
grammar.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from time import thread_time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 2**16

_VALUES_ARE_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_STUCK = "no text that begins like this one satisfies it"
# By default llguidance forces the token whose name comes next in a text, even one that ends it or
# has no text.
_OPTIONS = '%llguidance {"no_forcing": true}'
# [256, 8]: the summands for eight logits by eight bits of a mask, the lowest first. Random bits
# take no longer than others.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES = np.where(_BITS, np.float32(0.0), np.float32(-np.inf))
# A hundred times the usual time, which only grammars of unbounded ambiguity exceed.
_MAX_SECONDS_PER_TOKEN = 0.02
# One token costs a few milliseconds at most, and the lexer states of a sequence 1 kB each.
_LIMITS = LLParserLimits(
    step_max_items=10_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
)

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


_MAX_GBNF_RULES = 1000  # translating them takes time by their square
_ESCAPE = re.compile(r"\\(?:\\|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")


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
            self.error = _error_of(self.matcher)
        elif (ends or self.matcher.is_stopped()) and not self.matcher.is_accepting():
            self.error = _STUCK
        elif thread_time() - started > _MAX_SECONDS_PER_TOKEN:
            self.error = "it is too ambiguous: the text so far can be read in too many ways"

    def set_mask(self, mask: NDArray[np.uint8], n_vocab: int, ending_ids: frozenset[int]) -> None:
        """Set the penalty from a bit for each token, and allow endings where the text may end."""
        if self.matcher.is_error():
            self.error = _error_of(self.matcher)
            mask = np.zeros_like(mask)
        self.penalty = _PENALTIES.take(mask, axis=0).reshape(-1)[:n_vocab]
        if self.matcher.is_accepting():
            self.penalty[list(ending_ids)] = 0.0


@dataclass
class GrammarCompiler:
    """A compiler for one model's tokens and one thread. `GrammarTrial` bounds its time."""

    tokenizer: str  # JSON, as in tokenizer.json
    vocab_size: int
    eos_token_ids: Sequence[int]

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The model's tokens. Raises GrammarError if llguidance cannot read the tokenizer."""
        eos = list(self.eos_token_ids) or None
        try:
            return LLTokenizer(self.tokenizer, n_vocab=self.vocab_size, eos_token=eos)
        except ValueError as error:
            raise GrammarError(
                f"this model's tokenizer allows no structured output: {_one_line(str(error))}"
            ) from None

    def compile(self, grammar: Grammar) -> Constraint:
        """Return the constraint of a new text. Raises GrammarError."""
        grammar.check_size()
        matcher = LLMatcher(self.tokens, _translate(grammar), log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # detects grammars that no text can begin
        if matcher.is_error():
            raise GrammarError(_error_of(matcher))
        if warnings := matcher.get_grammar_warnings():
            raise GrammarError(_one_line(warnings[0]))
        return Constraint(matcher, grammar.param)


class TokenMasks:
    """The masks of a step's constrained texts, computed by other threads beside the model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._words = allocate_token_bitmask(0, vocab_size)  # int32 [n, vocab / 32]

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()  # its threads start at once

    def begin(self, constrained: list[tuple[Constraint, frozenset[int]]]) -> Callable[[], None]:
        """Start to compute masks, given ending tokens; the returned function sets them."""
        if not constrained:
            return lambda: None
        if len(self._words) < len(constrained):
            self._words = allocate_token_bitmask(len(constrained), self._vocab_size)
        matchers = [(constraint.matcher, i) for i, (constraint, _) in enumerate(constrained)]
        fill = fill_next_token_bitmask_par
        filled = self._thread.submit(fill, self._executor, matchers, self._words)

        def finish() -> None:
            filled.result()
            masks = self._words.view(np.uint8)
            for mask, (constraint, ending_ids) in zip(masks, constrained, strict=False):
                constraint.set_mask(mask, self._vocab_size, ending_ids)

        return finish


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


def _translate(grammar: Grammar) -> str:
    if grammar.kind in ("lark", "gbnf"):
        source = grammar.source if grammar.kind == "lark" else _lark_of(grammar.source)
        whole = {"name": "text", "lark_grammar": f"{source}\n{_OPTIONS}"}
    elif grammar.kind == "regex":
        (whole,) = json.loads(LLMatcher.grammar_from_regex(grammar.source))["grammars"]
    else:
        try:
            schema = json.dumps(enforceable_schema(json.loads(grammar.source)))
            translated = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        except ValueError as error:
            raise GrammarError(_one_line(str(error))) from None
        (whole,) = json.loads(translated)["grammars"]
    before = "before " if grammar.lead else ""
    start = {"lark_grammar": f"start: {before}@{whole['name']}\n{grammar.lead}\n{_OPTIONS}"}
    return json.dumps({"grammars": [start, whole]})


def _lark_of(gbnf: str) -> str:
    """Return a grammar of llama.cpp in Lark's notation. Raises GrammarError."""
    if (n := gbnf.count("::=")) > _MAX_GBNF_RULES:
        raise GrammarError(f"{n} rules are too many: at most {_MAX_GBNF_RULES} may be given")
    try:
        # Leading zeros of an escape would be lost, and what follows it become part of it.
        lark: str = gbnf_to_lark(_ESCAPE.sub(_unescaped, gbnf))
    except Exception as error:  # it raises Exception itself, and IndexError at a cut escape
        raise GrammarError(_one_line(str(error))) from None
    return lark.removeprefix("%llguidance {}\n")


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character of an escape, itself escaped where it may have a meaning."""
    code = int(escape[1] or escape[2] or "0", 16)
    if not code or code > sys.maxunicode:
        return escape[0]
    return chr(code) if code >= 0xA0 or chr(code).isalnum() else f"\\x{code:02x}"


def _error_of(matcher: LLMatcher) -> str:
    error = matcher.get_error()
    return _STUCK if error.startswith("NoExtension") else _one_line(error)


def _one_line(message: str) -> str:
    """Strip llguidance's drawings, long sources, and advice on options that clients lack."""
    lines = message.strip().partition(" Enable '")[0].splitlines()
    first, *others = lines or ["llguidance gives no reason"]
    if len(first) > 400:
        first = f"{first[:200]} … {first[-200:]}"
    return " ".join([first, *(line for line in others if line.startswith("error: "))])

"""Grammars compiled by llguidance, and masks of the tokens that may come next.

Only this module loads llguidance. It costs megabytes, so the server loads it with the
first model of text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from kvasir.server.engine.grammar.constraints import (
    JSON_OPTIONS,
    Constraint,
    Grammar,
    GrammarError,
    enforceable_schema,
    error_of,
    one_line,
)

# By default llguidance forces the token whose name comes next in a text, even one that ends it or
# has no text.
_OPTIONS = '%llguidance {"no_forcing": true}'
# One token costs a few milliseconds at most, and the lexer states of a sequence 1 kB each.
_LIMITS = LLParserLimits(
    step_max_items=10_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
)

_MAX_GBNF_RULES = 1000  # translating them takes time by their square
_ESCAPE = re.compile(r"\\(?:\\|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")


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
                f"this model's tokenizer allows no structured output: {one_line(str(error))}"
            ) from None

    def compile(self, grammar: Grammar) -> Constraint:
        """Return the constraint of a new text. Raises GrammarError."""
        grammar.check_size()
        matcher = LLMatcher(self.tokens, _translate(grammar), log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # detects grammars that no text can begin
        if matcher.is_error():
            raise GrammarError(error_of(matcher))
        if warnings := matcher.get_grammar_warnings():
            raise GrammarError(one_line(warnings[0]))
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
            raise GrammarError(one_line(str(error))) from None
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
        raise GrammarError(one_line(str(error))) from None
    return lark.removeprefix("%llguidance {}\n")


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character of an escape, itself escaped where it may have a meaning."""
    code = int(escape[1] or escape[2] or "0", 16)
    if not code or code > sys.maxunicode:
        return escape[0]
    return chr(code) if code >= 0xA0 or chr(code).isalnum() else f"\\x{code:02x}"

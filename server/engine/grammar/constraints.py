"""Structured output: grammars compiled by llguidance, and masks of the tokens that may come next.

The only file that imports llguidance. Tokens that end a text may come where it may end, whatever the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from time import thread_time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from server.engine.grammar.json_schemas import held_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 2**16

_STUCK = "no text that begins like this one satisfies it"
# Left to itself, llguidance forces the token whose name comes next in a text: one that ends it, or says nothing in it.
_OPTIONS = '%llguidance {"no_forcing": true}'
# [256, 8]: what eight bits of a mask, the lowest first, add to eight logits. No slower where bits come at random.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES = np.where(_BITS, np.float32(0.0), np.float32(-np.inf))
_MOST_SECONDS = (
    0.02  # for one token: a hundred times what it takes, unless a grammar is ambiguous without end
)

# One way to write each value, spaced as in most JSON that models have read: left to themselves, small ones put
# whitespace between two tokens without end. `lenient` would pass over keywords that cannot be held.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that no text satisfies; the message is for whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text has to be. `param`: the field of the request that says so."""

    kind: Literal["json", "regex", "lark"]
    source: str
    param: str = field(compare=False)

    @classmethod
    def json_object(cls, param: str = "response_format") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, param)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], param: str = "response_format") -> Grammar:
        """JSON that a schema allows, with properties in the schema's order."""
        return cls("json", json.dumps(schema, ensure_ascii=False), param)

    @classmethod
    def regex(cls, pattern: str, param: str = "regex") -> Grammar:
        """Text that a regular expression matches from end to end."""
        return cls("regex", pattern, param)

    @classmethod
    def lark(cls, text: str, param: str = "grammar") -> Grammar:
        """Text that the rule `start` of a context-free grammar in Lark's notation derives."""
        return cls("lark", text, param)


def check_size(grammar: Grammar) -> None:
    """Raises GrammarError."""
    if (n := len(grammar.source)) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"{n} characters are too long: at most {MAX_GRAMMAR_CHARS} may be given")


class Constraint:
    """Where one text is in its grammar.

    penalty: [vocab], added to logits: 0 for what may come next, -inf for all else. error: why nothing may, where
    nothing may. param: the field of the request that holds the grammar.
    """

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self.matcher = matcher
        self.param = param
        self.penalty: NDArray[np.float32] | None = None
        self.error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the text satisfies the grammar, and nothing may follow."""
        return self.matcher.is_stopped() and not self.error

    def copy(self) -> Constraint:
        """For another text of the same request: copies share the states that llguidance's lexer may have."""
        return Constraint(self.matcher.deep_copy(), self.param)

    def advance(self, token_id: int, *, ends: bool) -> None:
        """Take a token of the text, or one of the model's that ends it."""
        started = thread_time()
        if not self.matcher.consume_token(token_id):
            self.error = _error_of(self.matcher)
        elif (ends or self.matcher.is_stopped()) and not self.matcher.is_accepting():
            self.error = _STUCK
        elif thread_time() - started > _MOST_SECONDS:
            self.error = "it is too ambiguous: the text so far can be read in too many ways"

    def take_mask(
        self, mask: NDArray[np.uint8], vocab_size: int, ending_ids: frozenset[int]
    ) -> None:
        """Take a bit for each token that may come next. Where the text may end, any ending token may end it."""
        if self.matcher.is_error():
            self.error = _error_of(self.matcher)
            mask = np.zeros_like(mask)
        self.penalty = _PENALTIES.take(mask, axis=0).reshape(-1)[:vocab_size]
        if self.matcher.is_accepting():
            self.penalty[list(ending_ids)] = 0.0


class GrammarCompiler:
    """Grammars for one model's tokens. For one thread, as compiling can take a while; `GrammarTrial` says how long."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer  # JSON, as in tokenizer.json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    @cached_property
    def tokens(self) -> LLTokenizer:
        try:
            return LLTokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
            )
        except ValueError as error:
            raise GrammarError(
                f"this model's tokenizer allows no structured output: {_one_line(str(error))}"
            ) from None

    def compile(self, grammar: Grammar) -> Constraint:
        """The constraint of a text that has not begun. Raises GrammarError."""
        check_size(grammar)
        matcher = LLMatcher(self.tokens, _translate(grammar), log_level=0, limits=_limits())
        matcher.compute_bitmask()  # finds what can never begin
        if matcher.is_error():
            raise GrammarError(_error_of(matcher))
        if warnings := matcher.get_grammar_warnings():
            raise GrammarError(_one_line(warnings[0]))
        return Constraint(matcher, grammar.param)


class TokenMasks:
    """Masks of a step's constrained sequences, computed in llguidance's threads while the model runs."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._words = allocate_token_bitmask(0, vocab_size)  # int32 [n, vocab / 32]

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()  # its threads start at once

    def begin(self, constrained: list[tuple[Constraint, frozenset[int]]]) -> Callable[[], None]:
        """Start on what may come next in each of the sequences that are constrained; call the result to have it."""
        if not constrained:
            return lambda: None
        if len(self._words) < len(constrained):
            self._words = allocate_token_bitmask(len(constrained), self._vocab_size)
        matchers = [(constraint.matcher, i) for i, (constraint, _) in enumerate(constrained)]
        filled = self._thread.submit(
            fill_next_token_bitmask_par, self._executor, matchers, self._words
        )

        def finish() -> None:
            filled.result()
            for mask, (constraint, ending_ids) in zip(
                self._words.view(np.uint8), constrained, strict=False
            ):
                constraint.take_mask(mask, self._vocab_size, ending_ids)

        return finish


def _translate(grammar: Grammar) -> str:
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(f"{grammar.source}\n{_OPTIONS}")
    if grammar.kind == "regex":
        translated = LLMatcher.grammar_from_regex(grammar.source)
    else:
        try:
            schema = json.dumps(held_schema(json.loads(grammar.source)))
            translated = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        except ValueError as error:
            raise GrammarError(_one_line(str(error))) from None
    (whole,) = json.loads(translated)["grammars"]
    start = {"lark_grammar": f"start: @{whole['name']}\n{_OPTIONS}"}
    return json.dumps({"grammars": [start, whole]})


def _limits() -> LLParserLimits:
    """What one token may cost: a few milliseconds; and a sequence: lexer states of up to 1 kB."""
    return LLParserLimits(
        step_max_items=10_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
    )


def _error_of(matcher: LLMatcher) -> str:
    error = matcher.get_error()
    return _STUCK if error.startswith("NoExtension") else _one_line(error)


def _one_line(message: str) -> str:
    """What llguidance says, without its drawings, its advice on options that clients do not have, and long sources."""
    first, *others = message.strip().partition(" Enable '")[0].splitlines() or [
        "llguidance gives no reason"
    ]
    if len(first) > 400:
        first = f"{first[:200]} … {first[-200:]}"
    return " ".join([first, *(line for line in others if line.startswith("error: "))])

"""Grammars: outputs satisfy them, other sequences do not change, hostile ones are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from kvasir.server.engine.engine import Engine
from kvasir.server.engine.grammar import constraints
from kvasir.server.engine.grammar.compiler import GrammarCompiler
from kvasir.server.engine.grammar.constraints import (
    FORMATS,
    MAX_GRAMMAR_CHARS,
    Grammar,
    GrammarError,
    enforceable_schema,
)
from kvasir.server.engine.grammar.trial import GrammarTrial
from kvasir.server.engine.sampling.params import SamplingParams, token_logprobs
from kvasir.server.engine.sequence import FinishReason, Sequence
from tests.kit.engine_driver import Result, make_sequence, run_to_end
from tests.kit.fake_runner import FakeRunner
from tests.kit.random_schemas import random_schema
from tests.kit.serving import EOS, VOCAB_SIZE, small_tokenizer

tokenizer = small_tokenizer()
MODEL = (tokenizer.to_str(), VOCAB_SIZE, [EOS])
# Random logits rarely end a text: a bias for these tokens ends strings, lists and objects.
CLOSING = {tokenizer.token_to_id(token): 6.0 for token in '"]}'}

by_schema = Grammar.json_schema
by_regex, by_lark = (
    partial(Grammar, "regex", param="regex"),
    partial(Grammar, "lark", param="grammar"),
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(*MODEL)


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial(*MODEL)
    yield trial
    trial.close()


def constrained(compiler: GrammarCompiler, i: int, grammar: Grammar, **params: Any) -> Sequence:
    everything: dict[str, Any] = {"max_tokens": 1500, "seed": i, "logit_bias": CLOSING} | params
    wanted = SamplingParams(**everything)
    sequence = make_sequence(i, [5, 7, i % VOCAB_SIZE], wanted, eos=[EOS])
    sequence.constraint = compiler.compile(grammar)
    return sequence


def make_engine(max_num_seqs: int = 16, **options: Any) -> Engine:
    return Engine(
        FakeRunner(VOCAB_SIZE, max_model_len=1600, max_num_seqs=max_num_seqs),
        chunk_size=8,
        **options,
    )


def run(sequences: list[Sequence], **options: Any) -> dict[int, Result]:
    return run_to_end(make_engine(**options), sequences)


def text_of(result: Result) -> str:
    return str(tokenizer.decode(result.token_ids))


def test_what_random_schemas_let_out_satisfies_them(compiler: GrammarCompiler) -> None:
    schemas = [{"type": "object"}] * 10 + [random_schema(Random(i)) for i in range(100)]
    results = run([constrained(compiler, i, by_schema(s)) for i, s in enumerate(schemas)])
    assert len({text_of(results[i]) for i in range(10)}) > 3
    for i, schema in enumerate(schemas):
        assert results[i].finish_reasons == [FinishReason.STOP], (schema, text_of(results[i]))
        document = json.loads(text_of(results[i]))
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(document)


@pytest.mark.parametrize(
    "pattern",
    [
        "[ab]{3}c*d",
        r"(\d{1,3}\.){3}\d{1,3}",
        "(yes|no), (sir|madam)[!?]",
        "[à-ý]{2,5}☃?",
        "",
        r"a\x00?\n+b",
    ],
)
def test_a_regular_expression_matches_from_end_to_end(
    compiler: GrammarCompiler, pattern: str
) -> None:
    results = run([constrained(compiler, i, by_regex(pattern)) for i in range(8)])
    for result in results.values():
        assert re.fullmatch(pattern, text_of(result)), text_of(result)
        assert result.finish_reasons == [FinishReason.STOP]


def test_a_lark_grammar_derives_the_text(compiler: GrammarCompiler) -> None:
    grammar = by_lark(
        'start: sum\nsum: item ("+" item)*\nitem: NUMBER | "(" sum ")"\nNUMBER: /[1-9][0-9]{0,2}/'
    )
    bias = {tokenizer.token_to_id(")"): 3.0, EOS: 5.0}
    results = run([constrained(compiler, i, grammar, logit_bias=bias) for i in range(16)])
    for result in results.values():
        assert re.fullmatch(r"[0-9+()]+", text_of(result))
        assert eval(text_of(result)) > 0  # noqa: S307  Python reads the same sums


def test_the_last_token_of_a_finished_text_belongs_to_it(compiler: GrammarCompiler) -> None:
    """It needs no end-of-sequence token where that would be the only choice.

    Log-probabilities are the model's own, whatever the grammar allows. A text may be cut short.
    """
    sequence = constrained(compiler, 0, by_regex("read"), logprobs=3)
    shorter = [constrained(compiler, n, by_regex("[abc]{9}"), max_tokens=n) for n in (1, 5)]
    engine = make_engine()
    results = run_to_end(engine, [sequence, *shorter])
    result = results[0]
    assert text_of(result) == "read"
    assert EOS not in result.token_ids
    assert result.finish_reasons == [FinishReason.STOP]
    assert isinstance(engine.runner, FakeRunner)
    for i, token_id in enumerate(result.token_ids):
        row = engine.runner.logits(sequence.prompt_ids + result.token_ids[:i])
        assert result.logprobs[i] == token_logprobs(row, token_id, 3)
    for n in (1, 5):
        assert (len(results[n].token_ids), results[n].finish_reasons) == (n, [FinishReason.LENGTH])


def test_ending_tokens_come_where_the_text_may_end_or_goes_through_them(
    compiler: GrammarCompiler,
) -> None:
    x, b = (tokenizer.encode(letter).ids[0] for letter in "xb")
    likely = {"logit_bias": {EOS: 60.0, x: 90.0, b: 50.0}, "temperature": 0.0}
    cases: list[tuple[str, set[int], str]] = [
        ("a{3}b*", set(), "aaa<|endoftext|>"),
        ("a{3}b*", {x}, "aaax"),  # an ending token stands outside the grammar
        ("a{3}b*", {b}, "aaa<|endoftext|>"),
        ("a{3}bc", {b}, "aaab"),
    ]
    sequences = [
        constrained(compiler, i, by_regex(pattern), stop_token_ids=frozenset(stop), **likely)
        for i, (pattern, stop, _) in enumerate(cases)
    ]
    results = run(sequences)
    for i, (_, _, expected) in enumerate(cases):
        text = tokenizer.decode(results[i].token_ids, skip_special_tokens=False)
        assert (text, results[i].finish_reasons) == (expected, [FinishReason.STOP])


@pytest.mark.parametrize(
    ("name", "special"), [("<|endoftext|>", True), ("<|x|>", True), ("<tool>", False)]
)
def test_the_names_of_added_tokens_are_texts_like_others(name: str, special: bool) -> None:
    """They are spelled out: the added token itself would end the text or have none."""
    known = Tokenizer.from_str(tokenizer.to_str())
    known.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text in ("<|x|>", "<tool>")]
    )
    compiler = GrammarCompiler(known.to_str(), VOCAB_SIZE, [EOS])
    texts = [name, f"a{name}b"]
    quoted = json.dumps(texts[1])
    sequences = [
        constrained(compiler, 0, by_schema({"enum": texts})),
        constrained(
            compiler,
            1,
            by_schema({"type": "object", "properties": {name: {"const": 1}}, "required": [name]}),
        ),
        constrained(compiler, 2, by_regex("|".join(map(re.escape, texts)))),
        constrained(compiler, 3, by_lark(f"start: {quoted} // the end")),
    ]
    results = run(sequences)
    assert [results[i].finish_reasons for i in range(4)] == [[FinishReason.STOP]] * 4
    said, keyed, matched, derived = (
        "".join(tokenizer.decode(results[i].token_ids)) for i in range(4)
    )
    assert json.loads(said) in texts
    assert json.loads(keyed)[name] == 1
    assert matched in texts
    assert derived == texts[1]


def test_an_ending_token_in_a_grammar_ends_the_text_only_where_it_may_end(
    compiler: GrammarCompiler,
) -> None:
    sequences = [
        constrained(compiler, i, by_lark(f'start: "a" <|endoftext|>{end}'))
        for i, end in ((0, ""), (1, ' "b"'))
    ]
    results = run(sequences)
    assert [results[i].finish_reasons for i in (0, 1)] == [
        [FinishReason.STOP],
        [FinishReason.GRAMMAR],
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_are_known_are_held(name: str, compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "format": name}
    compiler.compile(by_schema(schema))
    with pytest.raises(GrammarError):  # no format has a single space
        compiler.compile(by_schema({**schema, "pattern": "^ $"}))


def test_other_formats_say_what_a_text_is_for(compiler: GrammarCompiler) -> None:
    """Properties and values that are named like the keyword `format` stay."""
    schema = {
        "type": "object",
        "properties": {
            "format": {"const": {"format": "byte"}},
            "properties": {"enum": [{"format": "password"}]},
            "secret": {"type": "string", "format": "password", "maxLength": 5},
            "links": {
                "type": "array",
                "items": {"anyOf": [{"$ref": "#/$defs/format"}, {"format": "iri", "const": 1}]},
            },
        },
        "required": ["format", "properties", "secret", "links"],
        "additionalProperties": False,
        "$defs": {"format": {"type": "string", "format": "uri-reference"}},
    }
    compiler.compile(by_lark("start: %json " + json.dumps(enforceable_schema(schema))))
    result = run([constrained(compiler, 0, by_schema(schema))])[0]
    jsonschema.validate(json.loads(text_of(result)), schema)


def test_a_grammar_that_cannot_go_on_ends_its_own_sequence_alone(compiler: GrammarCompiler) -> None:
    """One exceeds llguidance's limits, the other has no next token; both show as the text grows."""
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(700)}}
    dead = by_lark('start: "ab" rest\nrest: rest "c"')
    free = SamplingParams(max_tokens=20, temperature=0.0)
    sequences = [constrained(compiler, 0, by_schema(wide)), constrained(compiler, 1, dead)]
    sequences += [make_sequence(2, [3], free), constrained(compiler, 3, by_regex("[ab]{20}"))]
    engine = make_engine()
    results = run_to_end(engine, sequences)
    errors = [sequence.constraint.error if sequence.constraint else None for sequence in sequences]
    assert [results[i].finish_reasons for i in (0, 1)] == [[FinishReason.GRAMMAR]] * 2
    assert errors[0] is not None
    assert "max is 2000" in errors[0]
    assert errors[1] == "no text that begins like this one satisfies it"
    assert errors[2:] == [None, None]
    assert isinstance(engine.runner, FakeRunner)
    assert results[2].token_ids == engine.runner.greedy([3], 20)
    assert results[3].finish_reasons == [FinishReason.STOP]


def test_a_grammar_that_takes_too_long_to_read_ends_its_own_sequence(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of such a text takes longer than the last; the limit is on processor time."""
    monkeypatch.setattr(constraints, "_MAX_SECONDS_PER_TOKEN", 0.001)
    ambiguous = by_lark('start: s\ns: s s s | s s | "a"')
    sequence = constrained(compiler, 0, ambiguous, logit_bias={EOS: -50.0})
    result = run([sequence])[0]
    assert result.finish_reasons == [FinishReason.GRAMMAR]
    assert sequence.constraint is not None
    assert str(sequence.constraint.error).startswith("it is too ambiguous")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def keys(n: int) -> list[dict[str, Any]]:
    return [
        {"type": "object", "properties": {f"k{i}": {}}, "required": [f"k{i}"]} for i in range(n)
    ]


TOO_LONG = f"at most {MAX_GRAMMAR_CHARS}"
INCOMPATIBLE = [{"type": "string"}, {"type": "integer"}]
PATTERNS = [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(2, 30)]
MULTIPLES = [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]
LENIENT = '{"x-guidance": {"lenient": true}, "uniqueItems": true}'
REFUSED: dict[str, tuple[Grammar, str]] = {
    "self": (by_schema({"$ref": "#"}), "no text"),
    "cycle": (by_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}), "no text"),
    "nowhere": (by_schema({"$ref": "#/$defs/a"}), "does not exist"),
    "elsewhere": (by_schema({"$ref": "http://example.com/a.json"}), "does not fetch"),
    "branches": (by_schema({"anyOf": keys(10_000)}), TOO_LONG),
    "patterns": (by_schema({"allOf": PATTERNS}), "to compile"),
    "multiples": (by_schema({"allOf": MULTIPLES}), "to compile"),
    "products": (by_schema({"allOf": [{"anyOf": keys(20)}] * 5}), "too large"),
    "depth": (by_schema(nested(200)), "recursion"),
    "parentheses": (by_regex("(" * 5000 + ")" * 5000), "nest"),
    "lengths": (by_schema({"type": "string", "minLength": 5, "maxLength": 3}), "minLength"),
    "types": (by_schema({"allOf": INCOMPATIBLE}), "incompatible types"),
    "never": (by_schema({"anyOf": []}), "anyOf is empty"),
    "range": (by_schema({"type": "integer", "minimum": -(10**300)}), "integer range"),
    "overlapping": (by_schema({"patternProperties": {"^a": {}, "b$": {}}}), "not disjoint"),
    "unique": (by_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "not": (by_schema({"not": {"type": "string"}}), "not"),
    "if": (by_schema({"if": {"type": "string"}, "then": {"minLength": 1}}), "if"),
    "one of": (by_schema({"oneOf": [{"type": "string"}, {"maxLength": 3}]}), "oneOf"),
    "options": (by_schema(json.loads(LENIENT)), "uniqueItems"),
    "options in a grammar": (by_lark(f"start: %json {LENIENT}"), "uniqueItems"),
    "no number": (by_schema({"const": float("inf")}), "expected value"),
    "look-ahead": (by_regex("(?=a)b"), "look-around"),
    "back-reference": (by_regex(r"(a)\1"), "backreferences"),
    "nothing matches": (by_regex(r"[^\s\S]"), "no text"),
    "syntax": (by_lark("start: ("), "1"),
    "undefined": (by_lark("start: other"), "other"),
    "endless": (by_lark("start: start"), "no text"),
    "a file": (by_lark('%import /etc/passwd\nstart: "a"'), "Expected name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_or_hostile_grammar_is_refused(trial: GrammarTrial, name: str) -> None:
    """The trial stays within its limits, and its process goes on."""
    grammar, message = REFUSED[name]
    error = trial.check(grammar)
    assert message in error
    assert len(error) < 500


DOUBLING = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)}
LOOKING_HOSTILE = [
    by_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    by_schema({"type": "string", "maxLength": 10**9, "minLength": 10**6}),
    by_schema({"type": "string", "pattern": "(a{1000}){1000}"}),
    by_schema({"type": "string", "pattern": "^(a|a)*(a|b)*a(a|b){30}$"}),
    by_schema({"enum": [f"value {i}" for i in range(3000)]}),
    by_schema({"$ref": "#/$defs/a0", "$defs": DOUBLING | {"a30": {"type": "null"}}}),
    by_regex("(a{1000}){1000}"),
    by_lark("start: /((a{100}){100}){100}/"),
    by_schema(nested(60)),
    by_schema({"properties": {"\0": {"const": "a\0b"}}, "required": ["\0"]}),
]


@pytest.mark.parametrize("grammar", LOOKING_HOSTILE)
def test_what_only_looks_hostile_is_held(
    trial: GrammarTrial, compiler: GrammarCompiler, grammar: Grammar
) -> None:
    assert trial.check(grammar) == ""
    result = run([constrained(compiler, 0, grammar, max_tokens=20)])[0]
    assert result.finish_reasons[0] in (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize("tokenizer_json", ["{}", "nonsense"])
def test_a_tokenizer_that_cannot_be_read_is_said(tokenizer_json: str) -> None:
    with pytest.raises(GrammarError, match="this model's tokenizer allows no structured output"):
        GrammarCompiler(tokenizer_json, VOCAB_SIZE, [EOS]).compile(by_regex("a"))

"""The fields that constrain the text, as OpenAI, TGI, vLLM, SGLang and llama.cpp have them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from kvasir.server.api.http.body import check_amount
from kvasir.server.api.schemas import Items, RequestBody
from kvasir.server.engine.grammar.constraints import MAX_GRAMMAR_CHARS, Grammar
from kvasir.server.requests.request import CompletionRequest


def _schema_of(text: str) -> Any:
    check_amount(text.encode())
    return from_json(text, allow_inf_nan=False)


JSONText = Annotated[  # a schema, or its text
    dict[str, Any],
    BeforeValidator(
        lambda it: _schema_of(it) if isinstance(it, str) else it,
        json_schema_input_type=dict[str, Any] | str,
    ),
]
Choices = Annotated[Items[str], Field(min_length=1)]
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class TGIJSON(RequestBody):
    """A JSON schema, or its text in a string, as TGI's clients send it."""

    type: Literal["json", "json_object"]
    value: JSONText


class TGINamedSchema(RequestBody):
    """A JSON schema that may have a name."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class TGIJSONSchema(RequestBody):
    """A named JSON schema, as TGI's clients send it."""

    type: Literal["json_schema"]
    value: TGINamedSchema


class TGIRegex(RequestBody):
    """A regular expression, as TGI's clients send it."""

    type: Literal["regex"]
    value: str


TGIFormat = Annotated[TGIJSON | TGIJSONSchema | TGIRegex, Field(discriminator="type")]


def tgi_grammar(form: TGIFormat, param: str) -> Grammar:
    """Return the grammar of a format; `param` names it in errors."""
    if isinstance(form, TGIRegex):
        return Grammar("regex", form.value, param)
    schema = form.value if isinstance(form, TGIJSON) else form.value.schema_
    return Grammar.json_schema(schema, param)


def naming(wanted: CompletionRequest, param: str) -> CompletionRequest:
    """Return a request whose errors have the name of its protocol for the form of the text."""
    grammar = wanted.grammar
    if grammar is None or grammar.param == "tools":
        return wanted
    return replace(wanted, grammar=replace(grammar, param=param))


class JSONSchema(RequestBody):
    """A schema. The other fields have no effect: every answer follows it."""

    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = False
    description: str | None = None


class ResponseFormat(RequestBody):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="Of type json_object, as llama.cpp takes it."
    )

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema is given with type json_object, and only then")
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema is given with type json_schema, and only then")
        return self


AnyFormat = Annotated[
    Annotated[ResponseFormat, Tag("openai")] | Annotated[TGIFormat, Tag("tgi")],
    Discriminator(
        lambda it: "tgi" if isinstance(it, dict) and it.get("value") is not None else "openai"
    ),
]


class StructuredOutputs(RequestBody):
    """vLLM's `structured_outputs`, of which one field is given."""

    json_: JSONText | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = Field(None, description="As the field `regex`.")
    choice: Choices | None = Field(None, description="The texts, one of which comes.")
    grammar: str | None = Field(None, description="As the field `grammar`.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("give one of json, regex, choice, grammar and json_object")
        return self

    def grammar_of(self, param: str) -> Grammar:
        """Return the grammar; `param` names it in errors."""
        name = next(iter(self.model_fields_set))
        return _MAKERS[name](getattr(self, name), f"{param}.{name.rstrip('_')}")


def _text_grammar(source: str, param: str) -> Grammar:
    """Return a grammar in the notation of llama.cpp, whose rules have `::=`, or in Lark's."""
    is_gbnf = _GBNF_RULE.search(source, 0, MAX_GRAMMAR_CHARS)  # a longer one is refused
    return Grammar("gbnf" if is_gbnf else "lark", source, param)


def _choice_grammar(texts: list[str], param: str) -> Grammar:
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return Grammar("lark", f"start: {choices}", param)


def _format_grammar(form: ResponseFormat | TGIFormat, param: str) -> Grammar:
    if not isinstance(form, ResponseFormat):
        return tgi_grammar(form, param)
    if form.json_schema is not None:
        return Grammar.json_schema(form.json_schema.schema_, param)
    return Grammar.json_schema({"type": "object"} if form.schema_ is None else form.schema_, param)


_MAKERS: dict[str, Callable[[Any, str], Grammar]] = {
    "response_format": _format_grammar,
    "regex": partial(Grammar, "regex"),
    "guided_regex": partial(Grammar, "regex"),
    "grammar": _text_grammar,
    "guided_grammar": _text_grammar,
    "ebnf": _text_grammar,
    "json_": Grammar.json_schema,
    "json_schema": Grammar.json_schema,
    "guided_json": Grammar.json_schema,
    "json_object": lambda _, param: Grammar.json_schema({"type": "object"}, param),
    "choice": _choice_grammar,
    "guided_choice": _choice_grammar,
    "structured_outputs": StructuredOutputs.grammar_of,
}


class StructuredFields(RequestBody):
    """The fields that constrain the text."""

    response_format: AnyFormat | None = Field(
        None,
        description="`text`, `json_object` (perhaps with `schema`), `json_schema` with "
        "`json_schema.schema`, "
        "or a `grammar` of /generate.",
    )
    regex: str | None = Field(None, description="A regular expression that the whole text matches.")
    grammar: str | None = Field(
        None,
        description="A grammar in Lark's notation, whose rule `start` derives the text, or in "
        "llama.cpp's (GBNF), whose rule is `root`.",
    )
    json_schema: JSONText | None = Field(
        None, description="A JSON schema, or its text, as llama.cpp and SGLang have it."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="As vLLM: `json`, `regex`, `choice`, `grammar` or `json_object`."
    )
    guided_json: JSONText | None = Field(None, description="vLLM's name for `json_schema`.")
    guided_regex: str | None = Field(None, description="vLLM's name for `regex`.")
    guided_choice: Choices | None = Field(None, description="vLLM's: texts, one of which comes.")
    guided_grammar: str | None = Field(None, description="vLLM's name for `grammar`.")
    ebnf: str | None = Field(None, description="SGLang's name for `grammar`.")

    @model_validator(mode="after")
    def _check_one_grammar(self) -> Self:
        if len(given := list(self._grammar_fields())) > 1:
            raise ValueError(f"{' and '.join(given)} each constrain the text; give one of them")
        return self

    def _grammar_fields(self) -> Iterator[str]:
        for name in _MAKERS:
            value = getattr(self, name, None)
            if value is not None and getattr(value, "type", "") != "text":
                yield name

    def any_grammar(self) -> Grammar | None:
        """Return the grammar that was given in any of the fields."""
        for name in self._grammar_fields():
            return _MAKERS[name](getattr(self, name), name)
        return None

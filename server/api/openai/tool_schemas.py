"""The tools of a chat, and the choice of those that the model may or must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic import ValidatorFunctionWrapHandler as Validate

from kvasir.server.api.openai.schemas import Part
from kvasir.server.api.schemas import (
    Items,
    RequestBody,
)


def _require_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError(f"must be a schema of type object, not {schema['type']!r}")
    return schema


ObjectSchema = Annotated[dict[str, Any], AfterValidator(_require_object)]


class Function(Part):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: ObjectSchema | None = Field(
        None, description="JSON schema of its arguments. Default: it has none."
    )
    strict: bool = Field(False, description="Hold optional calls to the schema too.")

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments; without parameters, of none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(Part):
    """A tool that the model may call; `given` is as the client wrote it, for templates."""

    type: Literal["function"]
    function: Function
    _given: dict[str, Any]

    @model_validator(mode="wrap")
    @classmethod
    def _keep_given(cls, values: Any, validate: Validate) -> Self:
        tool: Self = validate(values)
        tool._given = values
        return tool

    @property
    def given(self) -> dict[str, Any]:
        """The tool with its keys in the client's order."""
        return self._given


class FunctionName(RequestBody):
    """The name of a function."""

    name: str


class NamedTool(RequestBody):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedList(RequestBody):
    """Some of the tools. mode: whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedTools(RequestBody):
    """The tools that may be called, of those that the model sees."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


_CHOICES = ("none", "auto", "required", "any")


def check_tool_choice(value: object) -> object:
    """Return a choice of tools, unless it is neither a word nor an object."""
    if isinstance(value, dict) or value in _CHOICES:
        return "required" if value == "any" else value
    raise ValueError(
        f"must be {', '.join(_CHOICES)}, "
        '{"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …}'
    )


def kind_of_choice(value: object) -> str:
    """Return the tag of a choice of tools, which no field of a body has as its name."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<some>" if kind == "allowed_tools" else "<one>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<one>")]
    | Annotated[AllowedTools, Tag("<some>")],
    Discriminator(kind_of_choice),
]

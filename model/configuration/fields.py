"""The types of a configuration's fields, and the error of what they may not hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from kvasir.model.platform.suggestions import first_problem

Size = Annotated[int, Field(strict=True, gt=0, le=2**31 - 1)]
Positive = Annotated[float, Field(strict=True, gt=0.0, allow_inf_nan=False)]
Turns = Annotated[float, Field(strict=True, ge=1e-6, le=1e6, allow_inf_nan=False)]
DropoutRate = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]
T = TypeVar("T")
_names: set[str] = set()  # of all fields, to suggest one for another


class ConfigError(ValueError):
    """A configuration that no decoder can be built from; its message names the field and value."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def checked(title: str) -> Callable[[type[T]], type[T]]:
    """Return what makes a class a frozen dataclass that checks its fields, or raises ConfigError.

    title: of the class in errors.
    """

    def decorate(kind: type[T]) -> type[T]:
        config = ConfigDict(extra="forbid", title=title)
        made: Any = dataclass(config=config, frozen=True, slots=True, kw_only=True)(kind)
        construct = made.__init__
        _names.update(made.__dataclass_fields__)

        @functools.wraps(construct)
        def init(self: T, /, **values: Any) -> None:
            try:
                construct(self, **values)
            except ValidationError as error:
                raise ConfigError(first_problem(error, _names)) from None
            except TypeError as error:  # a field has pydantic's name for self
                raise ConfigError(str(error)) from None

        made.__init__ = init
        result: type[T] = made
        return result

    return decorate

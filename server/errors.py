"""The exception tree: each class is one HTTP status, one error type and one code.

KvasirError
├── InvalidRequestError         400 invalid_request_error
│   └── ContextLengthError      400 context_length_exceeded
├── AuthenticationError         401 authentication_error
├── NotFoundError               404 not_found
│   └── ModelNotFoundError      404 model_not_found
├── MethodNotAllowedError       405 method_not_allowed
├── RequestTooLargeError        413 request_too_large
├── OverloadedError             429 overloaded
├── HeadTooLargeError           431 request_head_too_large
├── UnavailableError            503 unavailable
├── DeadlineExceededError       504 deadline_exceeded
└── EngineError                 500 internal_error

`StartupError` stands apart: it ends the process with one line on standard error, before anything is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

OverloadLimit = Literal["tokens", "deadline", "key"]


class KvasirError(Exception):
    """An error that a client is told about. `param` names the offending field, `retry_after` is in seconds."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response beside those that every response has."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    @property
    def reason(self) -> str:
        """The most specific name there is, for metrics."""
        return self.code or self.type

    @classmethod
    def reasons(cls) -> Iterator[str]:
        """Every reason that an error of this class or of those below it may have."""
        yield cls.code or cls.type
        for kind in cls.__subclasses__():
            yield from kind.reasons()


class InvalidRequestError(KvasirError):
    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class AuthenticationError(KvasirError):
    status = 401
    type = "authentication_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class NotFoundError(KvasirError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class MethodNotAllowedError(KvasirError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTooLargeError(KvasirError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class OverloadedError(KvasirError):
    """`limit` tells those limits apart, in metrics, that are not the queue's."""

    status = 429
    type = "overloaded"

    def __init__(
        self, message: str, *, retry_after: int, limit: OverloadLimit | None = None
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.limit = limit

    @property
    def reason(self) -> str:
        return f"{self.type}_{self.limit}" if self.limit else self.type

    @classmethod
    def reasons(cls) -> Iterator[str]:
        yield cls.type
        yield from (f"{cls.type}_{limit}" for limit in get_args(OverloadLimit))


class HeadTooLargeError(KvasirError):
    status = 431
    type = "invalid_request_error"
    code = "request_head_too_large"


class UnavailableError(KvasirError):
    status = 503
    type = "unavailable"


class DeadlineExceededError(KvasirError):
    status = 504
    type = "deadline_exceeded"

    @property
    def headers(self) -> dict[str, str]:
        """Clients retry a 504 by themselves, which would only meet the deadline again."""
        return {"x-should-retry": "false"}


class EngineError(KvasirError):
    """The engine failed; the message carries the request id, never a stack trace."""


class StartupError(Exception):
    """The server cannot start: the message is one line with the cause and the mend."""

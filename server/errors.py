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

`StartupError` stands apart: it ends the process before anything is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

OverloadLimit = Literal["tokens", "deadline", "key"]


class KvasirError(Exception):
    """An answer to a client. `param` names the field at fault, `retry_after` is in seconds."""

    status = 500
    type = "invalid_request_error"
    code: str | None = None
    extra_headers: ClassVar[dict[str, str]] = {}

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """The headers that only this error's response has."""
        if self.retry_after is None:
            return self.extra_headers
        return self.extra_headers | {"retry-after": str(self.retry_after)}

    @property
    def reason(self) -> str:
        """The most specific name of the error, for metrics."""
        return self.code or self.type

    @classmethod
    def reasons(cls) -> Iterator[str]:
        """Yield each reason that an error of this class or of its subclasses may have."""
        yield cls.code or cls.type
        for kind in cls.__subclasses__():
            yield from kind.reasons()


class InvalidRequestError(KvasirError):
    """A request that is malformed, out of range or not supported."""

    status = 400


class ContextLengthError(InvalidRequestError):
    """A request of more tokens than the model or the server takes."""

    code = "context_length_exceeded"


class AuthenticationError(KvasirError):
    """A request without a known API key."""

    status = 401
    type = "authentication_error"
    extra_headers: ClassVar[dict[str, str]] = {"www-authenticate": "Bearer"}


class NotFoundError(KvasirError):
    """A path that does not exist."""

    status = 404
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """A model that is not served."""

    code = "model_not_found"


class MethodNotAllowedError(KvasirError):
    """A method that a path does not take."""

    status = 405
    code = "method_not_allowed"


class RequestTooLargeError(KvasirError):
    """A body that is longer than allowed."""

    status = 413
    code = "request_too_large"


class OverloadedError(KvasirError):
    """A request that was shed. `limit` is for metrics; None is the limit of the queue."""

    status = 429
    type = "overloaded"

    def __init__(
        self, message: str, *, retry_after: int, limit: OverloadLimit | None = None
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.limit = limit

    @property
    def reason(self) -> str:
        """The name of the error and of its limit."""
        return f"{self.type}_{self.limit}" if self.limit else self.type

    @classmethod
    def reasons(cls) -> Iterator[str]:
        """Yield a reason for each limit."""
        yield cls.type
        yield from (f"{cls.type}_{limit}" for limit in get_args(OverloadLimit))


class HeadTooLargeError(KvasirError):
    """A URL and headers, or trailers, that are longer than allowed."""

    status = 431
    code = "request_head_too_large"


class UnavailableError(KvasirError):
    """A server that is loading its model or shutting down."""

    status = 503
    type = "unavailable"


class DeadlineExceededError(KvasirError):
    """A deadline that has passed. Most clients retry a 504, which would only fail again."""

    status = 504
    type = "deadline_exceeded"
    extra_headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class EngineError(KvasirError):
    """A failure of the engine. The message carries the request id, never a stack trace."""

    type = "internal_error"


class StartupError(Exception):
    """A server that cannot start. The message is one line: the cause, and what to do."""

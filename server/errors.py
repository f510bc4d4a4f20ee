"""The exception tree: each class is one HTTP status, one error type and one code.

`StartupError` stands apart: it ends the process before anything is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

OverloadLimit = Literal["tokens", "deadline", "key", "key_tokens", "texts", "answers"]

_LONGEST = 2000  # characters of a message, which may quote what a client sent


class KvasirError(Exception):
    """An answer to a client. `param` names the field at fault, `retry_after` is in seconds.

    reason: the most specific name of the error, for metrics. headers: what only its response has.
    """

    status: ClassVar[int]
    type: ClassVar[str]
    code: ClassVar[str | None]

    def __init_subclass__(
        cls, *, status: int, error_type: str = "invalid_request_error", code: str | None = None
    ) -> None:
        cls.status, cls.type, cls.code = status, error_type, code

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]}…"
        super().__init__(message)
        self.message = message
        self.param = None if param is None else param[:_LONGEST]
        self.retry_after = retry_after
        self.reason = self.code or self.type
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    @classmethod
    def reasons(cls) -> Iterator[str]:
        """Yield each reason that an error of a subclass may have."""
        for kind in cls.__subclasses__():
            yield kind.code or kind.type
            yield from kind.reasons()


class InvalidRequestError(KvasirError, status=400):
    """A request that is malformed, out of range or not supported."""


class UnknownFieldError(InvalidRequestError, status=400):
    """A field that is unknown or not supported; its name is what the client wrote."""


class ContextLengthError(InvalidRequestError, status=400, code="context_length_exceeded"):
    """A request of more tokens than the model or the server takes."""


class AuthenticationError(KvasirError, status=401, error_type="authentication_error"):
    """A request without a known API key."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers["www-authenticate"] = "Bearer"


class ForbiddenError(KvasirError, status=403, error_type="permission_error"):
    """A request of a web page that may not call this server, or to a name that is not its own."""


class NotFoundError(KvasirError, status=404, code="not_found"):
    """A path that does not exist."""


class ModelNotFoundError(NotFoundError, status=404, code="model_not_found"):
    """A model that is not served."""


class MethodNotAllowedError(KvasirError, status=405, code="method_not_allowed"):
    """A method that a path does not take."""


class ConflictError(KvasirError, status=409, code="conflict"):
    """A change that the state of a file or a batch does not allow."""


class RequestTooLargeError(KvasirError, status=413, code="request_too_large"):
    """A body that is longer than allowed, or for which the files of batches leave no room."""


class OverloadedError(KvasirError, status=429, error_type="overloaded"):
    """A refusal under load. `limit` is for metrics; None is the queue, grammars or explanations."""

    def __init__(
        self, message: str, *, retry_after: int, limit: OverloadLimit | None = None
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        if limit is not None:
            self.reason = f"{self.type}_{limit}"

    @classmethod
    def reasons(cls) -> Iterator[str]:
        """Yield the reason of each named limit; that of the others is the type."""
        yield from (f"{cls.type}_{limit}" for limit in get_args(OverloadLimit))


class HeadTooLargeError(KvasirError, status=431, code="request_head_too_large"):
    """A URL and headers, or trailers, that are longer than allowed."""


class UnavailableError(KvasirError, status=503, error_type="unavailable"):
    """A server that loads its model, shuts down, or lacks time, connections or memory."""


class DeadlineExceededError(KvasirError, status=504, error_type="deadline_exceeded"):
    """A deadline that has passed. Most clients retry a 504, which would only fail again."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers["x-should-retry"] = "false"


class InsufficientStorageError(KvasirError, status=507, error_type="insufficient_storage"):
    """A change that does not fit on the server's disk."""


class EngineError(KvasirError, status=500, error_type="internal_error"):
    """A failure of the engine. The message carries the request id, never a stack trace."""


class StartupError(Exception):
    """A server that cannot start. The message is one line: the cause, and what to do."""

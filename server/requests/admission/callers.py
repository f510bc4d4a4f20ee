"""The sender of requests: the name of an API key, its limits, and what it uses of them."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.server.errors import OverloadedError


@dataclass(slots=True, eq=False)
class Caller:
    """All keys of one name. Without keys, everybody, without a name and limits.

    salt: of its prefix cache. concurrency: requests in flight; None is any number.
    tokens_per_minute: of prompts and answers; None is any number. n_used: tokens used or reserved,
    of which so many are forgotten in a minute. A request reserves its `max_tokens` when it begins,
    and gives back at its end what it has not used; so only the last one can exceed the limit, and
    the next one waits the longer.
    """

    name: str = ""
    salt: bytes = b""
    concurrency: int | None = None
    tokens_per_minute: int | None = None
    n_in_flight: int = 0
    n_used: float = 0.0
    _updated_at: float = 0.0

    def check_tokens(self, now: float) -> None:
        """Raise OverloadedError while the tokens of a minute are used; `now` is in seconds."""
        limit, seconds = self.tokens_per_minute, now - self._updated_at
        self._updated_at = now
        if limit is None:
            self.n_used = 0.0
            return
        self.n_used = max(0.0, self.n_used - seconds * limit / 60)
        if self.n_used >= limit:
            raise OverloadedError(
                f"this API key may use {limit} tokens a minute, and {self.n_used:.0f} are used by "
                "prompts and answers, or reserved for what runs; wait, or ask for fewer",
                retry_after=int((self.n_used - limit) * 60 / limit) + 1,
                limit="key_tokens",
            )

"""The form of the responses of OpenAI's routes, but for their choices."""

from __future__ import annotations

from abc import abstractmethod
from time import time
from typing import Any

from server.api.openai.schemas import OpenAIBody
from server.api.responses import DONE, Formatter, compact, event
from server.requests.completion import Choice, Delta
from server.requests.service import Service


class OpenAIFormatter(Formatter):
    """The form of a response, whole or in chunks, around its choices."""

    end = DONE

    def __init__(self, service: Service, body: OpenAIBody, response_id: str, kind: str) -> None:
        super().__init__(service)
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._with_running_usage = options is not None and options.continuous_usage_stats
        self._n_shown = 0  # tokens of the deltas so far; more may have been generated
        self._head = {
            "id": response_id,
            "object": kind,
            "created": int(time()),
            "model": service.settings.model_name,
        }
        self._prefix = compact(self._head)[:-1]

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""

    @abstractmethod
    def events(self, delta: Delta) -> bytes:
        """Return the events for a delta, if it has anything to show."""

    def chunk(self, delta: Delta) -> bytes:
        """Return the events for a delta, with the usage so far if wanted."""
        self._n_shown += delta.token_id is not None
        return self.events(delta)

    def event(self, choice: str) -> bytes:
        """Return an event with one choice, given as JSON."""
        usage = ""
        if self._with_running_usage:
            usage = f',"usage":{compact(self._usage(self._n_shown))}'
        elif self._with_usage:
            usage = ',"usage":null'
        return event(f'{self._prefix},"choices":[{choice}]{usage}}}')

    def tail(self) -> bytes:
        """Return the event with the usage, if wanted, and the end."""
        if not self._with_usage:
            return DONE
        usage = self._usage(self.completion.n_completion_tokens)
        return event(compact({**self._head, "choices": [], "usage": usage})) + DONE

    def whole(self) -> dict[str, Any]:
        """Return the body of a finished completion."""
        choices = [self.choice(choice) for choice in self.completion.choices]
        usage = self._usage(self.completion.n_completion_tokens)
        return {**self._head, "choices": choices, "usage": usage}

    def _usage(self, n_generated: int) -> dict[str, Any]:
        n_prompt = self.completion.n_prompt_tokens
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {"cached_tokens": self.completion.n_cached_tokens},
        }
